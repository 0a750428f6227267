"""Did the launches of two sides alternate? Else a change of the machine looks like one of B."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from fsdp_doctor.model.run import Run


def interleaving_warnings(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """Return why the times of A and B may differ by when or where they ran; none when they do not.

    Order is judged from two launches a side on; before that there is no verdict on time anyway.
    """
    warnings = []
    hosts_a, hosts_b = _hosts(a), _hosts(b)
    if hosts_a and hosts_b and hosts_a != hosts_b:
        names = f"{', '.join(sorted(hosts_a))} -> {', '.join(sorted(hosts_b))}"
        warnings.append(f"A and B ran on different hosts ({names}): no firm verdict on time")
    if min(len(a), len(b)) >= 2 and (first := _first_side(a, b)) is not None:
        other = "B" if first == "A" else "A"
        warnings.append(
            f"all launches of {first} ran before those of {other}: a drift of the machine would "
            "look the same, so no firm verdict on time; compare two specs to interleave them"
        )
    return warnings


def _hosts(runs: Sequence[Run]) -> set[str]:
    return {series.host for run in runs for series in run.ranks if series.host is not None}


def _first_side(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """Return the side whose launches all began before the first of the other."""
    starts = [[_start(run) for run in runs] for runs in (a, b)]
    known = [[start for start in side if start is not None] for side in starts]
    if known != starts:
        return None
    if max(known[0]) < min(known[1]):
        return "A"
    return "B" if max(known[1]) < min(known[0]) else None


def _start(run: Run) -> datetime | None:
    try:
        start = datetime.fromisoformat(run.manifest.created)
    except ValueError:
        return None
    return start if start.tzinfo is not None else start.replace(tzinfo=UTC)
