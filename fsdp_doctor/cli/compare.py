"""``fsdp-doctor compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdp_doctor.cli.common import (
    emit_json,
    json_option,
    print_text,
    refuse_overwrite,
    terminal_style,
    write_text,
)
from fsdp_doctor.cli.gating import GateOptions, gate_options
from fsdp_doctor.cli.launching import launch_options, make_launch_options
from fsdp_doctor.cli.sides import Side, gather_sides, trained_now
from fsdp_doctor.cli.simulating import simulate_option, simulation

if TYPE_CHECKING:
    from fsdp_doctor.model.comparison import Comparison
    from fsdp_doctor.model.run import Run


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write a report file.")
@click.option(
    "--launches",
    type=click.IntRange(min=1),
    default=3,
    help="Launches of each spec, interleaved (default 3; fewer give no firm word on time).",
)
@click.option(
    "--runs",
    "runs_directory",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    help="Where specs are recorded (default runs/).",
)
@simulate_option
@gate_options
@launch_options
@json_option
def command(
    *,
    a: Path,
    b: Path,
    output: Path | None,
    launches: int,
    runs_directory: Path,
    simulate: bool | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Compare two runs: what got worse, by how much, how sure, and which flag did it.

    A and B are run directories (or directories of several launches), specs, which are profiled
    first, or the logs of jobs: a file or a directory of them, with their config beside them
    (job.log+conf.yaml) where they print no argument dump. Or both are CUDA memory snapshots, or
    directories with one of each rank.

    With --fail-on the exit status is 1 when a metric got worse by more than a threshold:
    'peak_allocated_bytes>2%', 'step_time_s>3%', 'peak_reserved_bytes>100MiB', 'retries>0',
    'tokens_per_s<-3%', 'phase_time_s[phase=backward]>5%'. See docs/gate.md.
    """
    from fsdp_doctor.cli.snapshots import are_snapshots, compare_snapshot_files

    gates = GateOptions.taken_from(options)
    if are_snapshots((a, b)):
        gates.refuse("memory snapshots", a)
        return compare_snapshot_files(a, b, output, as_json=as_json, force=options["force"])
    from fsdp_doctor.attribution.compare import comparison_to_payload
    from fsdp_doctor.report import render_comparison
    from fsdp_doctor.report.base import format_of

    fmt = format_of(output) if output else "html"
    if output is not None:
        refuse_overwrite(output, force=options["force"])
    launch = make_launch_options(options)
    sides = gather_sides(a, b, launch, launches, runs_directory)
    runs_a, runs_b = sides[0].runs, sides[1].runs
    trained = trained_now(sides)
    if _stopped(trained) and not all(any(map(_completed, runs)) for runs in (runs_a, runs_b)):
        raise click.Abort
    comparison = gates.held(_compare(*sides, simulate=simulate), runs_a, runs_b)
    gates.write(comparison)
    if as_json:
        emit_json("compare", comparison_to_payload(comparison), comparison.warnings)
    else:
        print_text(render_comparison(comparison, runs_a, runs_b, "terminal", **terminal_style()))
    if output is not None:
        write_text(output, render_comparison(comparison, runs_a, runs_b, fmt))
        click.echo(f"Wrote {output}", err=as_json)
    fine = all(map(_completed, trained)) and not any(gate.fails for gate in comparison.gates)
    return 0 if fine else 1


def _completed(run: Run) -> bool:
    return run.manifest.status == "completed"


def _stopped(runs: Sequence[Run]) -> bool:
    return any(run.manifest.status == "interrupted" for run in runs)


def _compare(side_a: Side, side_b: Side, *, simulate: bool | None) -> Comparison:
    """Compare two sides; where one is a job's log, its own framework's rules give the diff."""
    from fsdp_doctor.attribution.compare import compare_runs, compare_with_diff, effective_config
    from fsdp_doctor.config.diff import diff_configs
    from fsdp_doctor.model.config import ConfigDiff

    sides = (side_a, side_b)
    if all(side.kind != "log" for side in sides):
        with simulation(simulate) as simulated:
            return compare_runs(side_a.runs, side_b.runs, simulation=simulated)
    configs = [side.config or effective_config(side.runs[0]) for side in sides]
    sizes = [side.sizes or side.runs[0].manifest.sizes for side in sides]
    missing = [name for name, config in zip("AB", configs, strict=True) if not config.fields]
    if missing:
        warning = f"no config is known of {' and '.join(missing)}: nothing is attributed"
        empty = ConfigDiff(a=configs[0], b=configs[1], changed=(), cosmetic=(), inert=())
        return compare_with_diff(side_a.runs, side_b.runs, empty, warnings=[warning])
    diff = diff_configs(configs[0], configs[1], sizes[0], sizes[1])
    return compare_with_diff(side_a.runs, side_b.runs, diff)
