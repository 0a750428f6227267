"""Rules about what fills the device: state, activations, copies, buffers, fragmentation."""

from __future__ import annotations

from fsdp_doctor.postmortem.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "cuda-graph-pools",
        "phase == 'graph_capture'",
        0.85,
        "it came in the capture of CUDA graphs",
    ),
    Rule(
        "cuda-graph-pools", "private_share >= 0.15", 0.6, "private pools hold {private}", "private"
    ),
    Rule(
        "cuda-graph-pools",
        "private_share >= 0.03 and private_share < 0.15",
        0.25,
        "private pools hold {private}",
        "private",
    ),
    Rule(
        "checkpoint-copies",
        "phase == 'checkpoint_save'",
        0.85,
        "it came while a checkpoint was saved",
    ),
    Rule(
        "checkpoint-copies",
        "phase == 'checkpoint_load'",
        0.75,
        "it came while a checkpoint was loaded",
    ),
    Rule("evaluation-accumulation", "phase == 'evaluation'", 0.6, "it came in an evaluation"),
    Rule(
        "evaluation-accumulation",
        "phase == 'evaluation' and (mentions(top, 'concat') or mentions(top, "
        "'pad_across') or mentions(top, 'gather') or mentions(top, 'torch.cat') or "
        "mentions(top, 'accumul'))",
        0.6,
        "outputs of batches were being joined",
    ),
    Rule(
        "evaluation-accumulation",
        "phase == 'evaluation' and logit_words",
        0.2,
        "and logits were being handled",
    ),
    Rule(
        "leak",
        "growth",
        0.85,
        "memory rose from {first_bytes} at step {first_step} to {last_bytes} at step {last_step}",
        "grown",
    ),
    Rule(
        "leak",
        "retried and device_kind",
        0.6,
        "an earlier out of memory was caught and training went on inside the `except`",
    ),
    Rule(
        "logits",
        "logit_words and device_kind and phase != 'checkpoint_save'",
        0.75,
        "the failing code works on logits",
    ),
    Rule(
        "logits",
        "logit_words and request_over_allocated >= 0.1",
        0.3,
        "a single request of {requested}",
        "requested",
    ),
    Rule(
        "logits",
        "device_kind and not has_frames and requested >= 4000000000 and "
        "request_over_allocated >= 0.12 and not early and fragmentation != 'yes'",
        0.25,
        "a single request of {requested}: the size of logits",
        "requested",
        guess=True,
    ),
    Rule(
        "optimizer-temporaries",
        "device_kind and phase == 'optimizer' and (mentions(top, '_multi_tensor') or "
        "mentions(top, '_foreach') or mentions(top, 'multi_tensor_apply'))",
        0.8,
        "a multi-tensor (foreach) optimizer step",
    ),
    Rule(
        "optimizer-temporaries",
        "device_kind and phase == 'optimizer' and not mentions(top, '_init_group')",
        0.35,
        "it came in the optimizer step",
    ),
    Rule(
        "optimizer-temporaries",
        "device_kind and phase == 'optimizer' and moment == 'steady' and not mentions(top, "
        "'_init_group')",
        0.25,
        "its state was made in an earlier step",
    ),
    Rule(
        "state-does-not-fit",
        "device_kind and phase == 'optimizer' and (mentions(top, '_init_group') or "
        "mentions(top, 'zeros_like') or mentions(top, 'exp_avg ='))",
        0.75,
        "the optimizer's state was being created",
    ),
    Rule(
        "state-does-not-fit",
        "device_kind and phase == 'optimizer' and moment != 'steady'",
        0.3,
        "the first optimizer step creates its state",
    ),
    Rule(
        "state-does-not-fit",
        "device_kind and phase in ['load', 'wrap', 'init']",
        0.65,
        "it came before training, in phase {phase}",
    ),
    Rule(
        "state-does-not-fit",
        "device_kind and phase == 'wrap' and request_over_allocated >= 0.4",
        0.5,
        "the request is about as large as all that is allocated: one more copy of the model",
        "requested",
    ),
    Rule(
        "state-does-not-fit",
        "kind == 'device_oom' and moment == 'first_step' and phase != 'optimizer'",
        0.4,
        "it came in the first step",
        guess=True,
    ),
    Rule(
        "state-does-not-fit",
        "device_kind and full and moment == 'first_step'",
        0.3,
        "{allocated} are allocated on a device of {total}",
        "allocated",
        guess=True,
    ),
    Rule(
        "state-does-not-fit",
        "kind == 'device_oom' and full and moment == 'unknown' and phase in ['unknown', "
        "'forward', 'backward']",
        0.25,
        "{allocated} are allocated on a device of {total}",
        "allocated",
        guess=True,
    ),
    Rule(
        "state-does-not-fit",
        "kind == 'device_oom' and set(allocated_share) and not full and moment != "
        "'steady' and not growth and phase in ['unknown', 'forward', 'backward', 'data']",
        0.28,
        "no step was finished according to the logs",
        guess=True,
    ),
    Rule(
        "state-does-not-fit",
        "quantized and early",
        -0.2,
        "but most of the model is frozen or quantized",
    ),
    Rule(
        "activations",
        "device_kind and computing and moment == 'steady'",
        0.45,
        "it came in phase {phase} after steps that fitted",
        guess=True,
    ),
    Rule(
        "activations",
        "device_kind and computing and moment != 'steady'",
        0.3,
        "it came in phase {phase}",
        guess=True,
    ),
    Rule(
        "activations",
        "device_kind and layer_words and computing",
        0.2,
        "in the code of a layer",
        guess=True,
    ),
    Rule(
        "activations",
        "kind == 'device_oom' and full and moment in ['steady', 'unknown'] and phase in "
        "['unknown', 'forward', 'backward']",
        0.25,
        "{allocated} are live tensors",
        "allocated",
        guess=True,
    ),
    Rule(
        "activations",
        "flushes >= 1",
        0.5,
        "{flushes:.0f} cache flushes in a step: the pool is full at every peak",
    ),
    Rule(
        "activations",
        "peak_over_resident >= 3",
        0.4,
        "the peak is {peak_over_resident:.1f} times what stays between steps",
    ),
    Rule(
        "activations",
        "device_kind and moment == 'steady' and scope == 'one_rank'",
        0.2,
        "only one rank failed, as with a longer batch",
        guess=True,
    ),
    Rule(
        "activations",
        "kind == 'device_oom' and phase == 'unknown' and moment == 'unknown'",
        0.12,
        "nothing tells the phase",
        guess=True,
    ),
    Rule(
        "fragmentation",
        "fragmentation == 'yes'",
        0.6,
        "{idle} lie idle in the pool for a request of {requested}",
        "idle",
        guess=True,
    ),
    Rule(
        "fragmentation",
        "fragmentation == 'yes' and moment == 'steady'",
        0.3,
        "and earlier steps fitted",
        guess=True,
    ),
    Rule(
        "fragmentation",
        "fragmentation == 'yes' and mentions(config, 'max_split_size')",
        0.2,
        "max_split_size_mb keeps large blocks from being shared",
    ),
    Rule(
        "fragmentation",
        "fragmentation == 'yes' and mentions(config, 'expandable_segments:true')",
        -0.5,
        "but expandable segments are on",
    ),
    Rule(
        "fragmentation",
        "fragmentation == 'combined'",
        0.3,
        "idle and free together would have been enough",
        "idle",
        guess=True,
    ),
    Rule(
        "fragmentation",
        "fragmentation == 'minor' and not has_frames",
        0.1,
        "{idle} lie idle, less than 3 % of the device",
        "idle",
    ),
    Rule(
        "fragmentation",
        "recovered >= 1 and kind == 'device_oom'",
        0.2,
        "{recovered} retries before",
    ),
    Rule(
        "fragmentation",
        "form == 'hidden-assert'",
        0.1,
        "an assertion of the caching allocator under memory pressure",
    ),
    Rule(
        "find-unused-parameters",
        "unused_flag",
        0.9,
        "DDP itself says that the flag finds nothing and costs a traversal a step",
    ),
    Rule(
        "communication-buffers",
        "device_kind and collective_words and phase not in ['wrap', 'checkpoint_save', "
        "'checkpoint_load', 'load', 'evaluation']",
        0.45,
        "the failing code gathers or reduces",
    ),
    Rule(
        "communication-buffers",
        "device_kind and collective_words and phase not in ['wrap', 'checkpoint_save', "
        "'checkpoint_load', 'load', 'evaluation'] and (request_over_allocated >= 0.08 "
        "or mentions(top, 'bucket') or mentions(top, '_sync_params'))",
        0.25,
        "and its buffer is a large part of what is allocated",
        "requested",
    ),
    Rule(
        "logits",
        "phase == 'evaluation' and logit_words",
        -0.35,
        "but in an evaluation, which keeps outputs of batches",
    ),
    Rule(
        "evaluation-accumulation",
        "phase == 'evaluation' and mentions(top, 'append')",
        0.4,
        "outputs are being kept in a list",
    ),
    Rule(
        "communication-buffers",
        "device_kind and phase == 'wrap' and collective_words",
        0.3,
        "buffers of the wrapper were being made",
    ),
    Rule(
        "wrap-granularity",
        "mixed_grad",
        0.85,
        "a unit holds frozen and trainable parameters: gradients of all are made",
    ),
    Rule(
        "wrap-granularity",
        "device_kind and mentions(top, '_unshard') and request_over_allocated >= 0.2",
        0.5,
        "one unit of {requested} was to be gathered",
        "requested",
    ),
    Rule(
        "gradient-sync",
        "device_kind and (mentions(frames, 'no_sync') or mentions(frames, 'accumulate_unsharded'))",
        0.45,
        "training accumulates without synchronisation",
    ),
    Rule(
        "stream-reuse",
        "mentions(frames, 'record_stream') or mentions(around, 'record_stream')",
        0.4,
        "record_stream is in sight",
    ),
    Rule(
        "unsharded-copy",
        "device_kind and (mentions(frames, 'ref_model') or mentions(frames, "
        "'reference_model') or mentions(frames, 'deepcopy') or mentions(frames, 'ema.') "
        "or mentions(frames, 'ema_model'))",
        0.55,
        "a second model is in the failing code",
    ),
    Rule(
        "precision-upcast",
        "pool_kind and (mentions(top, '.float()') or mentions(top, 'upcast') or "
        "mentions(top, 'torch.float32') or mentions(top, 'to_fp32') or mentions(top, "
        "'_cast_'))",
        0.4,
        "the failing code makes an fp32 copy",
    ),
    Rule("fp8-copies", "fp8 and device_kind", 0.6, "FP8 is on"),
    Rule(
        "fp8-copies",
        "device_kind and mentions(top, 'transformer_engine') and (mentions(top, "
        "'transpose') or mentions(top, 'cast_to') or mentions(top, 'quantize'))",
        0.3,
        "Transformer Engine was copying a weight",
    ),
)
