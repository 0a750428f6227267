"""The table of what is said about the recorded failures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_doctor.postmortem import PostMortem

HEAD = """# Recorded failures and what `oom` says about them

Made by `python benchmarks/record_ooms.py --diagnose --markdown docs/oom-recorded.md` from
`tests/recorded/ooms`: training jobs that ran out of memory on purpose, recorded by the same script
on an H200 with torch 2.11.0 (one rank of N on one GPU, `fsdp_doctor/training`'s GPT). The limit is
`set_per_process_memory_fraction`; "second process": another one held all else of the device;
"device filled": the job itself took the rest of it by the driver. Causes are in order, with their
confidence; a cause in bold is the one that was put in.

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One recorded failure."""

    name: str
    cause: str
    """The one that was put in."""
    place: str
    """Phase and step in which it failed."""
    room: str
    """What made the memory end."""
    both: tuple[tuple[str, float], ...]
    """Causes and confidences from log and snapshot."""
    log: tuple[tuple[str, float], ...]
    """From the log alone."""

    @property
    def right(self) -> bool:
        """Whether log and snapshot put the cause first."""
        return [cause for cause, _ in self.both[:1]] == [self.cause]

    @property
    def log_right(self) -> bool:
        """Whether the log alone does."""
        return [cause for cause, _ in self.log[:1]] == [self.cause]


def row(folder: Path) -> Row:
    """Diagnose one recorded failure, with its snapshot and without."""
    from fsdp_doctor.postmortem import examine

    files = [folder / "log.txt"], folder / "config.json"
    snapshots = [path for path in (folder / "snapshot.pickle.gz",) if path.exists()]
    return row_of(folder, examine(*files, snapshots), examine(*files))


def row_of(folder: Path, both: PostMortem, log: PostMortem) -> Row:
    """One row from what was found with a snapshot and without."""
    truth = json.loads((folder / "case.json").read_text())
    place = truth["phase"] if truth["phase"] != "fault" else truth["fault"]
    limit = truth["limit_bytes"]
    room = "device filled" if limit is None else f"{limit / (1 << 30):.2f} GiB"
    if truth["second_process"]:
        room = "second process"
    if truth["allocator"]:
        room += f", {truth['allocator'].partition(':')[0]}"
    causes = [
        tuple((finding.cause, finding.confidence) for finding in found.findings)
        for found in (both, log)
    ]
    return Row(
        name=folder.name,
        cause=truth["cause"],
        place=f"{place} ({truth['step']})",
        room=room,
        both=causes[0],
        log=causes[1],
    )


def summary(rows: Iterable[Row]) -> str:
    """How many are right."""
    told = list(rows)
    return (
        f"{sum(row.right for row in told)} of {len(told)} have the cause first with log and "
        f"snapshot, {sum(row.log_right for row in told)} from the log alone."
    )


def markdown(rows: Iterable[Row]) -> str:
    """Return the page."""
    told = list(rows)
    lines = [
        "| case | failed in (step) | memory ends at | log and snapshot | log alone |",
        "|---|---|---|---|---|",
        *(
            f"| {r.name} | {r.place} | {r.room} | {_causes(r.both, r.cause)} "
            f"| {_causes(r.log, r.cause)} |"
            for r in told
        ),
    ]
    return HEAD + summary(told) + "\n\n" + "\n".join(lines) + "\n"


def _causes(causes: tuple[tuple[str, float], ...], right: str) -> str:
    words = [
        f"{'**' if cause == right else ''}{cause}{'**' if cause == right else ''} {sure:.2f}"
        for cause, sure in causes[:2]
    ]
    return ", ".join(words) or "-"
