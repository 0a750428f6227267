"""List the runs, steps and lines that a comparison rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_doctor.attribution.times import timed_steps
from fsdp_doctor.model.basis import Basis
from fsdp_doctor.model.run import Run
from fsdp_doctor.runs.columns import KINDS, columns_of


def basis_of(
    a: Sequence[Run], b: Sequence[Run], used_a: Sequence[Run], used_b: Sequence[Run]
) -> tuple[Basis, ...]:
    """Return every launch of both sides; ``used_a``, ``used_b``: those that were compared."""
    return (*_side("A", a, used_a), *_side("B", b, used_b))


def _side(side: str, runs: Sequence[Run], used: Sequence[Run]) -> Iterator[Basis]:
    for number, run in enumerate(runs, 1):
        manifest = run.manifest
        columns = [columns_of(series) for series in run.ranks]
        steady = [c.kinds[c.steady()] for c in columns]
        kinds = {KINDS[code] for of_rank in steady for code in set(of_rank.tolist())}
        yield Basis(
            label=f"{side}{number}",
            name=manifest.name,
            place="/".join(run.directory.parts[-2:]) if run.directory else "",
            created=manifest.created,
            source=manifest.source,
            status=manifest.status,
            used=any(run is other for other in used),
            ranks=len(run.ranks),
            timed_steps=max((int(timed_steps(c).sum()) for c in columns), default=0),
            memory_steps=max((len(of_rank) for of_rank in steady), default=0),
            memory_kind=" and ".join(sorted(kinds)) or None,
            log_lines=dict(manifest.log_lines),
            log_places=manifest.log_places,
        )
