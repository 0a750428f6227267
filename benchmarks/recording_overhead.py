"""What recording costs: timed steps with against without it, in interleaved fresh processes.

    python benchmarks/recording_overhead.py SPEC --one-rank-of 2 [--pairs 6] [--max-minutes 1.3]
        [-o docs/recording-overhead.md]

Both sides run the same steps in the same process layout; only the phase records, counters and
events of the timed steps are on or off. The timed steps of a launch are timed as a whole, by the
host's clock, synchronised at both ends. Prints each pair, the median ratio, and the mean with its
95 % interval (Student's t over pairs). A pair in which a launch failed is left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scipy import stats

from fsdp_doctor.config.spec import WrittenSpec, load_spec
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.run import Run
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.profiler.launch import Launcher, LaunchOptions
from fsdp_doctor.runs.reader import read_records

MOST = 0.01
"""Goal: share of the step time that recording may cost."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds per step of two neighbouring launches."""

    with_s: float
    without_s: float

    @property
    def overhead(self) -> float:
        """Return the relative cost of recording."""
        return self.with_s / self.without_s - 1

    def __str__(self) -> str:
        return (
            f"| {self.with_s * 1e3:.3f} | {self.without_s * 1e3:.3f} | {self.overhead * 100:+.2f} |"
        )


class Launches:
    """Launches of one spec into folders of their own."""

    def __init__(
        self, spec: ProfileSpec, folder: Path, options: LaunchOptions, launcher: Launcher
    ) -> None:
        self._written = WrittenSpec(spec=spec, written={})
        self._folder, self._options, self._launcher = folder, options, launcher
        self.last: Run | None = None

    def pair(self, number: int) -> Pair | None:
        """Run a pair, every other one in reverse order; None, and a line, when one failed."""
        step_s: dict[bool, float] = {}
        for record in (True, False) if number % 2 == 0 else (False, True):
            directory = self._folder / f"{number}-{'with' if record else 'without'}"
            options = replace(self._options, record=record)
            run = self._launcher.run(self._written, directory, options, lambda _text: None)
            if run.manifest.status == "interrupted":
                raise KeyboardInterrupt
            if run.manifest.status != "completed":
                print(f"{directory.name}: {run.manifest.failure}", flush=True)
                return None
            self.last = run
            step_s[record] = _slowest_step_s(directory, run.manifest.ranks)
        return Pair(step_s[True], step_s[False])


def main() -> int:
    """Run the pairs and print the overhead; exit status 1 when it may be above the goal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec", type=Path)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--timed", type=int, default=40, help="timed steps of each launch")
    parser.add_argument("--one-rank-of", type=int)
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--max-minutes", type=float, default=1e6)
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    try:
        return measure(chosen)
    except InputError as error:
        sys.exit(str(error))


def measure(chosen: argparse.Namespace) -> int:
    """Run pairs until there are enough, time is up or the user stops; judge those there are."""
    until = time.monotonic() + chosen.max_minutes * 60
    spec = load_spec(chosen.spec)
    steps = replace(spec.steps, timed=chosen.timed, warmup=6, kernel_profile=False)
    options = LaunchOptions(one_rank_of=chosen.one_rank_of, device=chosen.device, observe=False)
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory() as folder, Launcher() as launcher:
        launches = Launches(replace(spec, steps=steps), Path(folder), options, launcher)
        longest_s = 0.0
        try:
            for number in range(chosen.pairs):
                started = time.monotonic()
                if started + longest_s > until:
                    break
                pair = launches.pair(number)
                longest_s = max(longest_s, time.monotonic() - started)
                if pair is not None:
                    pairs.append(pair)
                    print(f"{pair} {time.monotonic() - started:.1f} s", flush=True)
        except KeyboardInterrupt:
            print("stopped", flush=True)
        last = launches.last
    if len(pairs) < 2 or last is None:
        sys.exit("fewer than two pairs: no interval")
    mean, low, high = interval([pair.overhead for pair in pairs])
    text = report(pairs, (mean, low, high), last, chosen.timed)
    print(text)
    if chosen.output:
        chosen.output.write_text(text, encoding="utf-8")
    return int(high > MOST)


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, low and high end of the 95 % t interval."""
    mean = statistics.fmean(ratios)
    half = float(stats.sem(ratios) * stats.t.ppf(0.975, len(ratios) - 1))
    return mean, mean - half, mean + half


def report(pairs: Sequence[Pair], bounds: tuple[float, float, float], run: Run, timed: int) -> str:
    """Return what was found, as Markdown."""
    mean, low, high = (value * 100 for value in bounds)
    manifest = run.manifest
    played = f", one rank of {manifest.world_size}" if manifest.source == "one_rank" else ""
    said = "met" if bounds[2] <= MOST else "**missed**" if bounds[1] > MOST else "not decided"
    lines = [
        "# What recording costs",
        "",
        f"Written by `python benchmarks/recording_overhead.py`. `{manifest.name}` on",
        f"{manifest.device_name or manifest.device_type}{played}, torch "
        f"{manifest.environment.get('torch')}: pairs of neighbouring fresh",
        f"processes of {timed} timed steps, with and without the records of these steps.",
        "",
        "| with, ms | without, ms | overhead, % |",
        "|---|---|---|",
        *map(str, pairs),
        "",
        f"- overhead: median {statistics.median(p.overhead for p in pairs) * 100:+.2f} %, "
        f"mean {mean:+.2f} % [{low:+.2f}, {high:+.2f}]",
        f"- goal, at most {MOST:.0%} with the whole interval: {said}",
        "",
    ]
    return "\n".join(lines)


def _slowest_step_s(directory: Path, ranks: tuple[int, ...]) -> float:
    totals = [
        record["total_s"] / record["steps"]
        for rank in ranks
        for record in read_records(directory, rank)
        if record["record"] == "timed"
    ]
    return max(totals)


if __name__ == "__main__":
    sys.exit(main())
