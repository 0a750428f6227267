"""From the launches of a search to its answer: shares, sufficient and necessary fields, rest."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_doctor.attribution.bisect import METRICS, Search, fails
from fsdp_doctor.attribution.bisect_analysis import (
    RERUN_BOTH_WAYS,
    RERUN_ONE_WAY,
    Analysis,
    number_of,
    point_ids,
)
from fsdp_doctor.attribution.design import Point
from fsdp_doctor.model.bisect import Bisection, BisectPoint, BisectShare, Predicate


def points_of(search: Search) -> list[BisectPoint]:
    """Return every evaluated point with its launches."""
    found = []
    for point, name in point_ids(search).items():
        runs = [o.run for o in search.outcomes[point] if o.run is not None]
        found.append(
            BisectPoint(
                id=name,
                flipped=search.flips.keys_of(point),
                overrides=search.flips.overrides_at(point),
                runs=tuple(str(run.directory) for run in runs),
                value=search.value(point),
                failure=search.failure(point),
            )
        )
    return found


def _common(search: Search, names: tuple[str, str], seconds: float) -> dict[str, object]:
    outcomes = [o for known in search.outcomes.values() for o in known]
    return {
        "name_a": names[0],
        "name_b": names[1],
        "fields": tuple(atom.keys for atom in search.flips.atoms),
        "points": tuple(points_of(search)),
        "launches": sum(not o.reused and o.run is not None for o in outcomes),
        "reused": sum(o.reused for o in outcomes),
        "seconds": seconds,
        "complete": search.complete,
    }


def metric_result(search: Search, names: tuple[str, str], seconds: float) -> Bisection:
    """Return the answer of a search over a metric."""
    analysis = Analysis(search)
    half = analysis.delta_half()
    smallest = analysis.smallest_set()
    return Bisection(
        **_common(search, names, seconds),  # type: ignore[arg-type]
        metric=search.metric,
        until=None,
        unit=METRICS[search.metric],  # type: ignore[arg-type]
        delta=number_of(analysis.division.delta),
        interval=None if half is None else (analysis.delta - half, analysis.delta + half),
        shares=tuple(analysis.shares()),
        interactions=tuple(analysis.interactions()),
        rest=number_of(analysis.division.rest),
        smallest_set=None if smallest is None else search.flips.keys_of(smallest[0]),
        smallest_set_share=None if smallest is None else smallest[1],
        warnings=tuple(_warnings(search, analysis)),
    )


def _warnings(search: Search, analysis: Analysis) -> Sequence[str]:
    found = []
    if not search.complete:
        found.append("the budget was spent before every point was known: call again to go on")
    if not analysis.is_clear():
        found.append("A and B do not differ by more than noise or tolerance: nothing is blamed")
    if search.flips.not_in_spec:
        found.append(f"in no spec, so not flipped: {', '.join(search.flips.not_in_spec)}")
    return found


def predicate_result(
    search: Search, until: Predicate, found: Point | None, names: tuple[str, str], seconds: float
) -> Bisection:
    """Return the answer of a search for what makes a job fail."""
    keys = None if found is None else search.flips.keys_of(found)
    warnings = []
    if found is None:
        warnings.append("the budget was spent before the search ended: call again to go on")
    shares = [] if found is None else _guilty(search, until, found)
    return Bisection(
        **_common(search, names, seconds),  # type: ignore[arg-type]
        metric=None,
        until=until,
        unit=None,
        delta=None,
        interval=None,
        shares=tuple(shares),
        interactions=(),
        rest=None,
        smallest_set=keys,
        smallest_set_share=None,
        warnings=tuple(warnings),
    )


def _guilty(search: Search, until: Predicate, found: Point) -> list[BisectShare]:
    """Return the fields of the failing set: each is necessary in it; alone it is sufficient."""
    end = search.design.ends[1]
    mended = fails(search.outcomes[end - found][0], until) is False if end - found else True
    ids = point_ids(search)
    rests = tuple(ids[p] for p in (found, end - found) if p in ids)
    return [
        BisectShare(
            keys=search.flips.atoms[n].keys,
            value=None,
            share=None,
            interval=None,
            first_in=None,
            last_out=None,
            sufficient=len(found) == 1,
            necessary=mended and len(found) == 1,
            interacts_with=tuple(k for k in search.flips.keys_of(found - {n})),
            level=RERUN_BOTH_WAYS if mended else RERUN_ONE_WAY,
            rests_on=rests,
        )
        for n in sorted(found)
    ]
