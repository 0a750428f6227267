#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node 8 pretrain_gpt.py \
  --num-layers 8 --hidden-size 2048 --num-attention-heads 16 \
  --seq-length 2048 --max-position-embeddings 2048 \
  --micro-batch-size 1 --global-batch-size 64 --bf16 \
  --use-megatron-fsdp --overlap-grad-reduce --overlap-param-gather \
  --sequence-parallel
