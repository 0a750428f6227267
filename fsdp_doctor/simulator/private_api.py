"""Every private name of torch that the simulator rests on, and the test that they are there.

``compat`` and its neighbours patch or call them; this list says which, for the docs and for the
test at start. Where a name differs between versions one of several has to be there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from fsdp_doctor.errors import InputError

TESTED = "2.13"
"""The version that the tests run with."""

_COMMON = (
    "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch._subclasses.fake_tensor:FakeTensor.fake_device",
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "torch.utils._python_dispatch:_disable_current_modes",
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.distributed.device_mesh:init_device_mesh",
    "torch.distributed.device_mesh:DeviceMesh.get_coordinate",
    "torch.cpu:Event",
    "torch.cpu:Stream",
    "torch.cpu:StreamContext",
    "torch.cpu:current_stream",
    "torch.cuda:empty_cache",
    "torch.utils:weakref",
    "torch:_C._current_autograd_node",
    "torch:_C._current_graph_task_id",
    "torch:_C._autograd._get_sequence_nr",
    "torch:_C._ExcludeDispatchKeyGuard",
    "torch:Tensor.data",
    "torch.optim.optimizer:_foreach_supported_types",
    "torch.utils._foreach_utils:_get_foreach_kernels_supported_devices",
    "torch:amp.GradScaler._maybe_opt_step",
    "torch.distributed.tensor._sharding_prop:ShardingPropagator",
    "torch:ops.aten._scaled_dot_product_flash_attention.default",
    "torch:ops.aten._scaled_dot_product_flash_attention_backward.default",
    "torch:ops.aten._scaled_dot_product_efficient_attention.default",
    "torch:ops._c10d_functional.wait_tensor.default",
    "torch.utils.flop_counter:flop_registry",
)
NAMES: dict[str, tuple[str, ...]] = {
    "ddp": (
        *_COMMON,
        "torch.nn.parallel.distributed:_verify_param_shape_across_processes",
        "torch.distributed:_compute_bucket_assignment_by_size",
        "torch.distributed:_DEFAULT_FIRST_BUCKET_BYTES",
    ),
    "fsdp1": (
        *_COMMON,
        "torch.distributed.fsdp._flat_param:_data_ptr_allocated",
        "torch.distributed.fsdp._flat_param:_same_storage",
        "torch.distributed.fsdp._flat_param:_no_dispatch_record_stream",
        "torch.distributed.fsdp._runtime_utils:_no_dispatch_record_stream",
        "torch.distributed.fsdp._init_utils:_get_compute_device",
    ),
    "fsdp2": (
        *_COMMON,
        "torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty",
        "torch.distributed.fsdp._fully_shard._fsdp_init:_get_device_from_mesh",
        "torch.distributed.fsdp._fully_shard._fully_shard:_get_device_from_mesh",
        "torch.distributed.fsdp._fully_shard._fsdp_init:_get_post_forward_mesh_info",
        "torch.distributed.fsdp._fully_shard._fully_shard:_get_post_forward_mesh_info",
    ),
}
"""Strategy -> ``module:attribute`` of what its dry run needs."""


def check_private_api(strategy: str) -> None:
    """Raise InputError when this torch lacks something that a dry run of ``strategy`` needs."""
    import torch

    missing = list(missing_names(strategy))
    if missing:
        raise InputError(
            f"torch {torch.__version__} lacks {', '.join(missing)}: estimate rests on torch's "
            "private API and does not know this version's",
            where=f"strategy {strategy}",
            hint=f"it is tested with torch {TESTED}",
        )


def missing_names(strategy: str) -> Iterator[str]:
    """Yield what is not there, as dotted names."""
    for name in NAMES.get(strategy, ()):
        module, _, path = name.partition(":")
        try:
            found = importlib.import_module(module)
            for part in path.split("."):
                found = _attribute(found, part)
        except (ImportError, AttributeError):
            yield name.replace(":", ".")


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute; of one that only objects have, its annotation in the class.

    Raises AttributeError when there is neither.
    """
    annotations = vars(owner).get("__annotations__", {}) if isinstance(owner, type) else {}
    return annotations[name] if name in annotations else getattr(owner, name)
