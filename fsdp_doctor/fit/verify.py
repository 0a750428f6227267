"""Run the prescriptions of an answer, and set what was measured beside what was predicted.

On GPUs the spec as written is run twice: under the limit of memory, where it should run out, and
without, for its step time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fsdp_doctor.config.spec import WrittenSpec, apply_overrides
from fsdp_doctor.fit.recorded import measured
from fsdp_doctor.model.fit import Fit, Measured, Variant
from fsdp_doctor.profiler.launch import LaunchOptions, profile, profile_many

AS_WRITTEN = "as-written"
LIMITED = "as-written-limited"


def verify(
    fit: Fit,
    written: WrittenSpec,
    directory: Path,
    options: LaunchOptions,
    tell: Callable[[str], None],
) -> Fit:
    """Return the answer with a real run of each prescription.

    ``written``: the spec with its world size. Runs lie under ``directory``. With a
    ``memory_fraction`` in ``options`` all but one of the spec as written are limited by it. Raises
    InputError when the runs cannot be started.
    """
    free = replace(options, memory_fraction=None)
    limited: tuple[Measured, ...] = ()
    if options.memory_fraction is not None:
        limited = (_run(fit.as_written, written, directory / LIMITED, options, tell),)
    base = _run(fit.as_written, written, directory / AS_WRITTEN, free, tell)
    prescriptions = []
    for number, variant in enumerate(fit.prescriptions, 1):
        found = _run(variant, written, directory / f"prescription-{number}", options, tell)
        if found.step_time_s and base.step_time_s:
            found = replace(found, step_time_change=found.step_time_s / base.step_time_s - 1)
        prescriptions.append(replace(variant, measured=(*variant.measured, found)))
    as_written = replace(fit.as_written, measured=(*fit.as_written.measured, *limited, base))
    return replace(fit, as_written=as_written, prescriptions=tuple(prescriptions))


def default_fraction(fit: Fit, device_bytes: int) -> float:
    """Return the part of a larger GPU that leaves torch what a GPU of the fit's memory would."""
    return max(0.01, min(1.0, (fit.memory_bytes - fit.outside_pytorch_bytes[1]) / device_bytes))


def _run(
    variant: Variant,
    written: WrittenSpec,
    directory: Path,
    options: LaunchOptions,
    tell: Callable[[str], None],
) -> Measured:
    spec = apply_overrides(written.spec, variant.overrides)
    job = WrittenSpec(spec=replace(spec, name=directory.name), written=written.written)
    with _environment(variant.environment):
        if options.one_rank_of:
            (run,) = profile_many([(job, directory)], options, tell)
        else:
            run = profile(job, directory, options, tell)
    return measured(run, "verified")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
