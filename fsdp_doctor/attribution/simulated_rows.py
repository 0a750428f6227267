"""Rows of an attribution from simulated points, held against what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from fsdp_doctor.attribution.attribute import (
    ATTRIBUTED,
    SIDES,
    Split,
    attribute,
    blamed_row,
    rest_row,
    share_of,
    split,
)
from fsdp_doctor.attribution.candidates import within_tolerance
from fsdp_doctor.attribution.shares import Division, whole_numbers
from fsdp_doctor.attribution.what_if import Component, Explored
from fsdp_doctor.attribution.what_if_summary import summarise
from fsdp_doctor.model.comparison import Attribution, Metric
from fsdp_doctor.model.config import ConfigChange
from fsdp_doctor.model.run import Run
from fsdp_doctor.model.what_if import WhatIf, WhatIfMiss
from fsdp_doctor.units import format_bytes

PREDICTED = 1
"""Evidence level of a simulation that agrees with the measurement; 0 where it does not."""
_CANCELLED = 0.1
"""Part of what categories miss each that their sum may miss."""


def attribute_by(
    explored: Explored,
    metrics: Sequence[Metric],
    changes: Sequence[ConfigChange],
    a: Sequence[Run],
    b: Sequence[Run],
) -> tuple[tuple[Attribution, ...], WhatIf]:
    """Put every firm memory difference down to fields: simulated numbers by their shares, the
    others by known effects. The values of one metric's rows sum to its delta exactly.
    """
    rows: list[Attribution] = []
    misses: list[WhatIfMiss] = []
    firm = [m for m in metrics if m.name in ATTRIBUTED and m.verdict in ("worse", "better")]
    for metric in firm:
        if explored.covers(metric):
            found, missed = simulated_rows(split(metric, a, b), explored, changes)
            rows += found
            misses += missed if metric.rank is None else ()
        else:
            rows += attribute([metric], changes, a, b)
    return tuple(rows), summarise(explored, misses, firm)


def simulated_rows(
    divided: Split, explored: Explored, changes: Sequence[ConfigChange]
) -> tuple[list[Attribution], list[WhatIfMiss]]:
    """Return the rows of one metric, largest first, and the misses of the simulation.

    Each category's measured difference is the sum of its rows: the shares of the fields as
    simulated, then what is left, which goes to a field outside the spec whose known effect it fits,
    or to none. A category whose simulated and measured differences contradict each other has no
    shares, unless the two merely name the same bytes differently.
    """
    metric = divided.metric
    beside = [c for c in changes if c.key in explored.flips.not_in_spec]
    rows: list[Attribution] = []
    misses = []
    for part in _parts(divided, explored):
        if part.measured or part.told:
            misses.append(
                WhatIfMiss(
                    metric=metric.name,
                    phase=metric.phase,
                    category=part.category,
                    measured=part.measured,
                    simulated=part.told,
                )
            )
        found = list(_shares(divided, part, explored))
        rest = part.measured - sum(row.value for row in found)
        rows += found
        if rest:
            rows.append(_rest(divided, part, rest, beside))
    rows.sort(key=lambda row: (not row.keys, -abs(row.value), str(row.category)))
    left = int(metric.delta or 0) - sum(row.value for row in rows)
    if left:
        rows.append(rest_row(metric, left, observed_at=int(metric.delta or 0) - left))
    return rows, misses


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A category of a metric, as measured and as simulated."""

    category: str | None
    measured: int
    """Bytes of B less those of A."""
    division: Division
    renamed: tuple[str | None, ...] = ()
    """The categories, this one among them, whose bytes the run and the simulation name otherwise;
    none: they agree on what is what."""

    @property
    def told(self) -> int:
        """Bytes of B less those of A, simulated."""
        return round(self.division.delta)

    @property
    def values(self) -> list[Fraction]:
        """Each field's simulated share."""
        return [share.value or Fraction(0) for share in self.division.shares]

    @property
    def agrees(self) -> bool:
        """Whether the simulated difference is the measured one."""
        scale = max(abs(self.measured), round(sum(map(abs, self.values), Fraction(0))))
        return within_tolerance(self.told, self.measured, scale)

    @property
    def contradicts(self) -> bool:
        """Whether the simulation tells nothing of the measured difference."""
        return not (self.agrees or self.renamed) and (self.told > 0) != (self.measured > 0)


def _parts(divided: Split, explored: Explored) -> list[_Part]:
    """Return every category that was measured or simulated.

    Categories disagree because the same bytes are named otherwise when what they miss cancels:
    when their sum misses at most a tenth of what they miss each.
    """
    metric = divided.metric
    whole = None in divided.a or None in divided.b
    simulated = set() if whole else explored.categories(metric.name, metric.phase)
    parts = [
        _Part(
            category=category,
            measured=divided.b.get(category, 0) - divided.a.get(category, 0),
            division=explored.divide(Component(metric.name, metric.phase, category)),
        )
        for category in sorted({*divided.a, *divided.b, *simulated}, key=str)
    ]
    misses = {part.category: part.measured - part.told for part in parts}
    if abs(sum(misses.values())) > _CANCELLED * sum(map(abs, misses.values())):
        return parts
    renamed = tuple(category for category, miss in misses.items() if miss)
    return [replace(part, renamed=() if part.agrees else renamed) for part in parts]


def _shares(divided: Split, part: _Part, explored: Explored) -> Iterator[Attribution]:
    if part.contradicts:
        return
    division = part.division
    values, _ = whole_numbers(part.values, part.told)
    for share, value in zip(division.shares, values, strict=True):
        if not value:
            continue
        atom = explored.flips.atoms[share.field]
        first, last = _whole(share.first_in), _whole(share.last_out)
        yield Attribution(
            metric=divided.metric.name,
            rank=divided.metric.rank,
            phase=divided.metric.phase,
            category=part.category,
            keys=atom.keys,
            value=value,
            share=share_of(value, divided.metric),
            level=PREDICTED if part.agrees else 0,
            predicted=value,
            evidence=_evidence(part, value, (first, last)),
            first_in=first,
            last_out=last,
            interacts_with=explored.partners(share.field, division),
            rests_on=(*SIDES, *explored.rests_on(share.field, division)),
        )


def _whole(value: Fraction | None) -> int | None:
    return None if value is None else round(value)


def _evidence(part: _Part, value: int, ends: tuple[int | None, int | None]) -> str:
    place = part.category or "allocated memory"
    first, last = (format_bytes(end, signed=True) for end in ends)
    text = f"{format_bytes(value, signed=True)} in {place}, simulated"
    if ends != (value, value):
        text += f": alone in A {first}, missing from B {last}"
    return text + (
        f" (all fields: simulated {format_bytes(part.told, signed=True)}, measured "
        f"{format_bytes(part.measured, signed=True)})"
    )


def _rest(divided: Split, part: _Part, rest: int, beside: Sequence[ConfigChange]) -> Attribution:
    """Put what the simulation leaves down to a field that it does not know, or to none."""
    if beside:
        row = blamed_row(divided, part.category, rest, beside)
        if row.keys:
            return row
    text = (
        f"{format_bytes(rest, signed=True)} in {part.category or 'allocated memory'}: measured "
        f"beyond the simulated {format_bytes(part.told, signed=True)}"
    )
    if part.renamed:
        names = ", ".join(map(str, part.renamed))
        text += f"; the sum of {names} agrees, its division does not"
    return Attribution(
        metric=divided.metric.name,
        rank=divided.metric.rank,
        phase=divided.metric.phase,
        category=part.category,
        keys=(),
        value=rest,
        share=share_of(rest, divided.metric),
        evidence=text,
        rests_on=SIDES,
    )
