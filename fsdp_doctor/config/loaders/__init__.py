"""One module per config format, found by what a file holds and imported only then.

``MARKERS`` names texts of which one stands in every file of a format; only loaders whose markers
occur are asked. When none of them is sure, those without markers here are asked too.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from fsdp_doctor.config.loaders.base import Loader, Source, read_source
from fsdp_doctor.config.loaders.parts import follow_references, join
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import NativeConfig

MARKERS: dict[str, tuple[str, ...]] = {
    "wandb": ("value:", '"value"', "_wandb"),
    "profile_spec": ("config:", "workload:", "world_size:"),
    "accelerate": ("distributed_type", "compute_environment"),
    "deepspeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"),
    "hf_trainer": ("per_device_train_batch_size", '"fsdp', "fsdp:", "gradient_accumulation_steps"),
    "llama_factory": ("finetuning_type", "dist_config", "model_class", "cutoff_len"),
    "axolotl": ("base_model", "micro_batch_size", "sample_packing"),
    "lightning": ("trainer:", "class_path", "strategy"),
    "composer": ("device_train_microbatch_size", "fsdp_config", "parallelism_config"),
    "olmo": ("device_train_microbatch_size", "wrapping_strategy", "fsdp:"),
    "verl": ("fsdp_config", "FSDPEngineConfig", "actor_rollout_ref", "fsdp_size"),
    "torchtitan": ("[training]", "[parallelism]", "[job]", '"parallelism"', "parallelism."),
    "torchtune": ("_component_", "torchtune"),
    "prime_rl": ("[model]", "[data]", "[trainer", "[orchestrator", "[ckpt]", "[model."),
    "gpt_neox": ("pipe_parallel_size", "pipe-parallel-size", "train_iters", "train-iters"),
    "openrlhf": ("openrlhf",),
    "levanter": ("per_device_parallelism", "fsdp_axis", "axis_resources"),
    "env_file": ("=",),
    "megatron_args": ("--micro-batch-size", "--tensor-model-parallel-size", "pretrain_gpt"),
    "megatron_dump": ("- end of arguments -", "- arguments -"),
}
"""Loader module -> texts, at least one of which its files hold."""

SURE = 90
"""From this score on no other loader is asked."""
_LIKELY = 40
_FALLBACK = "generic"
_MANY_LINES, _BLANK_LINES = 20_000, 100
_HELPERS = frozenset({"base", "structure", "parts", "interpolation", "yaml_nodes", _FALLBACK})


def load_native(paths: Path | Sequence[Path], fmt: str | None = None) -> NativeConfig:
    """Read one config, given in one file or in several parts.

    The first file is the config; a further one of the same format overlays it, an environment file
    adds variables, and another format (a DeepSpeed JSON) becomes one of ``parts``. ``fmt``: the
    first file's format. Raises InputError when a file cannot be read.
    """
    files = [paths] if isinstance(paths, Path) else list(paths)
    if not files:
        raise InputError("no config file given")
    loaded = []
    for position, path in enumerate(files):
        source = read_source(path)
        loaded.append(load_source(source, fmt if position == 0 else None))
    return follow_references(join(loaded), files[0], load_source)


def load_source(source: Source, fmt: str | None = None) -> NativeConfig:
    """Read one source by its format, ``fmt`` or what it looks like."""
    _refuse_blank(source)
    module = _by_format(fmt) if fmt else detect(source)
    return module.load(source)


def detect(source: Source, *, without: Iterable[str] = ()) -> Loader:
    """Return the loader that is the surest about ``source``; one that reads any mapping at worst.

    ``without``: loader modules that are not asked.
    """
    asked = set(without)
    best: tuple[int, Loader] | None = None
    for name in _candidates(source):
        if name in asked:
            continue
        asked.add(name)
        best = _better(best, name, source)
        if best is not None and best[0] >= SURE:
            return best[1]
    for name in _names():
        unmarked = name not in MARKERS
        if name not in asked and (unmarked or best is None or best[0] < _LIKELY):
            best = _better(best, name, source)
    return best[1] if best is not None else _module(_FALLBACK)


def detect_format(source: Source) -> str:
    """Return the name of the format that ``source`` looks like."""
    return detect(source).FORMAT


def formats() -> dict[str, str]:
    """Return every format's name with its module, the one for any mapping last."""
    found = {}
    for name in (*_names(), _FALLBACK):
        module = _module(name)
        if hasattr(module, "FORMAT"):
            found[module.FORMAT] = name
    return found


def _refuse_blank(source: Source) -> None:
    """Raise InputError for runs of blank lines, on which searches for line starts are slow."""
    if source.text.count("\n") < _MANY_LINES:
        return
    run = 0
    for line in source.lines:
        run = 0 if line.strip() else run + 1
        if run > _BLANK_LINES:
            raise InputError(f"more than {_BLANK_LINES} blank lines: no config", where=source.name)


def _better(
    best: tuple[int, Loader] | None, name: str, source: Source
) -> tuple[int, Loader] | None:
    module = _module(name)
    if not hasattr(module, "FORMAT"):
        return best
    score = module.detect(source)
    return (score, module) if score > 0 and (best is None or score > best[0]) else best


def _candidates(source: Source) -> Iterator[str]:
    for name, markers in MARKERS.items():
        if name in _names() and any(marker in source.text for marker in markers):
            yield name


@cache
def _names() -> tuple[str, ...]:
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(name for name in found if name not in _HELPERS and not name.startswith("_"))


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name}")


def _by_format(fmt: str) -> Loader:
    wanted = fmt.strip().lower().replace("-", "_")
    if wanted in (*_names(), _FALLBACK):
        module = _module(wanted)
        if hasattr(module, "FORMAT"):
            return cast("Loader", module)
    known = formats()
    if fmt in known:
        return cast("Loader", _module(known[fmt]))
    raise InputError(f"unknown format {fmt!r}", hint=f"one of: {', '.join(sorted(known))}")
