"""``fsdp-doctor profile``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdp_doctor.cli.common import emit_json, json_option, print_text, terminal_style
from fsdp_doctor.cli.launching import launch_options, make_launch_options, progress_line
from fsdp_doctor.errors import InputError

if TYPE_CHECKING:
    from fsdp_doctor.config.spec import WrittenSpec

_TORCHRUN = (
    "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf",
    "--master-addr", "--master-port", "--local-addr",
)  # fmt: skip


def _torchrun_options(function: Any) -> Any:
    for name in reversed(_TORCHRUN):
        function = click.option(name, metavar="VALUE", help="As torchrun's.")(function)
    return click.option(
        "--nnodes",
        "nodes",
        type=click.IntRange(min=1),
        default=1,
        help="Hosts of the job (torchrun's --nnodes); run this command on each of them.",
    )(function)


@click.command()
@click.argument("specs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Run directory."
)
@click.option(
    "--launches",
    type=click.IntRange(min=1),
    default=1,
    help="Repeat each spec in fresh processes (claims about step time need three).",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a spec field.")
@click.option(
    "--checkpoint",
    "checkpoint",
    metavar="FORMAT",
    help="Save and load a checkpoint after the timed steps: torch_dist, fsdp_dtensor, torch_dcp, "
    "full.",
)
@click.option(
    "--layers", type=click.IntRange(min=1), help="Layers, in place of a Megatron-Bridge config's."
)
@click.option(
    "--hidden", type=click.IntRange(min=1), help="Width, in place of a Megatron-Bridge config's."
)
@launch_options
@_torchrun_options
@json_option
def command(
    *,
    specs: tuple[Path, ...],
    output: Path,
    launches: int,
    overrides: tuple[str, ...],
    checkpoint: str | None,
    layers: int | None,
    hidden: int | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Run short real training steps of each spec and record every rank's memory and time.

    One spec's real ranks are started by torchrun; on several hosts run the same command on each,
    with torchrun's own rendezvous options. Several specs or launches are recorded under the output
    folder, each in fresh processes forked on this host. A job that fails is recorded too; the exit
    status is then 1.
    """
    from fsdp_doctor.config.megatron_profile import Scale, load_profiled
    from fsdp_doctor.profiler.launch import profile, profile_many

    torchrun = {name: options.pop(name[2:].replace("-", "_")) for name in _TORCHRUN}
    chosen = [part for name, value in torchrun.items() if value for part in (name, value)]
    nodes = options["nodes"]
    if nodes > 1:
        chosen = ["--nnodes", str(nodes), *chosen]
    if chosen and (launches > 1 or len(specs) > 1):
        raise InputError("rendezvous options go with one spec and one launch", where="--nnodes")
    if checkpoint is not None:
        overrides = (*overrides, f"checkpoint={checkpoint}")
    if options["one_rank_of"]:
        overrides = (*overrides, f"world_size={options['one_rank_of']}")
    scale = Scale(layers=layers, hidden=hidden)
    profiled = [load_profiled(path, overrides, scale) for path in specs]
    loaded = [found.written for found in profiled]
    notes = [f"{p.written.spec.name}: {note}" for p in profiled for note in p.notes]
    for note in notes:
        click.echo(f"note: {note}", err=True)
    launch = make_launch_options(options, torchrun=tuple(chosen))
    with progress_line() as tell:
        if len(loaded) == launches == 1:
            runs = [profile(loaded[0], output, launch, tell)]
        else:
            runs = profile_many(run_directories(loaded, output, launches), launch, tell)
    failed = any(run.manifest.status != "completed" for run in runs)
    if as_json:
        emit_json("profile", {"runs": [_summary(run) for run in runs]}, notes)
    else:
        from fsdp_doctor.report import render_runs

        print_text(render_runs(runs, "terminal", **terminal_style()))
        click.echo(f"Wrote {output}. Next: fsdp-doctor report {output} -o report.html")
    return 1 if failed else 0


def run_directories(
    specs: Sequence[WrittenSpec], output: Path, launches: int
) -> list[tuple[WrittenSpec, Path]]:
    """Return the launches of several specs with their run directories, interleaved by launch."""
    names = [written.spec.name for written in specs]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise InputError(f"two specs are named {repeated.pop()!r}", hint="give each its own name")
    jobs = []
    for number in range(launches):
        for written in specs:
            folder = output / written.spec.name if len(specs) > 1 else output
            jobs.append((written, folder / f"launch-{number:03d}" if launches > 1 else folder))
    return jobs


def _summary(run: Any) -> dict[str, Any]:
    from fsdp_doctor.runs.summary import resident_bytes, steady_peak_bytes

    return {
        "directory": str(run.directory),
        "status": run.manifest.status,
        "failure": run.manifest.failure,
        "ranks": [
            {
                "rank": series.rank,
                "peak_allocated_bytes": steady_peak_bytes(series),
                "peak_reserved_bytes": steady_peak_bytes(series, counter="reserved_bytes"),
                "resident_bytes": resident_bytes(series),
            }
            for series in run.ranks
        ],
    }
