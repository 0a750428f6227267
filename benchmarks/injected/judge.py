"""What is true of a pair by its measured combinations, and what ``compare`` says of its sides."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from fsdp_doctor.attribution.compare import compare_runs
from fsdp_doctor.attribution.shares import divide
from fsdp_doctor.attribution.what_if import Simulation
from fsdp_doctor.model.comparison import Comparison
from fsdp_doctor.model.estimate import RankEstimate
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.simulator.many import Simulations
from injected.measure import Measurements
from injected.pairs import Pair, keys_of

HARMLESS = 0.001
"""Decoys may move a peak by this share: below it ``compare`` calls memory the same."""
NAMED = 0.02
"""Share of the difference from which a field counts as blamed, and as a culprit."""
GOALS = {"top": 0.97, "all": 0.95, "decoy": 0, "error": 0.05}


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What the launches say of a pair."""

    pair: Pair
    delta: int
    """Bytes of the peak, B less A."""
    shares: dict[str, float]
    """Culprit -> share of the difference."""


@dataclass(frozen=True)
class NoGood:
    """Why a pair is not one of the benchmark's."""

    reason: str
    judged: bool
    """Whether the pair is unfit as drawn; False: a launch is missing or failed."""


def find_truth(pair: Pair, measurements: Measurements) -> Truth | NoGood:
    """Return the true shares of a pair that was measured."""
    values: dict[frozenset[int], int] = {}
    for places, raw in pair.combinations().items():
        peak = measurements.peak(raw)
        if isinstance(peak, str):
            names = ", ".join(pair.culprits[n][0] for n in sorted(places)) or "none"
            return NoGood(f"A with {names}: {peak}", judged=False)
        values[places] = peak
    ends = {"A": pair.a, "B": pair.b, "A with all decoys": pair.with_decoys}
    peaks: dict[str, int] = {}
    for name, raw in ends.items():
        peak = measurements.peak(raw)
        if isinstance(peak, str):
            return NoGood(f"{name}: {peak}", judged=False)
        peaks[name] = peak
    start, end = peaks["A"], peaks["B"]
    culprits_alone = values[frozenset(range(len(pair.culprits)))]
    moved = max(
        abs(peaks["A with all decoys"] - start) / start,
        abs(end - culprits_alone) / end,
    )
    if moved > HARMLESS:
        return NoGood("decoys are not harmless", judged=True)
    delta = end - start
    if abs(delta) < max(1 << 20, 0.001 * start):
        return NoGood("nothing moved", judged=True)
    division = divide(len(pair.culprits), values, ())
    shares = {
        one[0]: float((share.value or Fraction(0)) / delta)
        for one, share in zip(pair.culprits, division.shares, strict=True)
    }
    return Truth(pair=pair, delta=delta, shares=shares)


class KnownSimulations:
    """Simulates specs, each once, whatever became of this process."""

    def __init__(self, work: Path, simulations: Simulations) -> None:
        self._work, self._simulations = work, simulations

    @property
    def ran(self) -> int:
        """Simulations so far, by this process."""
        return self._simulations.ran

    def ask(self, spec: ProfileSpec, **where: Any) -> RankEstimate | str:
        """Return what a rank of ``spec`` allocates."""
        told = msgspec.json.encode((spec, sorted(where.items())))
        path = self._work / f"simulated-{hashlib.sha256(told).hexdigest()[:16]}.json"
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=RankEstimate | str)
        found = self._simulations.ask(spec, **where)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(msgspec.json.encode(found))
        own.rename(path)
        return found


@dataclass
class Row:
    """What is true of a pair, and what was said."""

    pair: Pair
    delta: int
    true: dict[str, float]
    """Culprit -> share of the difference."""
    said: dict[str, float] = field(default_factory=dict)
    """Injected field -> share as ``compare`` says."""
    together: float = 0.0
    """Share that was put down to several fields and not divided."""
    unexplained: float = 0.0
    points: int = 0

    @property
    def top_is_right(self) -> bool:
        """Whether the field that did most is named first."""
        best = max(self.said, key=lambda key: abs(self.said[key]), default="")
        most = max(abs(value) for value in self.true.values())
        return most - abs(self.true.get(best, 0.0)) <= 0.01 * most

    @property
    def all_found(self) -> bool:
        """Whether every field that did something is named."""
        return all(
            abs(self.said.get(key, 0.0)) >= NAMED
            for key, value in self.true.items()
            if abs(value) >= NAMED
        )

    @property
    def worst_decoy(self) -> float:
        """Largest share put down to a decoy."""
        return max((abs(self.said.get(d[0], 0.0)) for d in self.pair.decoys), default=0.0)

    @property
    def error(self) -> float:
        """Mean error of the culprits' shares."""
        return sum(abs(v - self.said.get(k, 0.0)) for k, v in self.true.items()) / len(self.true)

    def problems(self) -> Iterator[str]:
        """Yield what was missed."""
        if not self.top_is_right:
            yield "top cause"
        if not self.all_found:
            yield "a culprit is missing"
        if self.worst_decoy > NAMED:
            yield "a decoy is blamed"
        if self.error > GOALS["error"]:
            yield "shares"


def judge(truth: Truth, measurements: Measurements, simulations: KnownSimulations) -> Row:
    """Hold what ``compare`` says of the runs of A and B against the truth."""
    pair = truth.pair
    comparison = compare_runs(
        [measurements.run_of(pair.a)],
        [measurements.run_of(pair.b)],
        simulation=Simulation(simulate=simulations.ask),
    )
    points = 0 if comparison.what_if is None else len(comparison.what_if.points)
    row = Row(pair=pair, delta=truth.delta, true=truth.shares, points=points)
    _read(comparison, row)
    return row


def _read(comparison: Comparison, row: Row) -> None:
    """Sum what is said of the peak over all ranks, by injected field.

    One written field may set several effective ones (``use_distributed_optimizer`` the engine and
    what it shards), which are then named together.
    """
    written = {
        one[0]: keys_of(one, row.pair.ranks) for one in (*row.pair.culprits, *row.pair.decoys)
    }
    natives = {c.key: {*c.a.native, *c.b.native} for c in comparison.diff.changed}
    for part in comparison.attribution:
        if (part.metric, part.rank, part.phase) != ("peak_allocated_bytes", None, None):
            continue
        share = part.value / row.delta
        if not part.keys:
            row.unexplained += share
            continue
        owners = [
            name
            for name, keys in written.items()
            if all(_writes(keys, natives.get(key, ())) for key in part.keys)
        ]
        if not owners and len(part.keys) > 1:
            row.together += share
            continue
        for owner in owners[:1] or [part.keys[0]]:
            row.said[owner] = row.said.get(owner, 0.0) + share


def _writes(keys: Collection[str], natives: Collection[str]) -> bool:
    """Return whether one of the keys of a spec, or a section among them, is behind a field."""
    return any(native == key or native.startswith(f"{key}.") for native in natives for key in keys)
