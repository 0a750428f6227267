"""Run the prescriptions of an answer, and set what was measured beside what was predicted.

On GPUs the spec as written is run twice: under the limit of memory, where it should run out, and
without, for its step time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
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
    limited = options.memory_fraction is not None
    wanted = [_Job(AS_WRITTEN, fit.as_written, limited=False)]
    if limited:
        wanted.append(_Job(LIMITED, fit.as_written, limited=True))
    wanted += [
        _Job(f"prescription-{number}", variant, limited=limited)
        for number, variant in enumerate(fit.prescriptions, 1)
    ]
    found = _run_all(wanted, written, directory, options, tell)
    base = found[AS_WRITTEN]
    prescriptions = []
    for number, variant in enumerate(fit.prescriptions, 1):
        run = found[f"prescription-{number}"]
        if run.step_time_s and base.step_time_s:
            run = replace(run, step_time_change=run.step_time_s / base.step_time_s - 1)
        prescriptions.append(replace(variant, measured=(*variant.measured, run)))
    of_base = [found[name] for name in (LIMITED, AS_WRITTEN) if name in found]
    as_written = replace(fit.as_written, measured=(*fit.as_written.measured, *of_base))
    return replace(fit, as_written=as_written, prescriptions=tuple(prescriptions))


def default_fraction(fit: Fit, device_bytes: int) -> float:
    """Return the part of a larger GPU that leaves torch what a GPU of the fit's memory would."""
    return max(0.01, min(1.0, (fit.memory_bytes - fit.outside_pytorch_bytes[1]) / device_bytes))


@dataclass(frozen=True, slots=True)
class _Job:
    """One run to make."""

    name: str
    variant: Variant
    limited: bool = field(kw_only=True)

    def key(self) -> tuple[bool, tuple[tuple[str, str], ...]]:
        """Jobs of one key can share a parent process."""
        return self.limited, tuple(sorted(self.variant.environment.items()))


def _run_all(
    wanted: Sequence[_Job],
    written: WrittenSpec,
    directory: Path,
    options: LaunchOptions,
    tell: Callable[[str], None],
) -> dict[str, Measured]:
    """Run every job and return what each measured, by name."""
    found: dict[str, Measured] = {}
    for (limited, environment), group in groupby(sorted(wanted, key=_Job.key), key=_Job.key):
        fraction = options.memory_fraction if limited else None
        chosen = replace(options, memory_fraction=fraction)
        jobs = [(_spec(job, written), directory / job.name) for job in group]
        with _environment(dict(environment)):
            if options.one_rank_of:
                runs = profile_many(jobs, chosen, tell)
            else:
                runs = [profile(spec, place, chosen, tell) for spec, place in jobs]
        found |= {
            spec.spec.name: measured(run, "verified")
            for (spec, _), run in zip(jobs, runs, strict=True)
        }
    return found


def _spec(job: _Job, written: WrittenSpec) -> WrittenSpec:
    spec = apply_overrides(written.spec, job.variant.overrides)
    return WrittenSpec(spec=replace(spec, name=job.name), written=written.written)


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
