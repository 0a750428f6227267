"""Rows of an attribution from simulated points, held against what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    or to none.
    """
    metric = divided.metric
    beside = [c for c in changes if c.key in explored.flips.not_in_spec]
    rows: list[Attribution] = []
    misses = []
    whole = None in divided.a or None in divided.b
    simulated = set() if whole else explored.categories(metric.name, metric.phase)
    for category in sorted({*divided.a, *divided.b, *simulated}, key=str):
        measured = divided.b.get(category, 0) - divided.a.get(category, 0)
        component = Component(metric.name, metric.phase, category)
        division = explored.divide(component)
        told = round(division.delta)
        if measured or told:
            misses.append(
                WhatIfMiss(
                    metric=metric.name,
                    phase=metric.phase,
                    category=category,
                    measured=measured,
                    simulated=told,
                )
            )
        found = list(_shares(divided, category, measured, division, explored))
        rest = measured - sum(row.value for row in found)
        rows += found
        if rest:
            rows.append(_rest(divided, category, rest, told, beside))
    rows.sort(key=lambda row: (not row.keys, -abs(row.value), str(row.category)))
    left = int(metric.delta or 0) - sum(row.value for row in rows)
    if left:
        rows.append(rest_row(metric, left, observed_at=int(metric.delta or 0) - left))
    return rows, misses


def _shares(
    divided: Split,
    category: str | None,
    measured: int,
    division: Division,
    explored: Explored,
) -> Iterator[Attribution]:
    parts = [share.value or Fraction(0) for share in division.shares]
    scale = max(abs(measured), round(sum(map(abs, parts), Fraction(0))))
    told = round(division.delta)
    agrees = within_tolerance(told, measured, scale)
    if not agrees and (told > 0) != (measured > 0):
        return
    values, _ = whole_numbers(parts, told)
    for share, value in zip(division.shares, values, strict=True):
        if not value:
            continue
        atom = explored.flips.atoms[share.field]
        first, last = _whole(share.first_in), _whole(share.last_out)
        yield Attribution(
            metric=divided.metric.name,
            rank=divided.metric.rank,
            phase=divided.metric.phase,
            category=category,
            keys=atom.keys,
            value=value,
            share=share_of(value, divided.metric),
            level=PREDICTED if agrees else 0,
            predicted=value,
            evidence=_evidence(category, value, (first, last), told, measured),
            first_in=first,
            last_out=last,
            interacts_with=explored.partners(share.field, division),
            rests_on=(*SIDES, *explored.rests_on(share.field, division)),
        )


def _whole(value: Fraction | None) -> int | None:
    return None if value is None else round(value)


def _evidence(
    category: str | None,
    value: int,
    ends: tuple[int | None, int | None],
    told: int,
    measured: int,
) -> str:
    place = category or "allocated memory"
    first, last = (format_bytes(end, signed=True) for end in ends)
    text = f"{format_bytes(value, signed=True)} in {place}, simulated"
    if ends != (value, value):
        text += f": alone in A {first}, missing from B {last}"
    return text + (
        f" (all fields: simulated {format_bytes(told, signed=True)}, measured "
        f"{format_bytes(measured, signed=True)})"
    )


def _rest(
    divided: Split,
    category: str | None,
    rest: int,
    told: int,
    beside: Sequence[ConfigChange],
) -> Attribution:
    """Put what the simulation leaves down to a field that it does not know, or to none."""
    if beside:
        row = blamed_row(divided, category, rest, beside)
        if row.keys:
            return row
    text = (
        f"{format_bytes(rest, signed=True)} in {category or 'allocated memory'}: measured beyond "
        f"the simulated {format_bytes(told, signed=True)}"
    )
    return Attribution(
        metric=divided.metric.name,
        rank=divided.metric.rank,
        phase=divided.metric.phase,
        category=category,
        keys=(),
        value=rest,
        share=share_of(rest, divided.metric),
        evidence=text,
        rests_on=SIDES,
    )
