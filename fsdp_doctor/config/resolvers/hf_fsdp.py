"""FSDP in the HF Trainer: four generations of rules from transformers 4.46 to 5.24."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_doctor.config.resolvers.draft import Draft
from fsdp_doctor.config.resolvers.fsdp_plugin import Plugin, apply
from fsdp_doctor.config.resolvers.words import as_bool, as_int, sharding_strategy
from fsdp_doctor.config.versions import at_least

_BLOCK = "fsdp_config."
_WINS = "FSDP1 runs as FULL_SHARD: the plugin's sharding_strategy is not set, and it wins"


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpWords:
    """The argument ``fsdp``: true, or words such as ``full_shard auto_wrap offload``."""

    on: bool
    words: tuple[str, ...] = ()

    @classmethod
    def read(cls, draft: Draft) -> FsdpWords:
        """Return what ``fsdp`` says; a list, one text and true are all accepted."""
        raw: Any = draft.raw("fsdp")
        if raw is None or raw is False:
            return cls(on=False)
        if raw is True:
            return cls(on=True)
        items = raw if isinstance(raw, list) else str(raw).replace(",", " ").split()
        words = tuple(str(item).rpartition(".")[2].lower() for item in items)
        if words in ((), ("false",), ("none",)):
            return cls(on=False)
        return cls(on=True, words=() if words == ("true",) else words)

    @property
    def strategy(self) -> str | None:
        """FSDP1's name of the strategy among the words."""
        return next((s for s in map(sharding_strategy, self.words) if s), None)


def names(argument: str) -> tuple[str, str]:
    """Return the native keys of an argument, with and without the prefix."""
    return f"{_BLOCK}{argument}", f"{_BLOCK}fsdp_{argument}"


def default_version(version: str | None) -> int:
    """Return the FSDP version when ``fsdp_config.version`` is not written."""
    return 2 if at_least(version, "5.10") else 1


def fsdp(draft: Draft, version: str | None, words: FsdpWords) -> None:
    """Set the fields of FSDP by the rules of one transformers version."""
    old = not at_least(version, "5.0")
    written = as_int(draft.raw(*names("version")))
    environment = as_int(draft.native.environment.get("FSDP_VERSION"))
    number = written or default_version(version)
    if old:
        number = environment or 1
        draft.drop(names("version"), f"transformers {version} reads FSDP_VERSION only")
    offload = "offload" in words.words
    keys: tuple[str, ...] = ("fsdp",)
    if at_least(version, "5.10"):
        offload = offload or as_bool(draft.raw(*names("cpu_offload")))
        keys = (*names("cpu_offload"), "fsdp")
    else:
        draft.drop(names("cpu_offload"), f"transformers {version} takes the word offload in fsdp")
    strategy, natives, reason = _strategy(draft, version, words)
    reshard, why = _reshard(draft, version, words)
    plugin = Plugin(
        strategy=strategy,
        strategy_natives=natives,
        strategy_reason=reason,
        reshard=reshard,
        reshard_natives=(*names("reshard_after_forward"), "fsdp"),
        reshard_reason=why,
        offload=offload,
        offload_natives=keys,
        version_natives=(*names("version"), "fsdp"),
        impl_reason=None if written else f"transformers {version}: version {number} by default",
        defaults=_defaults(version, words),
        limit_reason=None,
    )
    _early_wrap(draft, version, words)
    apply(draft, plugin, number)
    draft.drop(names("offload_params"), "the Trainer's key is cpu_offload: this one is not read")
    draft.drop(names("sharding_strategy"), "the Trainer takes fsdp or reshard_after_forward")


def _strategy(
    draft: Draft, version: str | None, words: FsdpWords
) -> tuple[str, tuple[str, ...], str | None]:
    """Return FSDP1's strategy. From 5.4 on the plugin's own default wins."""
    if not at_least(version, "5.4"):
        return words.strategy or "FULL_SHARD", ("fsdp",), None
    key = draft.find(*names("reshard_after_forward"))
    if key is not None and not _is_two(draft, version):
        draft.drop((key,), _WINS)
    reason = _WINS if words.strategy not in (None, "FULL_SHARD") else None
    return "FULL_SHARD", ("fsdp",), reason


def _is_two(draft: Draft, version: str | None) -> bool:
    return (as_int(draft.raw(*names("version"))) or default_version(version)) == 2


def _reshard(draft: Draft, version: str | None, words: FsdpWords) -> tuple[bool, str]:
    """Return FSDP2's resharding; its default was false in 5.0."""
    written = draft.raw(*names("reshard_after_forward"))
    if written is not None:
        return as_bool(written, True), "as written"
    if not at_least(version, "5.4"):
        return False, f"transformers {version}: false by default"
    if words.strategy == "SHARD_GRAD_OP":
        return False, "shard_grad_op keeps units gathered"
    return True, "not written: true, except for the root"


def _defaults(version: str | None, words: FsdpWords) -> dict[str, Any]:
    """Return the plugin's arguments that the Trainer passes when nothing is written."""
    wraps = at_least(version, "5.10") or "auto_wrap" in words.words
    policy = "TRANSFORMER_BASED_WRAP" if wraps else "NO_WRAP"
    defaults = {"auto_wrap_policy": policy, "use_orig_params": True, "sync_module_states": True}
    if at_least(version, "5.10"):
        defaults["state_dict_type"] = "FULL_STATE_DICT"
    return defaults


def _early_wrap(draft: Draft, version: str | None, words: FsdpWords) -> None:
    """Before 5.10 only the word ``auto_wrap`` wraps, by size where a size is given."""
    top = "fsdp_transformer_layer_cls_to_wrap"
    if draft.has(top) and not at_least(version, "5.0"):
        draft.fields.setdefault(f"{_BLOCK}transformer_layer_cls_to_wrap", draft.fields[top])
        draft.claim(top)
    else:
        draft.drop((top,), "no argument of the Trainer since 5.0: fsdp_config has it")
    if at_least(version, "5.10"):
        return
    for argument in ("auto_wrap_policy", "state_dict_type"):
        draft.drop(names(argument), f"transformers {version} does not read it: from 5.10 on")
        for key in names(argument):
            draft.fields.pop(key, None)
    if "auto_wrap" not in words.words:
        return
    size = as_int(draft.raw(*names("min_num_params")), 0) or 0
    key = f"{_BLOCK}min_num_params"
    if size > 0 and key in draft.fields:
        policy = draft.fields[key]
        draft.fields[f"{_BLOCK}auto_wrap_policy"] = type(policy)(
            value="SIZE_BASED_WRAP", source=policy.source, file=policy.file, line=policy.line
        )
