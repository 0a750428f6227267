"""What a block holds, by the code that asked for it: rules over Python frames, as data.

Function names were read in torch 2.6 - 2.14: ``torch/distributed/fsdp/_fully_shard`` (FSDP2),
``torch/distributed/fsdp/_flat_param.py`` and ``_runtime_utils.py`` (FSDP1),
``torch/nn/parallel/distributed.py`` (DDP); in megatron-core 0.16.1 and 0.19.2
``megatron_fsdp/param_and_grad_buffer.py``, which the standalone package has too.
"""

from __future__ import annotations

from functools import lru_cache

from fsdp_doctor.memory.events import Label
from fsdp_doctor.model.memory import Category

_MODULE_CALL = "torch/nn/modules/module.py"
_CALLS = frozenset({"_call_impl", "inner"})

_UNSHARDED = Label(Category.UNSHARDED_PARAMETERS)
_CAST = Label(Category.UNSHARDED_PARAMETERS, "mixed_precision_cast")
_GATHER = Label(Category.COMMUNICATION, "all_gather")
REDUCED = Label(Category.COMMUNICATION, "reduce_scatter")
"""Input and output of a reduce-scatter; an output that outlives backward is a sharded gradient."""
_REDUCE_CAST = Label(Category.UNSHARDED_GRADIENTS, "reduce_cast")
_ACCUMULATED = Label(Category.UNSHARDED_GRADIENTS, "accumulated")
_BUCKET = Label(Category.COMMUNICATION, "ddp_bucket")
_HOOK = Label(Category.COMMUNICATION, "communication_hook")
_BROADCAST = Label(Category.COMMUNICATION, "broadcast")
_QUEUE = Label(Category.UNSHARDED_GRADIENTS, "reduce_scatter_queue")
_GATHERED_UNIT = Label(Category.UNSHARDED_PARAMETERS, "gathered_unit")
_STATE_BUFFER = Label(Category.PARAMETERS, "parameter_and_gradient_buffer")
"""One function makes the buffers of weights and, where they share one, of gradients."""

_ANY = "*"
_RULES: tuple[tuple[str, dict[str, Label]], ...] = (
    (
        "_fully_shard/_fsdp_param.py",
        {
            "alloc_all_gather_outputs": _UNSHARDED,
            "init_all_gather_outputs": _UNSHARDED,
            "init_unsharded_param": _UNSHARDED,
            "all_gather_inputs": _CAST,
            "to_accumulated_grad_if_needed": _ACCUMULATED,
            "accumulate_unsharded_grad_if_needed": _ACCUMULATED,
            "_init_sharded_param": Label(Category.PARAMETERS, "sharding"),
            "to_sharded_post_forward": Label(Category.UNSHARDED_PARAMETERS, "post_forward_shard"),
        },
    ),
    (
        "_fully_shard/_fsdp_collectives.py",
        {
            "_get_param_all_gather_inputs": _CAST,
            "foreach_all_gather": _GATHER,
            "foreach_all_gather_copy_out": _GATHER,
            "all_gather_copy_in_cuda": _GATHER,
            "foreach_reduce": REDUCED,
            "foreach_reduce_scatter_copy_in": REDUCED,
        },
    ),
    (
        "fsdp/_flat_param.py",
        {
            "_alloc_padded_unsharded_flat_param": _UNSHARDED,
            "_use_low_precision_shard": _CAST,
            "_all_gather_flat_param": _GATHER,
            "init_flat_param_attributes": _UNSHARDED,
            "_use_unsharded_views": _UNSHARDED,
            "_init_flat_param_and_metadata": Label(Category.UNSHARDED_PARAMETERS, "flattening"),
            "shard": Label(Category.PARAMETERS, "sharding"),
            "prepare_gradient_for_optim": Label(Category.GRADIENTS, "cast"),
        },
    ),
    (
        "fsdp/_runtime_utils.py",
        {
            "_get_reduce_scatter_tensors": REDUCED,
            "_reduce_grad": REDUCED,
            "_reduce_grad_no_shard": REDUCED,
            "_post_reduce_grad_callback": REDUCED,
            "_post_backward_hook": _REDUCE_CAST,
            "_root_cast_forward_input": Label(Category.INPUTS, "cast"),
        },
    ),
    ("fsdp/_init_utils.py", {"_sync_module_params_and_buffers": _BROADCAST}),
    (
        "nn/parallel/distributed.py",
        {
            "_ddp_init_helper": _BUCKET,
            "_pre_forward": _BUCKET,
            "_rebuild_buckets": _BUCKET,
        },
    ),
    ("distributed/algorithms/ddp_comm_hooks/default_hooks.py", {_ANY: _HOOK}),
    ("distributed/algorithms/_comm_hooks/default_hooks.py", {_ANY: _HOOK}),
    (
        "torch/nn/functional.py",
        dict.fromkeys(("cross_entropy", "nll_loss"), Label(Category.LOGITS, "loss")),
    ),
    ("torch/optim/", {"_init_group": Label(Category.OPTIMIZER_STATE)}),
    (
        "megatron_fsdp/param_and_grad_buffer.py",
        {
            "main_grad_getter": _QUEUE,
            "async_bucket_gather": _GATHERED_UNIT,
            "_init_each_parameter_group_buffers": _STATE_BUFFER,
            "_alloc": Label(Category.GRADIENTS, "parameter_and_gradient_buffer"),
            "_bucket_group_gradient_reduce": Label(Category.COMMUNICATION, "reduce_scatter"),
        },
    ),
    ("distributed/device_mesh.py", {_ANY: Label(Category.COMMUNICATION, "device_mesh")}),
    ("distributed/utils.py", {"_sync_params_and_buffers": _BROADCAST}),
)


@lru_cache(maxsize=4096)
def _frame_label(frame: str) -> Label | bool | None:
    """The rule a frame matches, None, or False where a module call begins (stop there)."""
    place, _, function = frame.rpartition(" ")
    path = place.rpartition(":")[0].replace("\\", "/")
    if function in _CALLS and path.endswith(_MODULE_CALL):
        return False
    for suffix, functions in _RULES:
        if path.endswith(suffix) or (suffix.endswith("/") and suffix in path):
            label = functions.get(function) or functions.get(_ANY)
            if label is not None:
                return label
    return None


def builds_module(frames: tuple[str, ...]) -> bool:
    """Whether a module was being built or moved (``__init__``, ``to``, ``to_empty``), or one inside
    of another by a library that makes its weights itself.
    """
    inits = 0
    for frame in frames:
        place, _, function = frame.rpartition(" ")
        if "torch/nn/modules/" in place and function in ("__init__", "_apply"):
            return True
        if "core/transformer/" in place or "core/tensor_parallel/" in place:
            inits += function == "__init__"
    return inits >= 2


def by_frames(frames: tuple[str, ...]) -> Label | None:
    """What the innermost telling frame says.

    The search stops where a module is called: what encloses the call (DDP's or FSDP1's own
    ``forward``) did not ask for the memory. Frames are ``file:line function``, innermost first.
    """
    for frame in frames:
        label = _frame_label(frame)
        if label is False:
            return None
        if isinstance(label, Label):
            return label
    return None
