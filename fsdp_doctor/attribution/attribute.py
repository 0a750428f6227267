"""Which field did it, without re-runs: divide a memory difference by category, then by field.

Category differences sum to the metric's difference exactly, in integers. Each is put down to the
changed fields that can touch the category in that phase; what none can touch stays unexplained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_doctor.attribution.candidates import POOL_CATEGORIES, Blame, blame
from fsdp_doctor.attribution.observations import fullest_rank, rank_of
from fsdp_doctor.model.comparison import Attribution, Metric
from fsdp_doctor.model.config import ConfigChange
from fsdp_doctor.model.memory import Anatomy
from fsdp_doctor.model.run import Run
from fsdp_doctor.units import format_bytes

ATTRIBUTED = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "resident_bytes",
    "outside_pytorch_bytes",
)
RERUN_ONE_WAY = 2
"""Evidence level of a pair that differs in one field alone."""
SIDES = ("A", "B")
"""The runs of both sides, by which every row stands."""
END_OF_STEP = ("optimizer",)
"""Effects bound to other phases are over when a step ends."""
_MOVED = "the peak moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A metric whose two sides are divided into categories."""

    metric: Metric
    a: Mapping[str | None, int]
    """Category -> bytes; sums to ``metric.a`` up to a rest that is shown as unexplained."""
    b: Mapping[str | None, int]
    phases: Sequence[str] | None
    """Phase of the moment compared, or two, A's and B's, when the peak moved; None: not known, an
    effect of any phase counts."""

    @property
    def moved(self) -> str | None:
        """Where the peak moved when it lies in different phases on the two sides."""
        if self.phases is None or len(self.phases) < 2:
            return None
        return f"{_MOVED} from {self.phases[0]} to {self.phases[1]}"


def attribute(
    metrics: Sequence[Metric],
    changes: Sequence[ConfigChange],
    a: Sequence[Run],
    b: Sequence[Run],
    *,
    controlled: bool = False,
) -> tuple[Attribution, ...]:
    """Put every firm memory difference down to fields.

    Metrics that are ``same`` or ``unclear`` are not attributed: nothing is blamed for no change.
    The values of one metric's rows sum to its delta exactly. ``controlled``: the sides differ in
    nothing but ``changes``; when that is one field, the pair is a re-run with it flipped, and
    allocated memory, which is deterministic, is put down to it whole (level 2).
    """
    only = changes[0].key if controlled and len(changes) == 1 else None
    return tuple(
        row if only is None else _put_down_to(only, row)
        for metric in metrics
        if metric.name in ATTRIBUTED and metric.verdict in ("worse", "better")
        for row in attribute_split(split(metric, a, b), changes)
    )


def _put_down_to(key: str, row: Attribution) -> Attribution:
    """Return the row with the only field that differs, unless it is of the allocator's making."""
    if row.category is None or row.category in POOL_CATEGORIES:
        return row
    text = row.evidence
    if not row.keys:
        amount, _, reason = text.partition(": ")
        moved = f"{reason}, which " if reason.startswith(_MOVED) else ""
        text = f"{amount}: {moved}follows from the only field that differs"
    return replace(row, keys=(key,), level=RERUN_ONE_WAY, evidence=text, rests_on=SIDES)


def attribute_split(divided: Split, changes: Sequence[ConfigChange]) -> list[Attribution]:
    """Return one row per category that differs, largest first, and the rest as unexplained."""
    metric = divided.metric
    total = int(metric.delta or 0)
    rows = []
    for category in divided.a.keys() | divided.b.keys():
        delta = divided.b.get(category, 0) - divided.a.get(category, 0)
        if delta:
            rows.append(blamed_row(divided, category, delta, changes))
    rest = total - sum(row.value for row in rows)
    rows.sort(key=lambda row: (-abs(row.value), row.category or ""))
    if rest:
        rows.append(rest_row(metric, rest, observed_at=total - rest))
    return rows


def share_of(value: int, metric: Metric) -> float | None:
    """Return the part of a metric's difference; None when there is none."""
    return value / metric.delta if metric.delta else None


def blamed_row(
    divided: Split, category: str | None, delta: int, changes: Sequence[ConfigChange]
) -> Attribution:
    """Put bytes of a category down to the fields whose known effects fit, or to none."""
    metric = divided.metric
    found = _blame(divided, category, delta, changes)
    text = f"{format_bytes(delta, signed=True)} in {category or 'allocated memory'}"
    if found.predicted is not None:
        together = " together" if len(found.keys) > 1 else ""
        text += f", formula {format_bytes(found.predicted, signed=True)}{together}"
    text += f": {found.reason}"
    return Attribution(
        metric=metric.name,
        rank=metric.rank,
        phase=metric.phase,
        category=category,
        keys=found.keys,
        value=delta,
        share=share_of(delta, metric),
        level=found.level,
        predicted=found.predicted,
        evidence=text,
        rests_on=(*SIDES, *found.sources),
    )


def _blame(
    divided: Split, category: str | None, delta: int, changes: Sequence[ConfigChange]
) -> Blame:
    """Put a category down to fields; between two phases only to one that holds in all phases.

    Bytes of one phase less those of another are no field's effect: where the peak moved, only a
    formula that is bound to no phase and agrees is believed.
    """
    if divided.moved is None:
        return blame(changes, category, divided.phases, delta)
    found = blame(changes, category, (), delta)
    return found if found.level == 1 else Blame(reason=divided.moved)


def rest_row(metric: Metric, rest: int, *, observed_at: int) -> Attribution:
    """Return the row of what the observed steps, which have categories, do not show."""
    return Attribution(
        metric=metric.name,
        rank=metric.rank,
        phase=metric.phase,
        category=None,
        keys=(),
        value=rest,
        share=share_of(rest, metric),
        evidence=f"the observed steps differ by {format_bytes(observed_at, signed=True)}, "
        f"the compared steps by {format_bytes(metric.delta, signed=True)}",
        rests_on=SIDES,
    )


def split(metric: Metric, a: Sequence[Run], b: Sequence[Run]) -> Split:
    """Divide both sides of a memory metric into categories; a and b are known in it."""
    if metric.name == "outside_pytorch_bytes":
        return _whole(metric, "outside_pytorch")
    anatomies = (_anatomy(metric, a, metric.a), _anatomy(metric, b, metric.b))
    if anatomies[0] is None or anatomies[1] is None:
        return _whole(metric, None)
    if metric.name == "resident_bytes":
        sides = [dict(x.resident) for x in anatomies if x]
        return Split(metric=metric, a=_keyed(sides[0]), b=_keyed(sides[1]), phases=END_OF_STEP)
    parts = [_peak_categories(x, metric.phase) for x in anatomies if x]
    if any(part is None for part in parts):
        return _whole(metric, None)
    phases = (
        [metric.phase]
        if metric.phase is not None
        else list(dict.fromkeys(str(x.peak_phase) for x in anatomies if x is not None))
    )
    keyed = [_keyed(part or {}) for part in parts]
    if metric.name == "peak_reserved_bytes":
        for part, value in zip(keyed, (metric.a, metric.b), strict=True):
            part["reserved_unallocated"] = int(value or 0) - sum(part.values())
    return Split(metric=metric, a=keyed[0], b=keyed[1], phases=phases)


def _keyed(categories: Mapping[str, int]) -> dict[str | None, int]:
    return {str(category): size for category, size in categories.items()}


def _peak_categories(anatomy: Anatomy, phase: str | None) -> dict[str, int] | None:
    """Return the categories at a peak, none of them at a peak of 0; None when not recorded."""
    if phase is None:
        return anatomy.categories
    part = anatomy.phases.get(phase)
    if part is None or (part.peak_allocated_bytes and not part.categories):
        return None
    return part.categories


def _whole(metric: Metric, category: str | None) -> Split:
    phases = None if metric.phase is None else (metric.phase,)
    return Split(
        metric=metric,
        a={category: int(metric.a or 0)},
        b={category: int(metric.b or 0)},
        phases=phases,
    )


def _anatomy(metric: Metric, runs: Sequence[Run], value: float | None) -> Anatomy | None:
    """Return the anatomy of the metric's rank, of the launch whose peak is nearest ``value``."""
    found = []
    for run in runs:
        series = (
            fullest_rank(run, metric.phase) if metric.rank is None else rank_of(run, metric.rank)
        )
        if series is not None and series.anatomy is not None:
            found.append(series.anatomy)
    return min(found, key=lambda x: abs(x.peak_allocated_bytes - (value or 0)), default=None)
