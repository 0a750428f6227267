"""Lightning CLI's YAML (``class_path``/``init_args``), Hydra's ``_target_`` form, litgpt's hub."""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.interpolation import interpolate
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of, word_set
from fsdp_doctor.model.config import NativeConfig

FORMAT = "lightning"
_TRAINER = word_set(
    """accelerator strategy devices num_nodes precision max_epochs max_steps callbacks
    log_every_n_steps gradient_clip_val accumulate_grad_batches limit_train_batches logger
    val_check_interval num_sanity_val_steps"""
)
_LITGPT = frozenset({"out_dir", "train", "eval", "data"})


def detect(source: Source) -> int:
    """A ``trainer`` with Lightning's arguments, or litgpt's top-level keys."""
    data = mapping_of(source)
    trainer = data.get("trainer")
    if isinstance(trainer, dict):
        found = len(_TRAINER & set(trainer))
        if "lightning" in source.text and (
            "_target_" in source.text or "class_path" in source.text
        ):
            return 85 if found >= 2 else 60
        if found >= 3 and not {"n_gpus_per_node", "nnodes"} & set(trainer):
            return 50
        return 0
    train = data.get("train")
    if set(data) >= _LITGPT and isinstance(train, dict) and "micro_batch_size" in train:
        return 90
    return 0


def load(source: Source) -> NativeConfig:
    """Return the keys; classes are text and are not imported."""
    structure = structure_of(source)
    fields, unresolved = interpolate(fields_of(structure, source))
    packages: dict[str, str] = {}
    for key in ("lightning_version", "lightning.pytorch"):
        if isinstance(structure.data.get(key), str):
            packages["lightning"] = structure.data[key]
    found = _header_version(source)
    if found is not None:
        packages["lightning"] = found
    return NativeConfig(
        format=FORMAT,
        framework="lightning",
        fields=fields,
        packages=packages,
        unresolved=(*structure.notes, *unresolved),
        nested=structure.data,
    )


def _header_version(source: Source) -> str | None:
    """Return the version that ``SaveConfigCallback`` writes in the first line."""
    first = source.lines[0] if source.lines else ""
    prefix = "# lightning.pytorch=="
    version: Any = first.removeprefix(prefix).strip() if first.startswith(prefix) else None
    return version or None
