"""``fsdp-doctor report``: render recorded runs and memory snapshots."""

from __future__ import annotations

from pathlib import Path

import click

from fsdp_doctor.cli.common import deliver, report_options


@click.command("report")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@report_options
def command(
    runs: tuple[Path, ...], output: Path | None, fmt: str | None, as_json: bool, force: bool
) -> None:
    """Render recorded runs, or CUDA memory snapshots, as text, HTML, Markdown, JSON or CSV.

    RUN is a run directory, or a directory of runs. Failed runs are reported with what they
    recorded. Or RUN is one memory snapshot (a pickle, plain or gzip), or a directory with one of
    each rank.
    """
    from fsdp_doctor.cli.snapshots import are_snapshots, report_snapshots

    if are_snapshots(runs):
        report_snapshots(runs, output=output, fmt=fmt, as_json=as_json, force=force)
        return
    from fsdp_doctor.report.base import render_runs
    from fsdp_doctor.runs import load_launches

    loaded = [run for path in runs for run in load_launches(path)]
    deliver(
        lambda chosen, **style: render_runs(loaded, chosen, **style),
        output=output,
        fmt=fmt,
        as_json=as_json,
        force=force,
    )
