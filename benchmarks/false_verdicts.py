"""Does ``compare`` cry wolf? A against A, and A against twice the work, repeated.

    python benchmarks/false_verdicts.py SPEC --repeats 10 [--one-rank-of 2]

Each repetition runs three launches of A, of A again and of A with twice the layers, interleaved in
fresh processes, and compares. A false verdict is `worse` or `better` between the identical sides;
a firm one is `same`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from fsdp_doctor.attribution.compare import compare_runs
from fsdp_doctor.config.spec import WrittenSpec, load_spec
from fsdp_doctor.model.comparison import Comparison, Metric
from fsdp_doctor.model.run import Run
from fsdp_doctor.profiler.launch import Launcher, LaunchOptions


def main() -> int:
    """Run the repetitions; exit status 1 when a verdict was false or a doubling was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--timed", type=int, help="timed steps (else the spec's)")
    parser.add_argument("--one-rank-of", type=int)
    chosen = parser.parse_args()
    spec = load_spec(chosen.spec)
    timed = chosen.timed or spec.steps.timed
    spec = replace(spec, steps=replace(spec.steps, timed=timed, kernel_profile=False))
    model = spec.workload.model
    doubled = replace(
        spec, workload=replace(spec.workload, model=replace(model, layers=2 * model.layers))
    )
    sides = {"a": spec, "again": spec, "double": doubled}
    identical: Counter[str] = Counter()
    found = memory_same = 0
    options = LaunchOptions(one_rank_of=chosen.one_rank_of, observe=not chosen.one_rank_of)
    with tempfile.TemporaryDirectory() as folder, Launcher() as launcher:
        for repeat in range(chosen.repeats):
            runs: dict[str, list[Run]] = {name: [] for name in sides}
            for number in range(chosen.launches):
                for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
                    directory = Path(folder) / f"{repeat}-{name}-{number}"
                    written = WrittenSpec(spec=sides[name], written={})
                    run = launcher.run(written, directory, options, lambda _text: None)
                    if run.manifest.status != "completed":
                        sys.exit(f"{directory}: {run.manifest.failure}")
                    runs[name].append(run)
            same = compare_runs(runs["a"], runs["again"])
            more = compare_runs(runs["a"], runs["double"])
            verdict = step_time(same).verdict
            identical[verdict] += 1
            found += step_time(more).verdict == "worse"
            peaks = [m for m in same.metrics if m.name == "peak_allocated_bytes"]
            memory_same += bool(peaks) and all(m.verdict == "same" for m in peaks)
            print(
                f"repeat {repeat}: A/A {verdict} ({_percent(step_time(same))}), "
                f"A/2A {step_time(more).verdict} ({_percent(step_time(more))})",
                flush=True,
            )
    false = identical["worse"] + identical["better"]
    print(
        f"identical: {false} false verdicts, {identical['same']} firm `same`, "
        f"{identical['unclear']} unclear of {chosen.repeats}; memory same in {memory_same}; "
        f"doubled work found in {found} of {chosen.repeats}"
    )
    return 1 if false or found < chosen.repeats else 0


def step_time(comparison: Comparison) -> Metric:
    """Return the job's step time."""
    return next(m for m in comparison.metrics if m.name == "step_time_s" and m.rank is None)


def _percent(metric: Metric) -> str:
    if metric.interval is None or metric.relative is None:
        return "no interval"
    low, high = metric.interval
    return f"{metric.relative * 100:+.2f} % [{low * 100:+.2f}, {high * 100:+.2f}]"


if __name__ == "__main__":
    sys.exit(main())
