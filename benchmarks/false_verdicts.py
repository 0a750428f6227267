"""Does ``compare`` cry wolf? A against A, and A against twice the work, repeated.

    python benchmarks/false_verdicts.py SPEC --work DIR [--repeats 10] [--one-rank-of 2]
        [--max-minutes 8] [-o docs/false-verdicts.md]

Each repetition runs three launches of A, of A again and of A with twice the layers, interleaved in
fresh processes, and compares. A false verdict is `worse` or `better` between the identical sides;
a firm one is `same`. Runs are kept in ``--work``: the same command goes on with the next
repetition, and judges them all. A repetition that was cut short is done again as a whole, for its
launches have to alternate.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_doctor.attribution.compare import compare_runs
from fsdp_doctor.config.spec import WrittenSpec, load_spec
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.comparison import Comparison, Metric
from fsdp_doctor.model.run import Run
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.profiler.launch import Launcher, LaunchOptions
from fsdp_doctor.runs import load_run

LEAST_FIRM = 0.3
"""Goal: share of the identical pairs that are firmly called the same."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """What ``compare`` said of one repetition."""

    number: int
    same: Metric
    """Step time, A against A again."""
    more: Metric
    """Step time, A against A with twice the layers."""
    memory: Counter[str]
    """Verdicts on memory, A against A again."""
    run: Run
    """One of the launches of A."""


def sides_of(spec: ProfileSpec) -> dict[str, ProfileSpec]:
    """Return the three specs of a repetition."""
    model = spec.workload.model
    doubled = replace(model, layers=2 * model.layers)
    double = replace(spec, workload=replace(spec.workload, model=doubled))
    return {"a": spec, "again": spec, "double": double}


class Launches:
    """Repetitions kept in a folder, one folder each."""

    def __init__(self, work: Path, sides: dict[str, ProfileSpec], count: int) -> None:
        self._work, self._sides, self._count = work, sides, count

    def order(self) -> Iterator[tuple[str, int]]:
        """Yield (side, launch) in the order in which they run."""
        for number in range(self._count):
            for name in self._sides if number % 2 == 0 else reversed(self._sides):
                yield name, number

    def place(self, repeat: int, name: str, number: int) -> Path:
        """Return the run directory of one launch."""
        return self._work / f"repeat-{repeat:02}" / f"{name}-{number}"

    def read(self, repeat: int) -> Repetition | None:
        """Judge a repetition; None when a launch of it is missing or failed."""
        runs: dict[str, list[Run]] = {name: [] for name in self._sides}
        for name, number in self.order():
            directory = self.place(repeat, name, number)
            if not (directory / "run.json").is_file():
                return None
            run = load_run(directory)
            if run.manifest.status != "completed":
                return None
            runs[name].append(run)
        same = compare_runs(runs["a"], runs["again"])
        more = compare_runs(runs["a"], runs["double"])
        memory = Counter(m.verdict for m in same.metrics if m.unit == "bytes")
        return Repetition(repeat, step_time(same), step_time(more), memory, runs["a"][0])

    def record(self, repeat: int, launcher: Launcher, options: LaunchOptions) -> bool:
        """Run a repetition; False, and a line, when a launch failed."""
        for name, number in self.order():
            written = WrittenSpec(spec=self._sides[name], written={})
            directory = self.place(repeat, name, number)
            run = launcher.run(written, directory, options, lambda _text: None)
            if run.manifest.status == "interrupted":
                raise KeyboardInterrupt
            if run.manifest.status != "completed":
                print(f"{directory}: {run.manifest.failure}", flush=True)
                return False
        return True


def main() -> int:
    """Run the repetitions; exit status 1 when a verdict was false or a doubling was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--timed", type=int, help="timed steps (else the spec's)")
    parser.add_argument("--one-rank-of", type=int)
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--max-minutes", type=float, default=1e6)
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    try:
        return measure(chosen)
    except InputError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("stopped: the same command goes on")


def measure(chosen: argparse.Namespace) -> int:
    """Record what is missing and judge all that is there."""
    until = time.monotonic() + chosen.max_minutes * 60
    spec = load_spec(chosen.spec)
    timed = chosen.timed or spec.steps.timed
    spec = replace(spec, steps=replace(spec.steps, timed=timed, kernel_profile=False))
    launches = Launches(chosen.work, sides_of(spec), chosen.launches)
    options = LaunchOptions(
        one_rank_of=chosen.one_rank_of,
        device=chosen.device,
        observe=not chosen.one_rank_of,
        force=True,
    )
    done, longest_s = [], 0.0
    with Launcher() as launcher:
        for repeat in range(chosen.repeats):
            found = launches.read(repeat)
            started = time.monotonic()
            if found is None and started + longest_s < until:
                if launches.record(repeat, launcher, options):
                    found = launches.read(repeat)
                longest_s = max(longest_s, time.monotonic() - started)
            if found is None:
                continue
            done.append(found)
            print(f"{row(found)} {time.monotonic() - started:.0f} s", flush=True)
    if not done:
        sys.exit("no repetition is complete")
    text = report(done, chosen)
    print(text)
    if chosen.output:
        chosen.output.write_text(text, encoding="utf-8")
    return int(bool(missed(done)) or len(done) < chosen.repeats)


def step_time(comparison: Comparison) -> Metric:
    """Return the job's step time."""
    return next(m for m in comparison.metrics if m.name == "step_time_s" and m.rank is None)


def row(found: Repetition) -> str:
    """Return one row of the table."""
    memory = ", ".join(f"{name} {count}" for name, count in found.memory.most_common()) or "none"
    return (
        f"| {found.number} | {_ms(found.same.a)} | {found.same.verdict} | {_change(found.same)} "
        f"| {found.more.verdict} | {_change(found.more)} | {memory} |"
    )


def missed(done: Sequence[Repetition]) -> list[str]:
    """Return the goals that are missed."""
    verdicts = Counter(found.same.verdict for found in done)
    goals = {
        "a false verdict": verdicts["worse"] + verdicts["better"] == 0,
        "too few firm verdicts": verdicts["same"] >= LEAST_FIRM * len(done),
        "a doubling was not found": all(found.more.verdict == "worse" for found in done),
        "memory of identical specs is not the same": all(
            set(found.memory) <= {"same"} for found in done
        ),
    }
    return [name for name, met in goals.items() if not met]


def report(done: Sequence[Repetition], chosen: argparse.Namespace) -> str:
    """Return what was found, as Markdown."""
    verdicts = Counter(found.same.verdict for found in done)
    doubled = sum(found.more.verdict == "worse" for found in done)
    quiet = sum(set(found.memory) <= {"same"} for found in done)
    manifest = done[0].run.manifest
    played = f", one rank of {manifest.world_size}" if manifest.source == "one_rank" else ""
    failed = missed(done)
    lines = [
        "# Verdicts between identical specs",
        "",
        f"Written by `python benchmarks/false_verdicts.py`. `{manifest.name}` on",
        f"{manifest.device_name or manifest.device_type}{played}, torch "
        f"{manifest.environment.get('torch')}: {chosen.launches} interleaved launches a",
        "side of the spec, of the same spec again, and of the spec with twice the layers.",
        "",
        "| repetition | step of A, ms | A/A | change | A/2A | change | memory, A/A |",
        "|---|---|---|---|---|---|---|",
        *map(row, done),
        "",
        f"- identical: {verdicts['worse'] + verdicts['better']} false verdicts, "
        f"{verdicts['same']} firm `same`, {verdicts['unclear']} unclear of {len(done)}",
        f"- memory of identical specs only `same` in {quiet} of {len(done)}",
        f"- doubled work found in {doubled} of {len(done)}",
        f"- goals (no false verdict, at least {LEAST_FIRM:.0%} firm, every doubling): "
        f"{'met' if not failed else '**missed**: ' + '; '.join(failed)}",
        "",
    ]
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "not known" if seconds is None else f"{seconds * 1e3:.2f}"


def _change(metric: Metric) -> str:
    if metric.interval is None or metric.relative is None:
        return "no interval"
    low, high = metric.interval
    return f"{metric.relative * 100:+.2f} % [{low * 100:+.2f}, {high * 100:+.2f}]"


if __name__ == "__main__":
    sys.exit(main())
