"""``fsdp-doctor demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fsdp_doctor.cli.launching import launch_options


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("demo"),
    help="Folder for the recorded runs and the report (default demo/).",
)
@click.option("--launches", type=click.IntRange(min=1), default=3, help="Launches of each spec.")
@launch_options
@click.pass_context
def command(context: click.Context, /, *, output: Path, launches: int, **options: Any) -> int:
    """Profile two packaged specs with 2 ranks and compare them.

    What an earlier demo recorded in the output folder is replaced.

    They train the same small GPT under FSDP2 and differ in reshard_after_forward (and, as a decoy,
    in the learning rate). Takes about a minute on two CPU cores.
    """
    from fsdp_doctor.cli.compare import command as compare

    options["force"] = options["force"] or (output / "runs").is_dir()
    packaged = Path(__file__).parent.parent / "demo"
    status: int = context.invoke(
        compare,
        a=packaged / "fsdp2-reshard.yaml",
        b=packaged / "fsdp2-no-reshard.yaml",
        output=output / "report.html",
        launches=launches,
        runs_directory=output / "runs",
        as_json=False,
        **options,
    )
    return status
