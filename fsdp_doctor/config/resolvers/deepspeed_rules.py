"""DeepSpeed's buckets, offload, and which keys act at which ZeRO stage."""

from __future__ import annotations

from typing import Any, Protocol

from fsdp_doctor.config.resolvers.draft import Draft
from fsdp_doctor.config.resolvers.words import as_bool, as_number, number_or_word
from fsdp_doctor.config.versions import at_least

_ZERO = "zero_optimization."
_ONLY_3 = (
    "stage3_prefetch_bucket_size",
    "prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "param_persistence_threshold",
    "stage3_max_live_parameters",
    "max_live_parameters",
    "stage3_max_reuse_distance",
    "max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "sub_group_size",
)
_ONLY_12 = ("allgather_partitions", "allgather_bucket_size", "round_robin_gradients")
_NOT_0 = (
    "reduce_scatter",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "allgather_partitions",
    "round_robin_gradients",
    "ignore_unused_parameters",
)


class ZeroKeys(Protocol):
    """Reads and sets by DeepSpeed's own key names (see ``deepspeed.Keys``)."""

    draft: Draft

    @property
    def hidden(self) -> int | None:
        """The model's hidden size, where it is known."""

    def names(self, *keys: str) -> tuple[str, ...]:
        """Return the native names of DeepSpeed keys."""

    def value(self, *keys: str, default: Any = None) -> Any:
        """Return what a key comes to."""

    def put(self, key: str, value: Any, *keys: str, reason: str | None = None) -> None:
        """Set a canonical field from DeepSpeed keys."""


def buckets(keys: ZeroKeys, stage: int, width: int) -> None:
    """Set bucket sizes in bytes and thresholds in elements; ``width``: bytes of one element."""
    square = None if keys.hidden is None else keys.hidden * keys.hidden
    if stage >= 1:
        name = ("reduce_bucket_size",)
        _bucket(keys, "comm.bucket_bytes", name, 500_000_000, filled=square, width=width)
    if stage in (1, 2):
        name = ("allgather_bucket_size",)
        _bucket(keys, "comm.allgather_bucket_bytes", name, 500_000_000, width=width)
        _flag(keys, "comm.reduce_scatter", "reduce_scatter", True)
        _flag(keys, "comm.allgather_partitions", "allgather_partitions", True)
    if stage == 3:
        ahead_names = ("stage3_prefetch_bucket_size", "prefetch_bucket_size")
        ahead = None if square is None else int(0.9 * square)
        key = "comm.prefetch_bucket_bytes"
        _bucket(keys, key, ahead_names, 50_000_000, filled=ahead, width=width)
        _thresholds(keys)


def _bucket(
    keys: ZeroKeys,
    key: str,
    names: tuple[str, ...],
    default: int,
    *,
    filled: int | None = None,
    width: int,
) -> None:
    natives = tuple(_ZERO + name for name in names)
    raw = keys.value(*natives, default=default)
    if raw == "auto":
        if filled is None:
            why = "auto: follows the model's hidden size, which is not known here"
            keys.put(key, "auto", *natives, reason=why)
            return
        why = f"auto: {filled} elements from hidden size {keys.hidden}, {width} bytes each"
        keys.put(key, filled * width, *natives, reason=why)
        return
    elements = as_number(raw)
    value = raw if elements is None else int(elements * width)
    keys.put(key, value, *natives, reason=f"{raw} elements of {width} bytes")


def _thresholds(keys: ZeroKeys) -> None:
    few = None if keys.hidden is None else 10 * keys.hidden
    for key, names, default in (
        (
            "sharding.persist_threshold",
            ("stage3_param_persistence_threshold", "param_persistence_threshold"),
            100_000,
        ),
        (
            "sharding.max_live_parameters",
            ("stage3_max_live_parameters", "max_live_parameters"),
            1_000_000_000,
        ),
        (
            "sharding.max_reuse_distance",
            ("stage3_max_reuse_distance", "max_reuse_distance"),
            1_000_000_000,
        ),
        ("optimizer.sub_group_size", ("sub_group_size",), 1_000_000_000),
    ):
        natives = tuple(_ZERO + name for name in names)
        value = number_or_word(keys.value(*natives, default=default))
        reason = "elements"
        if value == "auto":
            reason = "auto: 10 x the model's hidden size, which is not known here"
            if few is not None:
                value, reason = few, f"auto: 10 x hidden size {keys.hidden}"
        keys.put(key, value, *natives, reason=reason)


def _flag(keys: ZeroKeys, key: str, name: str, default: bool) -> None:
    keys.put(key, as_bool(keys.value(_ZERO + name, default=default), default), _ZERO + name)


def offload(keys: ZeroKeys, stage: int, version: str | None) -> None:
    """Set what is in host memory; old switches (``cpu_offload``) count as the new ones."""
    optimizer = _device(keys, "offload_optimizer", "cpu_offload")
    params = _device(keys, "offload_param", "cpu_offload_param")
    keys.put("offload.optimizer", optimizer, *_natives("offload_optimizer", "cpu_offload"))
    keys.put("offload.params", params, *_natives("offload_param", "cpu_offload_param"))
    if stage < 3:
        keys.draft.inert("offload.params", f"read at stage 3 only, this is stage {stage}")
    if stage == 0:
        keys.draft.inert("offload.optimizer", "ZeRO is off at stage 0")
    natives = keys.names(*_natives("offload_optimizer", "cpu_offload"))
    grads = optimizer if stage >= 1 else "none"
    keys.draft.derive("offload.grads", grads, natives, "reduced gradients go where the state is")
    default = at_least(version, "0.19.5")
    pins = (
        f"{_ZERO}offload_optimizer.pin_memory",
        f"{_ZERO}offload_param.pin_memory",
        f"{_ZERO}cpu_offload_use_pin_memory",
    )
    reason = None
    if keys.draft.raw(*keys.names(*pins)) is None:
        reason = f"not written: {str(default).lower()} in DeepSpeed {version}"
    pinned = as_bool(keys.value(*pins, default=default), default)
    keys.put("offload.pin_memory", pinned, *pins, reason=reason)
    if optimizer == "none" and (params == "none" or stage < 3):
        keys.draft.inert("offload.pin_memory", "nothing is offloaded")
    ratio = f"{_ZERO}offload_optimizer.ratio"
    if keys.value(ratio) is not None:
        keys.put("offload.fraction", as_number(keys.value(ratio)), ratio)
        if stage < 3 or optimizer == "none":
            keys.draft.inert("offload.fraction", "read at stage 3 with an offloaded optimizer")
    for name in ("offload_optimizer", "offload_param"):
        keys.draft.claim(*keys.names(_ZERO + name))


def _natives(name: str, old: str) -> tuple[str, str]:
    return f"{_ZERO}{name}.device", _ZERO + old


def _device(keys: ZeroKeys, name: str, old: str) -> str:
    device = keys.value(f"{_ZERO}{name}.device")
    if device is None and as_bool(keys.value(_ZERO + old)):
        return "cpu"
    return "none" if device is None else str(device).lower()


def drop_other_stages(keys: ZeroKeys, stage: int) -> None:
    """List written keys of other stages as without effect."""
    if stage != 3:
        names = keys.names(*(_ZERO + name for name in _ONLY_3))
        keys.draft.drop(names, f"read at stage 3 only, this is stage {stage}")
    if stage == 3:
        names = keys.names(*(_ZERO + name for name in _ONLY_12))
        keys.draft.drop(names, "read at stages 1 and 2 only, this is stage 3")
        keys.draft.drop(keys.names(f"{_ZERO}reduce_scatter"), "stage 3 always reduce-scatters")
    if stage == 0:
        names = keys.names(*(_ZERO + name for name in _NOT_0))
        keys.draft.drop(names, "ZeRO is off at stage 0")
    if stage in (1, 2):
        offloaded = keys.draft.values["offload.optimizer"].value != "none"
        name = f"{_ZERO}round_robin_gradients"
        if offloaded:
            _flag(keys, "offload.round_robin_gradients", "round_robin_gradients", False)
        else:
            keys.draft.drop(keys.names(name), "it spreads copies to the host; nothing is offloaded")
