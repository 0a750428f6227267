"""The outcome of comparing two runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp_doctor.model.basis import Basis
from fsdp_doctor.model.config import ConfigDiff
from fsdp_doctor.model.finding import Finding
from fsdp_doctor.model.gate import GateResult
from fsdp_doctor.model.mismatch import Mismatch
from fsdp_doctor.model.what_if import WhatIf

Verdict = Literal["worse", "better", "same", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number on both sides, and what to think of the difference."""

    name: str
    """peak_allocated_bytes, peak_reserved_bytes, resident_bytes, category_bytes, step_time_s,
    phase_time_s, tokens_per_s, exposed_communication_s (of the profiled step),
    first_step_peak_allocated_bytes, outside_pytorch_bytes, allocation_retries, out_of_memory_bytes
    (held at the failure, plus the request)."""
    unit: Literal["bytes", "s", "count", "tokens/s"]
    better: Literal["lower", "higher"]
    rank: int | None
    """None: over all ranks (memory: the largest; time: the slowest rank of each step). Tokens/s of
    a rank are its share of the job's tokens by its own step time."""
    phase: str | None
    """None: over the whole step."""
    category: str | None
    """Memory category; of phase_time_s: kernel, exposed_communication, communication, copy or idle
    (from the profiled step), None for the whole phase."""
    a: float | int | None
    b: float | int | None
    delta: float | int | None
    """b - a."""
    relative: float | None
    """b / a - 1."""
    interval: tuple[float, float] | None = None
    """95 % interval of the relative change; None for exact values."""
    n_launches: tuple[int, int] = (1, 1)
    n_steps: tuple[int, int] = (0, 0)
    """Timed steps behind a time, over all launches of a side."""
    p: float | None = None
    """Of no difference, adjusted for the number of metrics tested; None where not tested."""
    verdict: Verdict = "unclear"
    warnings: tuple[str, ...] = ()
    delta_range: tuple[int, int] | None = None
    """Smallest and largest b - a over all launches (and steps, where those vary) of a number that
    varies between identical runs; None: exact."""
    comparable: bool = True
    """Whether the sides have in common what this metric needs; a verdict is refused where not, and
    the last of ``warnings`` says why."""
    capped: bool = False
    """Whether no verdict can be firm whatever the numbers are: something besides the config may
    have moved them, or a side knows only a lower bound. ``warnings`` say which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Part of a metric's difference, and the field or fields it is put down to."""

    metric: str
    rank: int | None
    phase: str | None
    category: str | None
    keys: tuple[str, ...]
    """One key: this field did it. Several: they act on the category together and the first
    version cannot divide their effect. None (empty tuple): unexplained."""
    value: int
    """Bytes, signed (b - a)."""
    unit: Literal["bytes"] = "bytes"
    share: float | None = None
    """value / the metric's delta; None when the delta is 0."""
    level: int | None = None
    """Evidence level 0-4 (see Finding.level); None when unexplained."""
    predicted: int | None = None
    """Bytes by simulation or formula, where there is one."""
    evidence: str = ""
    first_in: int | None = None
    """The change when these fields alone are flipped in A; None: not known."""
    last_out: int | None = None
    """The change that is missing when these fields alone are flipped back in B."""
    interacts_with: tuple[str, ...] = ()
    """Fields whose effect on this category depends on these fields."""
    rests_on: tuple[str, ...] = ()
    """Runs (``A``, ``B``), points of the simulation (``S3``) and sources of formulas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything ``compare`` knows."""

    name_a: str
    name_b: str
    diff: ConfigDiff
    metrics: tuple[Metric, ...]
    attribution: tuple[Attribution, ...]
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    """What differs besides config and software, and what the comparison still means."""
    basis: tuple[Basis, ...] = ()
    """The launches behind the metrics."""
    gates: tuple[GateResult, ...] = ()
    """What became of the limits set on the metrics."""
    what_if: WhatIf | None = None
    """The simulated points behind the attribution, where there are any."""
