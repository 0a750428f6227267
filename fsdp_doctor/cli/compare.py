"""``fsdp-doctor compare``."""

from __future__ import annotations

import shutil
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
from fsdp_doctor.cli.launching import launch_options, make_launch_options, progress_line

if TYPE_CHECKING:
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
    as_json: bool,
    **options: Any,
) -> int:
    """Compare two runs: what got worse, by how much, how sure, and which flag did it.

    A and B are run directories (or directories of several launches), or two specs, which are
    profiled first. Or both are CUDA memory snapshots, or directories with one of each rank.

    With --fail-on the exit status is 1 when a metric got worse by more than a threshold:
    'peak_allocated_bytes>2%', 'step_time_s>3%', 'peak_reserved_bytes>100MiB', 'retries>0',
    'tokens_per_s<-3%', 'phase_time_s[phase=backward]>5%'. See docs/gate.md.
    """
    from fsdp_doctor.cli.snapshots import are_snapshots, compare_snapshot_files

    gates = GateOptions.taken_from(options)
    if are_snapshots((a, b)):
        gates.refuse("memory snapshots", a)
        return compare_snapshot_files(a, b, output, as_json=as_json, force=options["force"])
    from fsdp_doctor.attribution.compare import compare_runs, comparison_to_payload
    from fsdp_doctor.report import render_comparison
    from fsdp_doctor.report.base import format_of

    fmt = format_of(output) if output else "html"
    if output is not None:
        refuse_overwrite(output, force=options["force"])
    launch = make_launch_options(options)
    runs_a, runs_b = gather_runs(a, b, launch, launches, runs_directory)
    trained = [run for path, runs in ((a, runs_a), (b, runs_b)) if is_spec(path) for run in runs]
    if _stopped(trained) and not all(any(map(_completed, runs)) for runs in (runs_a, runs_b)):
        raise click.Abort
    comparison = gates.held(compare_runs(runs_a, runs_b), runs_a, runs_b)
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


def is_spec(path: Path) -> bool:
    """Return whether ``path`` is a file, that is a spec and not a recorded run."""
    return path.is_file()


def gather_runs(
    a: Path, b: Path, options: Any, launches: int, runs_directory: Path
) -> tuple[list[Any], list[Any]]:
    """Read both sides; profile those that are specs, their launches interleaved A B B A ...

    With ``force`` all earlier launches of these specs are removed first, so that none of a longer
    series is left among the new ones.
    """
    from fsdp_doctor.config.spec import load_written_spec
    from fsdp_doctor.profiler.launch import profile_many
    from fsdp_doctor.runs import load_launches

    sides: list[list[Any]] = [[], []]
    specs = {side: load_written_spec(path) for side, path in enumerate((a, b)) if is_spec(path)}
    for side, path in enumerate((a, b)):
        if side not in specs:
            sides[side] = load_launches(path)
    if specs:
        folders = {s: runs_directory / f"{'ab'[s]}-{specs[s].spec.name}" for s in specs}
        if options.force:
            for folder in folders.values():
                _remove_launches(folder)
        jobs, owners = [], []
        for number in range(launches):
            order = sorted(specs, reverse=number % 2 == 1)
            for side in order:
                jobs.append((specs[side], folders[side] / f"launch-{number:03d}"))
                owners.append(side)
        with progress_line() as tell:
            for side, run in zip(owners, profile_many(jobs, options, tell), strict=False):
                sides[side].append(run)
    return sides[0], sides[1]


def _remove_launches(folder: Path) -> None:
    """Remove the recorded launches in ``folder``, and nothing else that lies there."""
    from fsdp_doctor.runs.reader import is_run_directory

    for launch in folder.glob("launch-[0-9][0-9][0-9]"):
        if is_run_directory(launch):
            shutil.rmtree(launch)
