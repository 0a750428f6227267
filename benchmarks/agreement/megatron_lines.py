"""Megatron-LM command lines, own ones: how many ranks, which flags, since which megatron-core."""

from __future__ import annotations

MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024"
    " --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 256 --train-iters 10"
    " --vocab-size 32000 --lr 0.001"
)
_DIST = "--bf16 --use-distributed-optimizer"
_FSDP = "--bf16 --use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor"
_FULL = f"{_FSDP} --data-parallel-sharding-strategy optim_grads_params"
_AWARE = f"{_DIST} --use-precision-aware-optimizer"
_MOE = f"{_DIST} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024"
_OLD, _NEW = (0, 12), (0, 17)

LINES: dict[str, tuple[int, str, tuple[int, int]]] = {
    "float32": (8, "", _OLD),
    "DDP bf16": (8, "--bf16", _OLD),
    "DDP fp16": (8, "--fp16", _OLD),
    "DDP fp16, sums in float32": (8, "--fp16 --accumulate-allreduce-grads-in-fp32", _OLD),
    "DDP reduces in bf16": (8, "--bf16 --grad-reduce-in-bf16", _OLD),
    "DDP overlaps": (8, "--bf16 --overlap-grad-reduce", _OLD),
    "DDP overlaps, 64 ranks": (64, "--bf16 --overlap-grad-reduce", _OLD),
    "DDP overlaps, own bucket": (8, "--bf16 --overlap-grad-reduce --ddp-bucket-size 5000000", _OLD),
    "DDP bucket without overlap": (8, "--bf16 --ddp-bucket-size 5000000", _OLD),
    "DDP averages in the collective": (8, "--bf16 --ddp-average-in-collective", _OLD),
    "distributed optimizer": (8, _DIST, _OLD),
    "distributed optimizer overlaps": (
        8,
        f"{_DIST} --overlap-grad-reduce --overlap-param-gather",
        _OLD,
    ),
    "distributed optimizer, padded buckets": (
        8,
        f"{_DIST} --overlap-grad-reduce --ddp-pad-buckets-for-high-nccl-busbw",
        _OLD,
    ),
    "distributed optimizer, bf16 gradients": (
        8,
        f"{_DIST} --grad-reduce-in-bf16 --overlap-grad-reduce",
        _OLD,
    ),
    "distributed optimizer, two instances": (
        8,
        f"{_DIST} --num-distributed-optimizer-instances 2",
        _OLD,
    ),
    "distributed optimizer, fp32 accumulation": (
        8,
        f"{_DIST} --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation",
        (0, 16),
    ),
    "Megatron-FSDP no_shard": (8, f"{_FSDP} --data-parallel-sharding-strategy no_shard", _OLD),
    "Megatron-FSDP optim": (8, f"{_FSDP} --data-parallel-sharding-strategy optim", _OLD),
    "Megatron-FSDP optim_grads": (
        8,
        f"{_FSDP} --data-parallel-sharding-strategy optim_grads",
        _OLD,
    ),
    "Megatron-FSDP optim_grads_params": (8, _FULL, _OLD),
    "Megatron-FSDP bf16 gradients": (8, f"{_FULL} --grad-reduce-in-bf16", _OLD),
    "Megatron-FSDP unit": (8, f"{_FULL} --suggested-communication-unit-size 200000000", _OLD),
    "Megatron-FSDP user buffers": (8, f"{_FULL} --use-nccl-ub", (0, 14)),
    "Megatron-FSDP double buffer": (8, f"{_FULL} --fsdp-double-buffer", (0, 14)),
    "Megatron-FSDP gradient dtypes": (
        8,
        f"{_FULL} --megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype bf16",
        _NEW,
    ),
    "Megatron-FSDP no main weights": (8, f"{_FULL} --megatron-fsdp-main-params-dtype auto", _NEW),
    "Megatron-FSDP float32": (
        8,
        _FULL.replace("--bf16 ", ""),
        _OLD,
    ),
    "precision-aware": (8, _AWARE, _OLD),
    "precision-aware, bf16 states": (
        8,
        f"{_AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        _OLD,
    ),
    "precision-aware, fp8 states": (
        8,
        f"{_AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8 --main-params-dtype fp16",
        _OLD,
    ),
    "precision-aware, bf16 gradients": (8, f"{_AWARE} --main-grads-dtype bf16", _OLD),
    "optimizer offload": (
        8,
        f"{_DIST} --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        _OLD,
    ),
    "optimizer offload overlaps": (
        8,
        f"{_DIST} --optimizer-cpu-offload --optimizer-offload-fraction 1.0"
        " --overlap-cpu-optimizer-d2h-h2d",
        _OLD,
    ),
    "activation offload": (
        8,
        "--bf16 --fine-grained-activation-offloading --offload-modules core_attn attn_proj",
        (0, 16),
    ),
    "recompute full, uniform": (
        8,
        "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        _OLD,
    ),
    "recompute full, block": (
        8,
        "--bf16 --recompute-granularity full --recompute-method block --recompute-num-layers 4",
        _OLD,
    ),
    "recompute full, distributed": (
        8,
        "--bf16 --tensor-model-parallel-size 2 --recompute-granularity full"
        " --recompute-method uniform --recompute-num-layers 1 --distribute-saved-activations",
        _OLD,
    ),
    "recompute selective": (8, "--bf16 --recompute-granularity selective", _OLD),
    "recompute activations": (8, "--bf16 --recompute-activations", _OLD),
    "recompute modules": (
        8,
        "--bf16 --recompute-granularity selective --recompute-modules mlp layernorm",
        _OLD,
    ),
    "tensor and sequence parallel": (
        8,
        f"{_DIST} --tensor-model-parallel-size 2 --sequence-parallel",
        _OLD,
    ),
    "tensor parallel overlaps": (
        8,
        f"{_DIST} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
        _OLD,
    ),
    "pipeline parallel": (8, f"{_DIST} --pipeline-model-parallel-size 2", _OLD),
    "pipeline parallel, interleaved": (
        8,
        f"{_DIST} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
        " --overlap-grad-reduce --overlap-param-gather --align-param-gather",
        _OLD,
    ),
    "context parallel": (8, f"{_DIST} --context-parallel-size 2", _OLD),
    "context parallel, own bucket": (
        16,
        f"{_DIST} --context-parallel-size 4 --overlap-grad-reduce --ddp-bucket-size 8000000",
        _OLD,
    ),
    "expert parallel": (8, f"{_MOE} --expert-model-parallel-size 4", _OLD),
    "expert and tensor parallel": (
        8,
        f"{_MOE} --expert-model-parallel-size 2 --tensor-model-parallel-size 2"
        " --expert-tensor-parallel-size 1 --sequence-parallel",
        _OLD,
    ),
    "all parallel sizes": (
        32,
        f"{_DIST} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
        " --context-parallel-size 2 --sequence-parallel --overlap-grad-reduce",
        _OLD,
    ),
    "Megatron-FSDP and tensor parallel": (8, f"{_FULL} --tensor-model-parallel-size 2", _OLD),
    "fp8": (8, f"{_DIST} --fp8-format hybrid", _OLD),
    "fp8, e4m3, tensorwise": (8, f"{_DIST} --fp8-format e4m3 --fp8-recipe tensorwise", _OLD),
    "fp8 gathered": (8, f"{_DIST} --fp8-format hybrid --fp8-param-gather", _OLD),
    "grouped queries, SwiGLU": (
        8,
        "--bf16 --group-query-attention --num-query-groups 2 --swiglu --ffn-hidden-size 1408",
        _OLD,
    ),
    "clipping and decay": (8, "--bf16 --clip-grad 0.5 --weight-decay 0.1", _OLD),
}


def launch(ranks: int, flags: str) -> str:
    """Return the script that starts a job."""
    return f"torchrun --nproc_per_node {ranks} pretrain_gpt.py {MODEL} {flags}\n"
