"""``fsdp-doctor bisect A B``: re-run with fields flipped until it is known which one did it."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from fsdp_doctor.cli.common import (
    emit_json,
    json_option,
    print_text,
    refuse_overwrite,
    terminal_style,
    write_text,
)
from fsdp_doctor.cli.launching import launch_options, make_launch_options, progress_line

if TYPE_CHECKING:
    from fsdp_doctor.attribution.atoms import Flips
    from fsdp_doctor.attribution.bisect import Search
    from fsdp_doctor.cli.point_runs import PointRuns
    from fsdp_doctor.model.bisect import Bisection

_METRICS = ("peak_allocated_bytes", "peak_reserved_bytes", "resident_bytes", "step_time_s")
_GUESSED_LAUNCH_S = 15.0


@click.command("bisect")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder of the runs; a search that was stopped goes on there.",
)
@click.option("--report", "report_path", type=click.Path(path_type=Path), help="Write a report.")
@click.option(
    "--metric",
    type=click.Choice(_METRICS),
    default=_METRICS[0],
    show_default=True,
    help="What got worse.",
)
@click.option(
    "--until",
    type=click.Choice(["fits", "completes"]),
    help="In place of a metric: the fewest fields that make A fail as B does (fits: by memory).",
)
@click.option("--max-launches", type=click.IntRange(min=1), help="Make no more launches than this.")
@click.option("--max-minutes", type=click.FloatRange(min=0, min_open=True), help="Stop after this.")
@click.option("--plan", "plan_only", is_flag=True, help="Show what would be run; run nothing.")
@launch_options
@json_option
def command(
    *,
    a: Path,
    b: Path,
    output: Path,
    report_path: Path | None,
    metric: str,
    until: Literal["fits", "completes"] | None,
    max_launches: int | None,
    max_minutes: float | None,
    plan_only: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Find by re-runs which of the fields that differ between two specs did it.

    Memory takes one launch for each combination; step time interleaved launches until the interval
    is tight or the budget is spent. Combinations that cannot run are outcomes. With --until, delta
    debugging finds the fewest fields that make the job fail.
    """
    from fsdp_doctor.cli.point_runs import PointRuns
    from fsdp_doctor.report.base import format_of

    fmt = format_of(report_path) if report_path is not None else "html"
    if report_path is not None:
        refuse_overwrite(report_path, force=options["force"])
    flips, names = _flips(a, b, options["one_rank_of"])
    launch = make_launch_options(options)
    with progress_line() as tell:
        runs = PointRuns(
            directory=output,
            flips=flips,
            options=launch,
            tell=tell,
            max_launches=max_launches,
            deadline_s=None if max_minutes is None else time.monotonic() + 60 * max_minutes,
        )
        if plan_only:
            _show_plan(runs, metric, until, as_json=as_json)
            return 0
        with runs:
            runs.open(force=launch.force)
            found = _search(runs, metric, until, names)
    _deliver(found, report_path, fmt, as_json=as_json)
    return 0


def _flips(a: Path, b: Path, one_rank_of: int | None) -> tuple[Flips, tuple[str, str]]:
    """Return the fields that differ. Raises InputError when none does."""
    from fsdp_doctor.attribution.atoms import find_flips
    from fsdp_doctor.config.diff import diff_configs
    from fsdp_doctor.config.resolvers.torch import resolve_spec
    from fsdp_doctor.config.spec import load_written_spec
    from fsdp_doctor.errors import InputError

    overrides = (f"world_size={one_rank_of}",) if one_rank_of else ()
    sides = [load_written_spec(path, overrides) for path in (a, b)]
    configs = [resolve_spec(side.spec, side.written) for side in sides]
    diff = diff_configs(configs[0], configs[1])
    flips = find_flips(sides[0].spec, sides[1].spec, diff)
    if not flips.atoms:
        raise InputError("A and B differ in no field that has an effect", where=f"{a} and {b}")
    return flips, (sides[0].spec.name, sides[1].spec.name)


def _search(
    runs: PointRuns,
    metric: str,
    until: Literal["fits", "completes"] | None,
    names: tuple[str, str],
) -> Bisection:
    from fsdp_doctor.attribution.bisect import Search
    from fsdp_doctor.attribution.bisect_analysis import Analysis
    from fsdp_doctor.attribution.bisect_result import metric_result, predicate_result

    search = Search(flips=runs.flips, launch=runs, metric=metric)
    started = time.monotonic()
    if until is not None:
        guilty = search.run_predicate(until)
        return predicate_result(search, until, guilty, names, time.monotonic() - started)
    if metric == "step_time_s":
        search.run_times(lambda: Analysis(search).is_tight())
    else:
        search.run_memory()
    _need_both_ends(search)
    return metric_result(search, names, time.monotonic() - started)


def _need_both_ends(search: Search) -> None:
    from fsdp_doctor.errors import InputError

    if any(search.value(end) is None for end in search.design.ends):
        raise InputError(
            "the budget was spent before A and B were run",
            where="--max-launches",
            hint="call again to go on",
        )


def _show_plan(
    runs: PointRuns, metric: str, until: Literal["fits", "completes"] | None, *, as_json: bool
) -> None:
    """Tell the points, how many launches they take at least, and roughly how long."""
    from fsdp_doctor.attribution.bisect import Search
    from fsdp_doctor.attribution.statistics import MIN_LAUNCHES
    from fsdp_doctor.report.bisect_plan import Plan, PlannedPoint, plan_payload, render_plan

    search = Search(flips=runs.flips, launch=runs, metric=metric)
    each = MIN_LAUNCHES if metric == "step_time_s" and until is None else 1
    points = list(search.design.ends) if until is not None else search.design.all_points()
    planned = tuple(
        PlannedPoint(
            flipped=runs.flips.keys_of(point),
            overrides=runs.flips.overrides_at(point),
            launches=each,
            known=sum(runs.known(point, number) is not None for number in range(each)),
        )
        for point in points
    )
    known_s = _seconds_per_launch(runs, points, each)
    plan = Plan(
        design=search.design.kind if until is None else "delta debugging",
        metric=metric if until is None else until,
        points=planned,
        most=len(runs.flips.atoms) ** 2 + 3 if until is not None else None,
        seconds_per_launch=known_s or _GUESSED_LAUNCH_S,
        measured=known_s is not None,
    )
    if as_json:
        emit_json("bisect", {"plan": plan_payload(plan)})
    else:
        print_text(render_plan(plan, "terminal", **terminal_style()))


def _seconds_per_launch(runs: PointRuns, points: Any, each: int) -> float | None:
    """Return the mean duration of recorded launches, from creation to the last write."""
    from datetime import datetime

    found = []
    for point in points:
        for number in range(each):
            run = runs.known(point, number)
            if run is None or run.directory is None:
                continue
            start = datetime.fromisoformat(run.manifest.created).timestamp()
            found.append((run.directory / "run.json").stat().st_mtime - start)
    return sum(found) / len(found) if found else None


def _deliver(found: Bisection, path: Path | None, fmt: str, *, as_json: bool) -> None:
    from fsdp_doctor.report.bisect_document import bisection_payload, render_bisection

    if as_json:
        emit_json("bisect", bisection_payload(found), found.warnings)
    else:
        print_text(render_bisection(found, "terminal", **terminal_style()))
    if path is not None:
        write = partial(render_bisection, found)
        write_text(path, write(fmt))
        click.echo(f"Wrote {path}", err=as_json)
