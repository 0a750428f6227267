"""The launcher's part of a training command: how many processes it starts."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_doctor.model.config import NativeField

_SIZES = {
    "--nproc_per_node": "launcher.nproc_per_node",
    "--nproc-per-node": "launcher.nproc_per_node",
    "--nnodes": "launcher.nnodes",
    "--ntasks-per-node": "launcher.nproc_per_node",
    "--gpus_per_node": "launcher.nproc_per_node",
    "--num_gpus": "launcher.num_gpus",
    "-ng": "launcher.num_gpus",
    "-N": "launcher.nnodes",
}


def script_position(words: Sequence[str]) -> int:
    """Return the position behind the training script (``pretrain_gpt.py``, ``-m module``), or 0."""
    for position in range(len(words) - 1, -1, -1):
        if words[position].endswith(".py") and not words[position].startswith("-"):
            return position + 1
    for position, word in enumerate(words):
        if word == "-m" and position + 1 < len(words) and "." in words[position + 1]:
            if words[position + 1] == "torch.distributed.run":
                continue
            return position + 2
    return 0


def launcher_fields(words: Sequence[str], source: str, line: int) -> dict[str, NativeField]:
    """Return the sizes that the launcher's own options give."""
    found: dict[str, NativeField] = {}
    for position, word in enumerate(words):
        option, equals, value = word.partition("=")
        name = _SIZES.get(option)
        if name is None:
            continue
        if not equals:
            value = words[position + 1] if position + 1 < len(words) else ""
        if value.isdigit() and len(value) < 9:
            found[name] = NativeField(value=int(value), source="cli", file=source, line=line)
    return found
