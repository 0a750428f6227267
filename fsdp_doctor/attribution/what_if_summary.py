"""What a report tells of simulated points: each field's share, interactions, misses, evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_doctor.attribution.attribute import SIDES, share_of
from fsdp_doctor.attribution.candidates import within_tolerance
from fsdp_doctor.attribution.design import Point
from fsdp_doctor.attribution.what_if import SIMULATED, Component, Explored
from fsdp_doctor.model.comparison import Metric
from fsdp_doctor.model.what_if import (
    WhatIf,
    WhatIfInteraction,
    WhatIfMiss,
    WhatIfPoint,
    WhatIfShare,
)


def summarise(
    explored: Explored, misses: Sequence[WhatIfMiss], metrics: Sequence[Metric]
) -> WhatIf:
    """Return what is told of the simulation; ``metrics``: those that changed firmly."""
    flips = explored.flips
    over_ranks = [m for m in metrics if m.name in SIMULATED and m.rank is None]
    return WhatIf(
        kind=explored.design.kind,
        rank=explored.rank,
        world_size=flips.b.world_size,
        device=explored.device,
        fields=tuple(atom.keys for atom in flips.atoms),
        not_simulated=flips.not_in_spec,
        points=tuple(_point(explored, point) for point in explored.vectors),
        misses=tuple(misses),
        interactions=tuple(_interactions(explored, over_ranks)),
        shares=tuple(share for m in over_ranks for share in _shares(explored, m)),
    )


def _point(explored: Explored, point: Point) -> WhatIfPoint:
    step = explored.steps.get(point)
    return WhatIfPoint(
        id=explored.id_of(point),
        flipped=explored.flips.keys_of(point),
        overrides=explored.flips.overrides_at(point),
        peak_allocated_bytes=None if step is None else step.peak_allocated_bytes,
        peak_phase=None if step is None else str(step.peak_phase),
        failure=explored.failures.get(point),
    )


def _interactions(explored: Explored, metrics: Sequence[Metric]) -> Iterator[WhatIfInteraction]:
    """Yield the interactions in each number, over all categories."""
    for metric in metrics:
        division = explored.divide(Component(metric.name, metric.phase, None))
        for interaction in division.interactions:
            yield WhatIfInteraction(
                metric=metric.name,
                phase=metric.phase,
                keys=explored.flips.keys_of(interaction.fields),
                value=round(interaction.value),
            )


def _shares(explored: Explored, metric: Metric) -> Iterator[WhatIfShare]:
    """Yield the share of every field, largest first."""
    division = explored.divide(Component(metric.name, metric.phase, None))
    measured = int(metric.delta or 0)
    agrees = within_tolerance(round(division.delta), measured, abs(measured))
    order = sorted(division.shares, key=lambda s: (-abs(s.value or 0), s.field))
    for share in order:
        value = None if share.value is None else round(share.value)
        yield WhatIfShare(
            metric=metric.name,
            phase=metric.phase,
            keys=explored.flips.atoms[share.field].keys,
            value=value,
            share=None if value is None else share_of(value, metric),
            first_in=None if share.first_in is None else round(share.first_in),
            last_out=None if share.last_out is None else round(share.last_out),
            one_sided=share.one_sided,
            interacts_with=explored.partners(share.field, division),
            level=int(agrees),
            rests_on=(*SIDES, *explored.rests_on(share.field, division)),
        )
