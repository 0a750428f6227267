"""What ``report`` and ``compare`` do with memory snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdp_doctor.cli.common import (
    deliver,
    print_text,
    refuse_overwrite,
    terminal_style,
    write_text,
)
from fsdp_doctor.errors import InputError

if TYPE_CHECKING:
    from fsdp_doctor.memory.snapshot_files import SnapshotFile


def are_snapshots(paths: Sequence[Path]) -> bool:
    """Return whether all paths are snapshots. Raises InputError when only some are."""
    from fsdp_doctor.memory.snapshot_files import is_snapshot

    found = [is_snapshot(path) for path in paths]
    if any(found) and not all(found):
        other = paths[found.index(False)]
        raise InputError(
            "not a memory snapshot, but the other one is", where=str(other), hint="give two alike"
        )
    return all(found)


def report_snapshots(
    paths: Sequence[Path], *, output: Path | None, fmt: str | None, as_json: bool, force: bool
) -> None:
    """Print or write the report of snapshot files or directories of them."""
    from fsdp_doctor.memory.snapshot_analysis import analyse_ranks, worst
    from fsdp_doctor.postmortem.diagnose import diagnose_snapshot
    from fsdp_doctor.report.snapshot_report import render_snapshots

    if output is not None:
        refuse_overwrite(output, force=force)
    analyses = [diagnose_snapshot(found) for path in paths for found in analyse_ranks(path)]
    shown = worst(analyses)
    deliver(
        lambda chosen, **style: render_snapshots(analyses, shown, chosen, **style),
        output=output,
        fmt=fmt,
        as_json=as_json,
        force=force,
    )


def compare_snapshot_files(
    a: Path, b: Path, output: Path | None, *, as_json: bool, force: bool
) -> int:
    """Print, and where asked write, the comparison of two snapshots; return the exit status."""
    from fsdp_doctor.memory.snapshot_compare import compare_snapshots
    from fsdp_doctor.postmortem.snapshot_differences import explain_comparison
    from fsdp_doctor.report.base import format_of
    from fsdp_doctor.report.snapshot_report import render_snapshot_comparison

    fmt = format_of(output) if output else "html"
    if output is not None:
        refuse_overwrite(output, force=force)
    file_a, file_b = same_rank(a, b)
    comparison = explain_comparison(
        compare_snapshots(file_a.path, file_b.path, rank_a=file_a.rank, rank_b=file_b.rank)
    )
    if as_json:
        print_text(render_snapshot_comparison(comparison, "json"))
    else:
        print_text(render_snapshot_comparison(comparison, "terminal", **terminal_style()))
    if output is not None:
        write_text(output, render_snapshot_comparison(comparison, fmt))
        click.echo(f"Wrote {output}", err=as_json)
    return 0


def same_rank(a: Path, b: Path) -> tuple[SnapshotFile, SnapshotFile]:
    """Return one file of each side: of the first rank that both have, else each side's first."""
    from fsdp_doctor.memory.snapshot_files import find_snapshots

    files_a, files_b = find_snapshots(a), find_snapshots(b)
    ranks_b = {file.rank: file for file in files_b}
    for file in files_a:
        if file.rank is not None and file.rank in ranks_b:
            return file, ranks_b[file.rank]
    return files_a[0], files_b[0]
