"""How good is the first guess of a step's time? Over every run in profiles/h200.

    python benchmarks/step_time_guess.py [-o docs/step-time-guess.md] [--cache FOLDER]

Each recorded run is one rank of many: it has no communication, so the guess leaves collectives out
as well. Two truths are asked: the time in kernels of the step under torch's profiler, against the
guess for compute; and the step time (median of the timed steps), against the whole guess. Step
times of these recordings vary with the load of the host far more than kernels do. How far, the
benchmark reads off pairs of runs that do the same work; only pairs that differ by more are asked
for a direction.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fsdp_doctor.fit.recorded import recorded_spec
from fsdp_doctor.gpus_table import find_gpu
from fsdp_doctor.model.work import StepWork, TimeRange
from fsdp_doctor.runs import load_run
from fsdp_doctor.simulator.many import Simulations
from fsdp_doctor.simulator.request import DryRunRequest
from fsdp_doctor.simulator.roofline import guess_step_time, middle_s

RECORDED = Path(__file__).parent.parent / "profiles" / "h200"
SILENT = 0.001
"""A guess of less than this says nothing about the direction: the same work."""
BASELINE = "fsdp2-reshard"


@dataclass(frozen=True, slots=True)
class Point:
    """A truth of one run and the range that was guessed for it."""

    world: int
    name: str
    measured_s: float
    guessed: TimeRange

    @property
    def inside(self) -> bool:
        """Whether the range holds the truth."""
        return self.guessed.low_s <= self.measured_s <= self.guessed.high_s

    @property
    def width(self) -> float:
        """High end over low end."""
        return self.guessed.high_s / self.guessed.low_s

    @property
    def off(self) -> float:
        """Middle of the range over the truth."""
        return middle_s(self.guessed) / self.measured_s


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded run: its kernels, and its whole step."""

    kernels: Point | None
    """None: no step was profiled."""
    step: Point


def read(directory: Path, cache: Path | None, server: Simulations) -> Row:
    """Simulate the spec of a recorded run, or take its counts from the cache."""
    run = load_run(directory)
    (series,) = run.ranks
    timed = [s.step_time_s for s in series.steps if s.kind == "timed" and s.step_time_s is not None]
    kernels = sum(part.kernel_s for part in series.time_breakdown)
    path = None if cache is None else cache / f"{directory.parent.name}-{directory.name}.json"
    if path is not None and path.exists():
        work = msgspec.json.decode(path.read_bytes(), type=StepWork)
    else:
        spec = recorded_spec(run)
        found = server.simulate(
            DryRunRequest(spec=msgspec.to_builtins(spec), rank=0, steps=2, workspace_bytes=0)
        )
        assert found.work is not None
        work = found.work
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(work))
    guess = guess_step_time(work, find_gpu("h200").speed, communicates=False)
    world = run.manifest.world_size
    return Row(
        Point(world, directory.name, kernels, guess.compute) if kernels else None,
        Point(world, directory.name, statistics.median(timed), guess.total),
    )


Pair = tuple[Point, Point]


def guessed_change(pair: Pair) -> float:
    """Relative change of the middles of both ranges."""
    return middle_s(pair[1].guessed) / middle_s(pair[0].guessed) - 1


def measured_change(pair: Pair) -> float:
    """Relative change of the truth."""
    return pair[1].measured_s / pair[0].measured_s - 1


def distance(pair: Pair) -> float:
    """How far apart the truths are, the larger over the smaller less one."""
    a, b = sorted(point.measured_s for point in pair)
    return b / a - 1


def pairs(points: Sequence[Point]) -> list[Pair]:
    """Return all pairs of one world size."""
    return [(a, b) for a, b in itertools.combinations(points, 2) if a.world == b.world]


def noise_of(every: Sequence[Pair]) -> list[float]:
    """Return how far apart runs are that do the same work."""
    return sorted(distance(pair) for pair in every if abs(guessed_change(pair)) < SILENT)


def directions(chosen: Sequence[Pair]) -> tuple[int, list[Pair]]:
    """Return how many directions are right, and the pairs where they are wrong."""
    wrong = [p for p in chosen if guessed_change(p) * measured_change(p) < 0]
    return len(chosen) - len(wrong), wrong


def judged(what: str, points: Sequence[Point]) -> tuple[list[str], list[Pair]]:
    """Return the lines about one truth, and the pairs whose direction is guessed wrong."""
    every = pairs(points)
    noise = noise_of(every)
    limit = max(noise, default=0.0)
    asked = [p for p in every if distance(p) > limit and abs(guessed_change(p)) >= SILENT]
    silent = sum(distance(p) > limit and abs(guessed_change(p)) < SILENT for p in every)
    near = [p for p in asked if BASELINE in (p[0].name, p[1].name)]
    right, wrong = directions(asked)
    offs = [point.off for point in points]
    widths = [point.width for point in points]
    lines = [
        f"- {what}: {sum(p.inside for p in points)} of {len(points)} runs inside the range; width "
        f"(high / low) median {statistics.median(widths):.1f}, worst {max(widths):.1f}; middle / "
        f"measured median {statistics.median(offs):.2f}, from {min(offs):.2f} to {max(offs):.2f}",
        f"- {what}, noise: {len(noise)} pairs do the same work and differ by up to {limit:.1%} "
        f"(median {statistics.median(noise) if noise else 0:.1%})",
        f"- {what}, direction: {right} of {len(asked)} pairs right that differ by more than that; "
        f"{silent} not said; against {BASELINE} {directions(near)[0]} of {len(near)}",
    ]
    return lines, wrong


def report(rows: Sequence[Row]) -> str:
    """Return the result as Markdown."""
    kernel_lines, wrong = judged("kernels", [row.kernels for row in rows if row.kernels])
    step_lines, _ = judged("step", [row.step for row in rows])
    lines = [
        *kernel_lines,
        *step_lines,
        "",
        "| run | kernels | guess for compute | inside | step | guess | inside |",
        "|---|--:|--:|---|--:|--:|---|",
    ]
    for row in rows:
        cells = []
        for point in (row.kernels, row.step):
            if point is None:
                cells += ["-", "-", "-"]
                continue
            guess = f"{_ms(point.guessed.low_s)} .. {_ms(point.guessed.high_s)}"
            cells += [_ms(point.measured_s), guess, "yes" if point.inside else "no"]
        lines.append(f"| 1 of {row.step.world}: {row.step.name} | {' | '.join(cells)} |")
    lines += ["", f"Wrong directions of kernels: {len(wrong)}", ""]
    for pair in wrong:
        a, b = pair
        lines.append(
            f"- 1 of {a.world}: {a.name} -> {b.name}: measured {measured_change(pair):+.1%}, "
            f"guessed {guessed_change(pair):+.1%}"
        )
    return "\n".join(lines).rstrip() + "\n"


def _ms(value: float) -> str:
    return f"{value * 1e3:.1f} ms"


def main() -> int:
    """Read every recorded run and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="runs, as world-8/fsdp2-reshard, or world-8")
    parser.add_argument("-o", "--output", type=Path, help="also write the result here")
    parser.add_argument("--cache", type=Path, help="folder of counts: done ones are not run again")
    arguments = parser.parse_args()
    names = set(arguments.names)
    rows = []
    with Simulations() as server:
        for path in sorted(RECORDED.glob("world-*/*/run.json")):
            directory = path.parent
            if names and not names & {str(directory.relative_to(RECORDED)), directory.parent.name}:
                continue
            print(f"{directory.parent.name}/{directory.name}", file=sys.stderr, flush=True)
            rows.append(read(directory, arguments.cache, server))
    if not rows:
        parser.error("no recorded run has that name")
    text = report(rows)
    print(text, end="")
    if arguments.output:
        head = "# The first guess of a step's time, against recorded runs\n\n"
        asked = " ".join([*sorted(names), "-o"])
        source = f"Written by `python benchmarks/step_time_guess.py {asked}` from the runs in "
        what = "`profiles/h200`, on an H200 as one rank of many: without communication.\n\n"
        arguments.output.write_text(head + source + what + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
