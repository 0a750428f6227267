"""How good is the first guess of a step's time? Over every run in profiles/h200.

    python benchmarks/step_time_guess.py [-o docs/step-time-guess.md] [--cache FOLDER]

Each recorded run is one rank of many: its step time has no communication, so the guess leaves
collectives out as well. Printed: how often the measured step time (median of the timed steps) lies
in the guessed range, how wide the range is, where in it the truth lies, and how often the direction
between two runs of the same world size is right (pairs that differ by more than the noise only).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from estimate_accuracy import RECORDED, recorded_spec, simulate

from fsdp_doctor.gpus_table import find_gpu
from fsdp_doctor.model.work import StepTimeGuess, StepWork
from fsdp_doctor.runs import load_run
from fsdp_doctor.simulator.request import DryRunRequest
from fsdp_doctor.simulator.roofline import faster, guess_step_time, middle_s

NOISE = 0.03
"""Pairs closer than this are not asked: single launches of one spec differ by up to 2 % here."""
SILENT = 0.001
"""A guess of less than this says nothing about the direction."""
BASELINE = "fsdp2-reshard"


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded run."""

    world: int
    name: str
    measured_s: float
    kernel_s: float | None
    """Kernels and copies of the profiled step."""
    guess: StepTimeGuess

    @property
    def inside(self) -> bool:
        """Whether the range holds the truth."""
        return self.guess.total.low_s <= self.measured_s <= self.guess.total.high_s

    @property
    def width(self) -> float:
        """High end over low end."""
        return self.guess.total.high_s / self.guess.total.low_s

    @property
    def off(self) -> float:
        """Middle of the range over the truth."""
        return middle_s(self.guess.total) / self.measured_s


def read(directory: Path, cache: Path | None) -> Row:
    """Simulate the spec of a recorded run, or take its counts from the cache."""
    run = load_run(directory)
    (series,) = run.ranks
    timed = [s.step_time_s for s in series.steps if s.kind == "timed" and s.step_time_s is not None]
    kernels = [part.kernel_s + part.copy_s for part in series.time_breakdown]
    path = None if cache is None else cache / f"{directory.parent.name}-{directory.name}.json"
    if path is not None and path.exists():
        work = msgspec.json.decode(path.read_bytes(), type=StepWork)
    else:
        spec = recorded_spec(run)
        found = simulate(
            DryRunRequest(spec=msgspec.to_builtins(spec), rank=0, steps=2, workspace_bytes=0)
        )
        assert found.work is not None
        work = found.work
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(work))
    return Row(
        world=run.manifest.world_size,
        name=directory.name,
        measured_s=statistics.median(timed),
        kernel_s=sum(kernels) if kernels else None,
        guess=guess_step_time(work, find_gpu("h200").speed, communicates=False),
    )


def pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield pairs of one world size that differ by more than the noise."""
    for a, b in itertools.combinations(rows, 2):
        if a.world == b.world and abs(b.measured_s / a.measured_s - 1) > NOISE:
            yield a, b


def directions(chosen: Sequence[tuple[Row, Row]]) -> tuple[int, int, int]:
    """Return how many directions are right, wrong, and not said."""
    right = wrong = silent = 0
    for a, b in chosen:
        guessed = faster(a.guess, b.guess)
        if abs(guessed) < SILENT:
            silent += 1
        elif (guessed > 0) == (b.measured_s > a.measured_s):
            right += 1
        else:
            wrong += 1
    return right, wrong, silent


def report(rows: Sequence[Row]) -> str:
    """Return the result as Markdown."""
    every = list(pairs(rows))
    to_baseline = [pair for pair in every if BASELINE in (pair[0].name, pair[1].name)]
    wide = [pair for pair in every if abs(pair[1].measured_s / pair[0].measured_s - 1) > 0.10]
    offs = [row.off for row in rows]
    widths = [row.width for row in rows]
    inside = sum(row.inside for row in rows)
    lines = [
        f"- runs: {len(rows)}; measured step time inside the range: {inside}",
        f"- width of the range (high / low): median {statistics.median(widths):.1f}, "
        f"worst {max(widths):.1f}",
        f"- middle of the range / measured: median {statistics.median(offs):.2f}, "
        f"from {min(offs):.2f} to {max(offs):.2f}",
    ]
    for label, chosen in (
        (f"all pairs of one world size more than {NOISE:.0%} apart", every),
        ("of these, more than 10 % apart", wide),
        (f"of these, against {BASELINE}", to_baseline),
    ):
        right, wrong, silent = directions(chosen)
        lines.append(
            f"- direction, {label}: {len(chosen)} pairs, {right} right, {wrong} wrong, "
            f"{silent} not said"
        )
    lines += [
        "",
        "| run | measured | kernels | guess, low | guess, high | inside | middle / measured |",
        "|---|--:|--:|--:|--:|---|--:|",
    ]
    for row in rows:
        total = row.guess.total
        kernel = "-" if row.kernel_s is None else _ms(row.kernel_s)
        lines.append(
            f"| 1 of {row.world}: {row.name} | {_ms(row.measured_s)} | {kernel} | "
            f"{_ms(total.low_s)} | {_ms(total.high_s)} | {'yes' if row.inside else 'no'} | "
            f"{row.off:.2f} |"
        )
    lines += ["", "Wrong directions:", ""]
    for a, b in every:
        guessed = faster(a.guess, b.guess)
        if abs(guessed) >= SILENT and (guessed > 0) != (b.measured_s > a.measured_s):
            lines.append(
                f"- 1 of {a.world}: {a.name} -> {b.name}: measured "
                f"{b.measured_s / a.measured_s - 1:+.1%}, guessed {guessed:+.1%}"
            )
    return "\n".join(lines) + "\n"


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
    for path in sorted(RECORDED.glob("world-*/*/run.json")):
        directory = path.parent
        if names and not names & {str(directory.relative_to(RECORDED)), directory.parent.name}:
            continue
        print(f"{directory.parent.name}/{directory.name}", file=sys.stderr, flush=True)
        rows.append(read(directory, arguments.cache))
    if not rows:
        parser.error("no recorded run has that name")
    text = report(rows)
    print(text, end="")
    if arguments.output:
        head = "# The first guess of a step's time, against recorded runs\n\n"
        source = "Written by `python benchmarks/step_time_guess.py -o` from the runs in "
        what = "`profiles/h200`, on an H200 as one rank of many: without communication.\n\n"
        arguments.output.write_text(head + source + what + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
