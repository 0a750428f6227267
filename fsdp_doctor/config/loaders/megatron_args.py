"""The argument dump that Megatron-LM prints at its start, inside a training log.

Lines look like ``  bf16 ............... True`` between ``--- arguments ---`` and
``--- end of arguments ---``; a launcher may put a rank in front of each.
"""

from __future__ import annotations

import re
from typing import Any

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.megatron_flags import flag_table
from fsdp_doctor.config.yaml_source import plain_scalar
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import NativeConfig, NativeField

FORMAT = "megatron_args"
_START = re.compile(r"-{4,} arguments -{4,}")
_END = re.compile(r"-{4,} end of arguments -{4,}")
_NAMED = re.compile(
    r"(?:^|[:>\]|]\s?|\s{2})(?P<name>[A-Za-z]\w*)(?: \.+ |(?<=\w{48})  )(?P<value>.*)$"
)
_LONGEST_LINE = 4096
_DTYPE = re.compile(r"torch\.(\w+)$")
_ENUM = re.compile(r"(?:<)?\w+\.(\w+)(?:: .*>)?$")
_LEAST_SHARE = 0.97


def detect(source: Source) -> int:
    """The heading of the dump."""
    return 95 if _START.search(source.text) else 0


def load(source: Source) -> NativeConfig:
    """Read the first whole dump; its values are those after Megatron-LM's own rules."""
    fields: dict[str, NativeField] = {}
    skipped: list[str] = []
    inside = False
    for number, line in enumerate(source.lines, 1):
        if not inside:
            inside = bool(_START.search(line))
            continue
        if _END.search(line):
            break
        match = _NAMED.search(line) if len(line) <= _LONGEST_LINE else None
        if match is None or match["name"] in fields:
            skipped += [f"{source.name}:{number}: not an argument"] if match is None else []
            continue
        fields[match["name"]] = NativeField(
            value=dumped_value(match["value"]), source="dump", file=source.name, line=number
        )
    if not fields:
        raise InputError("the argument dump holds no argument", where=source.name)
    return NativeConfig(
        format=FORMAT,
        framework="megatron-lm",
        version=version_of(set(fields)),
        fields=fields,
        unknown=tuple(name for name in fields if not _known(name)),
        unresolved=tuple(skipped[:20]),
    )


_DERIVED = frozenset(
    {"rank", "world_size", "local_rank", "data_parallel_size", "padded_vocab_size", "params_dtype"}
    | {"consumed_train_samples", "consumed_valid_samples", "iteration", "cpu_offloading"}
    | {"virtual_pipeline_model_parallel_size", "transformer_pipeline_model_parallel_size"}
    | {"variable_seq_lengths", "do_train", "do_valid", "do_test", "model_type"}
    | {"skipped_train_samples", "encoder_num_layers", "decoder_num_layers"}
)
"""Names that are set by Megatron-LM itself and stand in the dump."""


def _known(name: str) -> bool:
    return name in flag_table() or name in _DERIVED


def dumped_value(text: str) -> Any:
    """Return a value of the dump; Python's spelling of None, booleans, lists and dtypes."""
    text = text.strip()
    if text == "None":
        return None
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].strip()
        return [dumped_value(item.strip(" '\"")) for item in inner.split(",")] if inner else []
    dtype = _DTYPE.match(text)
    if dtype:
        return dtype[1]
    enum = _ENUM.match(text)
    if enum and not text[0].isdigit() and "/" not in text:
        return enum[1]
    return plain_scalar(text)


def version_of(names: set[str]) -> str | None:
    """Return the one version of megatron-core whose arguments are those of the dump.

    None for a fork, for a part of a dump, and where two versions fit alike.
    """
    table = flag_table()
    versions = sorted({flag.first for flag in table.values()})
    scores = []
    for version in versions:
        expected = {name for name, flag in table.items() if flag.known(version)}
        common = len(names & expected)
        scores.append((common / max(len(expected | (names & table.keys())), 1), version))
    scores.sort(reverse=True)
    best, version = scores[0]
    if best < _LEAST_SHARE or (len(scores) > 1 and scores[1][0] == best):
        return None
    return ".".join(map(str, (*version, 0)))
