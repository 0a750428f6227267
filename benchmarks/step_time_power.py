"""How often is a slower step found, and how often one that is not there?

    python benchmarks/step_time_power.py record SPEC --one-rank-of 2 -o DIR [--launches 12]
    python benchmarks/step_time_power.py judge DIR [-o docs/step-time-verdicts.md]

``record`` makes fresh, interleaved launches of the spec (A) and of the spec with 5 % and with 10 %
of A's step time added to the forward pass (``--add``), as ordinary runs: ``DIR/plus-0-00``,
``DIR/plus-5-00`` ... The model is the spec's GPT in ``slowed_gpt.py``; run.json says what was added
(``workload.model.kwargs.added_s``). Two launches in ``DIR/calibration`` give A's step time and, on
a GPU, the clock of the added kernel. What is recorded already is left alone.

``judge`` draws 5 of the launches a side (``--of``), many times, and lets ``compare`` judge: A
against disjoint launches of A, and A against each addition. With ``--in-turn`` launches are not
drawn: each run of ``--of`` launches in order of time is one repetition, used once.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp_doctor.attribution.compare import compare_runs
from fsdp_doctor.attribution.findings import moved_phases
from fsdp_doctor.attribution.times import LaunchTimes, launch_times
from fsdp_doctor.config.spec import WrittenSpec, load_spec, spec_to_mapping
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.comparison import Comparison, Metric
from fsdp_doctor.model.run import Run
from fsdp_doctor.model.spec import ModelSpec, ProfileSpec
from fsdp_doctor.profiler.launch import Launcher, LaunchOptions
from fsdp_doctor.runs import load_run

HERE = Path(__file__).parent
PHASE = "forward"
MOST_FALSE, LEAST_FOUND = 0.03, 0.95
"""Goals: firm verdicts between launches of A, and the smallest addition found."""
PROBE_SHARE, NOMINAL_CYCLES_PER_S = 0.2, 1.7e9
"""Of the calibration: added share of the step, and the clock rate assumed before it is known."""


# -- record ---------------------------------------------------------------------------------------


def slowed(spec: ProfileSpec, name: str, added_s: float, cycles_per_s: float) -> ProfileSpec:
    """Return the spec with its GPT by import path and ``added_s`` in each forward pass."""
    shape = spec_to_mapping(spec)["workload"]["model"]
    for key in ("factory", "batch", "loss", "kwargs"):
        shape.pop(key, None)
    model = ModelSpec(
        factory="slowed_gpt:build",
        batch="slowed_gpt:batch",
        kwargs={
            **shape,
            "sequence_length": spec.workload.sequence_length,
            "added_s": added_s,
            "cycles_per_s": cycles_per_s,
        },
    )
    return replace(
        spec,
        name=name,
        workload=replace(spec.workload, model=model),
        steps=replace(spec.steps, kernel_profile=False),
    )


class Recording:
    """Launches into one folder; those that are there already are read."""

    def __init__(self, folder: Path, options: LaunchOptions, launcher: Launcher) -> None:
        self._folder, self._options, self._launcher = folder, options, launcher

    def run(self, spec: ProfileSpec, place: str) -> Run | None:
        """Record one launch; None, and a line, when it failed."""
        directory = self._folder / place
        if recorded(directory):
            return load_run(directory)
        started = time.monotonic()
        written = WrittenSpec(spec=spec, written={})
        run = self._launcher.run(written, directory, self._options, lambda _text: None)
        took_s = time.monotonic() - started
        if run.manifest.status == "interrupted":
            raise KeyboardInterrupt
        if run.manifest.status != "completed":
            print(f"{place}: {run.manifest.status}: {run.manifest.failure}", flush=True)
            return None
        times = launch_times(run)
        print(
            f"{place}: step {_middle_s(times) * 1e3:.2f} ms, {PHASE} "
            f"{_middle_s(times, PHASE) * 1e3:.2f} ms, launch took {took_s:.1f} s",
            flush=True,
        )
        return run


def recorded(directory: Path) -> bool:
    """Return whether a completed run is there."""
    return (directory / "run.json").is_file() and load_run(directory).manifest.status == "completed"


def _middle_s(times: LaunchTimes, phase: str | None = None) -> float:
    values = times.step if phase is None else times.phases[phase]
    return float(statistics.median(values.tolist()))


def calibrate(recording: Recording, spec: ProfileSpec) -> tuple[float, float]:
    """Return A's step time (s) and the clock rate (1/s) at which the added time comes out right."""
    plain = recording.run(slowed(spec, spec.name, 0.0, 0.0), "calibration/plain")
    if plain is None:
        sys.exit("the spec does not run: nothing recorded")
    times = launch_times(plain)
    step_s = _middle_s(times)
    if plain.manifest.device_type != "cuda":
        return step_s, 0.0
    added_s = PROBE_SHARE * step_s
    probe = slowed(spec, spec.name, added_s, NOMINAL_CYCLES_PER_S)
    run = recording.run(probe, "calibration/probe")
    came_out_s = 0.0
    if run is not None:
        came_out_s = _middle_s(launch_times(run), PHASE) - _middle_s(times, PHASE)
    if not 0.5 < came_out_s / added_s < 2.0:  # no clock is that far off
        sys.exit(f"the calibration failed: {added_s:.4f} s added came out as {came_out_s:.4f} s")
    cycles_per_s = NOMINAL_CYCLES_PER_S * added_s / came_out_s
    print(f"clock of the added kernel: {cycles_per_s / 1e6:.0f} MHz", flush=True)
    return step_s, cycles_per_s


def record(chosen: argparse.Namespace) -> int:
    """Record what is missing; exit status 1 when something still is."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    until = time.monotonic() + chosen.max_minutes * 60
    spec = load_spec(chosen.spec)
    if spec.workload.model.factory is not None:
        raise InputError("this benchmark slows the built-in GPT down", where=str(chosen.spec))
    options = LaunchOptions(
        one_rank_of=chosen.one_rank_of, device=chosen.device, observe=False, force=True
    )
    sides = [0.0, *chosen.add]
    with Launcher() as launcher:
        recording = Recording(chosen.output, options, launcher)
        step_s, cycles_per_s = calibrate(recording, spec)
        specs = {
            side_name(percent): slowed(
                spec,
                spec.name if not percent else f"{spec.name}-{side_name(percent)}",
                step_s * percent / 100,
                cycles_per_s,
            )
            for percent in sides
        }
        missing = 0
        for number in range(chosen.launches):
            for name in specs if number % 2 == 0 else reversed(specs):
                late = time.monotonic() > until
                place = f"{name}-{number:02}"
                if late:
                    missing += not recorded(chosen.output / place)
                else:
                    missing += recording.run(specs[name], place) is None
    if missing:
        print(f"{missing} launches are missing: the same command goes on", flush=True)
    return int(missing > 0)


def side_name(percent: float) -> str:
    """Return the name of the side with this much added."""
    return f"plus-{percent:g}"


# -- judge ----------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What ``compare`` said in many draws of one pair of sides."""

    percent: float
    """Added to B."""
    truth: float
    """Relative change, B against A, over all launches; 0 for A against A."""
    verdicts: Counter[str] = field(default_factory=Counter)
    capped: int = 0
    covered: int = 0
    widths: list[float] = field(default_factory=list)
    phases: Counter[str] = field(default_factory=Counter)
    """Of draws found worse: the phases that the finding names, largest change first."""
    besides: int = 0
    """Draws in which a phase without added time got a firm verdict too."""
    memory: Counter[str] = field(default_factory=Counter)

    @property
    def draws(self) -> int:
        """Comparisons made."""
        return self.verdicts.total()

    def add(self, comparison: Comparison) -> None:
        """Count one comparison."""
        step = next(m for m in comparison.metrics if m.name == "step_time_s" and m.rank is None)
        self.verdicts[step.verdict] += 1
        self.capped += step.capped
        assert step.interval is not None
        low, high = step.interval
        self.covered += low <= self.truth <= high
        self.widths.append(high - low)
        firm = [m for m in _phases(comparison) if m.verdict in ("worse", "better")]
        if step.verdict == "worse":
            named = moved_phases(comparison.metrics, step)
            self.phases[" and ".join(str(m.phase) for m in named) or "none"] += 1
        self.besides += any(m.phase != PHASE or not self.percent for m in firm)
        self.memory.update(m.verdict for m in comparison.metrics if m.unit == "bytes")

    def share(self, *verdicts: str) -> float:
        """Return the share of draws with one of these verdicts."""
        return sum(self.verdicts[v] for v in verdicts) / self.draws


def _phases(comparison: Comparison) -> Iterator[Metric]:
    for metric in comparison.metrics:
        if metric.name == "phase_time_s" and metric.category is None and metric.rank is None:
            yield metric


def draws(
    a: Sequence[Run], b: Sequence[Run] | None, of: int, count: int, generator: random.Random
) -> Iterator[tuple[list[Run], list[Run]]]:
    """Yield ``count`` draws of ``of`` launches a side; without ``b`` two disjoint ones of ``a``."""
    for _ in range(count):
        if b is None:
            both = generator.sample(a, 2 * of)
            yield both[:of], both[of:]
        else:
            yield generator.sample(a, of), generator.sample(b, of)


def in_turn(
    a: Sequence[Run], b: Sequence[Run] | None, of: int
) -> Iterator[tuple[list[Run], list[Run]]]:
    """Yield repetitions in order of time; without ``b`` every other launch of A is a B."""
    if b is None:
        for start in range(0, len(a) - 2 * of + 1, 2 * of):
            block = a[start : start + 2 * of]
            yield list(block[::2]), list(block[1::2])
        return
    for start in range(0, min(len(a), len(b)) - of + 1, of):
        yield list(a[start : start + of]), list(b[start : start + of])


def read_sides(folder: Path) -> dict[float, list[Run]]:
    """Return the completed launches of each side, in order; keys are percent added."""
    sides: dict[float, list[Run]] = {}
    for directory in sorted(folder.glob("plus-*-*")):
        percent = float(directory.name.removeprefix("plus-").rpartition("-")[0])
        if recorded(directory):
            sides.setdefault(percent, []).append(load_run(directory))
    return dict(sorted(sides.items()))


def _log_middle_s(runs: Sequence[Run], phase: str | None = None) -> float:
    """Return the geometric mean over launches of the median step, as ``compare`` shows it."""
    return statistics.geometric_mean(_middle_s(launch_times(run), phase) for run in runs)


def judge(chosen: argparse.Namespace) -> int:
    """Print what compare says of the recorded launches; exit status 1 when a goal is missed."""
    sides = read_sides(chosen.folder)
    base = sides.get(0.0, [])
    if len(base) < 2 * chosen.of or len(sides) < 2:
        raise InputError(
            f"{len(base)} launches of A and {len(sides) - 1} additions: too few",
            where=str(chosen.folder),
        )
    step_s = _log_middle_s(base)
    tallies = []
    for percent, runs in sides.items():
        truth = _log_middle_s(runs) / step_s - 1 if percent else 0.0
        tally = Tally(percent=percent, truth=truth)
        other = runs if percent else None
        generator = random.Random(f"{chosen.seed}/{percent}")  # noqa: S311 (no secret)
        pairs = (
            in_turn(base, other, chosen.of)
            if chosen.in_turn
            else draws(base, other, chosen.of, chosen.draws, generator)
        )
        for a, b in pairs:
            tally.add(compare_runs(a, b))
        tallies.append(tally)
    text = report(chosen, sides, tallies)
    print(text)
    if chosen.output:
        chosen.output.write_text(text, encoding="utf-8")
    return int(not all(met for _, met in goals(tallies)))


def goals(tallies: Sequence[Tally]) -> Iterator[tuple[str, bool]]:
    """Yield each goal as a sentence with its outcome, and whether it is met."""
    same, *more = tallies
    false = same.share("worse", "better")
    yield (
        f"false verdicts between launches of A: {false:.1%} (goal: at most {MOST_FALSE:.0%})",
        false <= MOST_FALSE,
    )
    least = more[0]
    found = least.share("worse")
    yield (
        f"+{least.percent:g} % found: {found:.1%} (goal: at least {LEAST_FOUND:.0%})",
        found >= LEAST_FOUND,
    )
    for tally in more:
        right = tally.phases[PHASE] / max(tally.phases.total(), 1)
        yield (
            f"+{tally.percent:g} %: the phase named is `{PHASE}` in {right:.1%} of those found "
            f"(goal: at least {LEAST_FOUND:.0%})",
            right >= LEAST_FOUND,
        )


def report(
    chosen: argparse.Namespace, sides: dict[float, list[Run]], tallies: Sequence[Tally]
) -> str:
    """Return what was found, as Markdown."""
    lines = [
        "# Verdicts on step time: how often right",
        "",
        *_what(chosen, sides),
        "",
        "| side | launches | step, ms | between launches | forward, ms | change | drifting |",
        "|---|---|---|---|---|---|---|",
        *(_side_row(percent, runs, sides[0.0]) for percent, runs in sides.items()),
        "",
        "Between launches: standard deviation of the launches' medians, relative. Drifting:",
        "launches whose step time moves by 2 % or more from the first third to the last.",
        "",
        "| B | comparisons | worse | better | same | unclear | interval holds | its width |",
        "|---|---|---|---|---|---|---|---|",
        *map(_verdict_row, tallies),
        "",
        *_notes(chosen, tallies),
        "",
        *(f"- {'met' if met else '**missed**'}: {said}" for said, met in goals(tallies)),
        "",
    ]
    return "\n".join(lines)


def _what(chosen: argparse.Namespace, sides: dict[float, list[Run]]) -> list[str]:
    run = sides[0.0][0]
    manifest = run.manifest
    how = (
        f"as one rank of {manifest.world_size}"
        if manifest.source == "one_rank"
        else f"on {manifest.world_size} ranks"
    )
    drawn = (
        f"{chosen.of} launches a side in order of time, each used once"
        if chosen.in_turn
        else f"{chosen.of} launches a side drawn {chosen.draws} times (seed {chosen.seed})"
    )
    added = ", ".join(f"+{p:g} %" for p in sides if p)
    return [
        f"Written by `python benchmarks/step_time_power.py judge`. `{manifest.name}` {how} on",
        f"{manifest.device_name or manifest.device_type}, torch "
        f"{manifest.environment.get('torch')}: A, and A with {added} of its step time",
        "added to the forward pass, in fresh and interleaved processes. Compared by `compare`:",
        f"{drawn};",
        "A against A is two disjoint sets of launches.",
    ]


def _side_row(percent: float, runs: Sequence[Run], base: Sequence[Run]) -> str:
    times = [launch_times(run) for run in runs]
    middles = [_middle_s(t) for t in times]
    spread = statistics.stdev(middles) / statistics.fmean(middles)
    change = _log_middle_s(runs) / _log_middle_s(base) - 1
    return (
        f"| {'A' if not percent else f'A +{percent:g} %'} | {len(runs)} "
        f"| {_log_middle_s(runs) * 1e3:.2f} | {spread:.2%} "
        f"| {_log_middle_s(runs, PHASE) * 1e3:.2f} | {change:+.2%} "
        f"| {sum(bool(t.drift) for t in times)} |"
    )


def _verdict_row(tally: Tally) -> str:
    name = "A" if not tally.percent else f"A +{tally.percent:g} %"
    shares = " | ".join(f"{tally.share(v):.1%}" for v in ("worse", "better", "same", "unclear"))
    return (
        f"| {name} | {tally.draws} | {shares} | {tally.covered / tally.draws:.1%} "
        f"| {statistics.median(tally.widths):.2%} |"
    )


def _notes(chosen: argparse.Namespace, tallies: Sequence[Tally]) -> list[str]:
    same, *more = tallies
    lines = ["Interval holds: the 95 % interval holds no change for A against A, else the change"]
    if chosen.in_turn:
        lines.append("between all launches.")
    else:
        lines += [
            "between all launches, of which the drawn ones are a part: that flatters it, and draws",
            "overlap, so shares are less certain than their number suggests.",
        ]
    lines += [
        "",
        f"- A against A: a firm verdict on some phase in {same.besides / same.draws:.1%}",
    ]
    for tally in more:
        lines += [
            f"- +{tally.percent:g} %: phases that the finding names: {_counts(tally.phases)}",
            f"- +{tally.percent:g} %: a firm verdict on another phase than `{PHASE}` in "
            f"{tally.besides / tally.draws:.1%}",
        ]
    if same.memory:
        lines.append(f"- memory of A against A, metrics of all comparisons: {_counts(same.memory)}")
    if capped := sum(t.capped for t in tallies):
        lines.append(f"- left without a verdict for the order of the launches: {capped}")
    return lines


def _counts(counter: Counter[Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"


def main() -> int:
    """Record or judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("record")
    one.add_argument("spec", type=Path)
    one.add_argument("--one-rank-of", type=int, help="else real ranks")
    one.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    one.add_argument("--launches", type=int, default=12, help="of each side")
    one.add_argument("--add", type=float, nargs="+", default=[5.0, 10.0], metavar="PERCENT")
    one.add_argument("--max-minutes", type=float, default=1e6)
    one.add_argument("-o", "--output", type=Path, required=True)
    one.set_defaults(call=record)
    two = commands.add_parser("judge")
    two.add_argument("folder", type=Path)
    two.add_argument("--of", type=int, default=5, help="launches a side")
    two.add_argument("--draws", type=int, default=1000)
    two.add_argument("--seed", type=int, default=0)
    two.add_argument("--in-turn", action="store_true")
    two.add_argument("-o", "--output", type=Path)
    two.set_defaults(call=judge)
    chosen = parser.parse_args()
    try:
        return int(chosen.call(chosen))
    except InputError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("stopped: the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
