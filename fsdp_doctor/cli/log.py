"""``fsdp-doctor log``."""

from __future__ import annotations

from pathlib import Path

import click

from fsdp_doctor.cli.common import deliver, refuse_overwrite, report_options


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@report_options
def command(
    *, directory: Path, output: Path | None, fmt: str | None, as_json: bool, force: bool
) -> int:
    """List the runs of a directory tree over time, and where a metric changed for good.

    Runs of one name are one series. At each change the effective fields and versions that differ
    from the run before are named. Bytes are exact; a step time counts as changed when at least
    three launches on either side say so.
    """
    from fsdp_doctor.attribution.run_history import find_changes, read_history
    from fsdp_doctor.report.history_document import render_history

    if output is not None:
        refuse_overwrite(output, force=force)
    entries = read_history(directory)
    changes = find_changes(entries)
    deliver(
        lambda chosen, **style: render_history(entries, changes, chosen, **style),
        output=output,
        fmt=fmt,
        as_json=as_json,
        force=force,
    )
    return 0
