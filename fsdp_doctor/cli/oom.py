"""``fsdp-doctor oom``."""

from __future__ import annotations

from pathlib import Path

import click

from fsdp_doctor.cli.common import deliver, report_options


@click.command("oom")
@click.argument("logs", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--snapshot",
    "snapshots",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A CUDA memory snapshot of the failure, or a directory with one of each rank.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="The job's config, of any framework: names the flags concerned, sharpens the diagnosis.",
)
@report_options
def command(
    *,
    logs: tuple[Path, ...],
    snapshots: tuple[Path, ...],
    config: Path | None,
    output: Path | None,
    fmt: str | None,
    as_json: bool,
    force: bool,
) -> int:
    """Say from a dead job's LOGS what failed first, where, why, and what to change.

    LOGS are files, directories or - (standard input): plain or gzip, one file a rank or all ranks
    in one stream, torchrun's error files and memory snapshots among them. Written as HTML or
    Markdown, paths, hosts and secrets are replaced. The exit status is 0 whatever was found.
    """
    from fsdp_doctor.postmortem import examine
    from fsdp_doctor.report.oom_document import render_postmortem

    result = examine(logs, config, snapshots)
    deliver(
        lambda kind, **style: render_postmortem(result, kind, **style),
        output=output,
        fmt=fmt,
        as_json=as_json,
        force=force,
    )
    return 0
