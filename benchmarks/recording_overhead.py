"""What recording costs: timed steps with against without it, in interleaved fresh processes.

    python benchmarks/recording_overhead.py profiles/h200/specs/fsdp2-reshard.yaml --one-rank-of 2

Both sides run the same steps in the same process layout; only the phase records, counters and
events of the timed steps are on or off. Prints each pair, the median ratio and its 95 % interval.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from scipy import stats

from fsdp_doctor.config.spec import WrittenSpec, load_spec
from fsdp_doctor.profiler.launch import Launcher, LaunchOptions
from fsdp_doctor.runs.reader import read_records


def main() -> int:
    """Run the pairs and print the overhead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--timed", type=int, default=40, help="timed steps of each launch")
    parser.add_argument("--one-rank-of", type=int)
    chosen = parser.parse_args()
    spec = load_spec(chosen.spec)
    spec = replace(
        spec, steps=replace(spec.steps, timed=chosen.timed, warmup=6, kernel_profile=False)
    )
    written = WrittenSpec(spec=spec, written={})
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder, Launcher() as launcher:
        for pair in range(chosen.pairs):
            step_s: dict[bool, float] = {}
            for record in (True, False) if pair % 2 == 0 else (False, True):
                directory = Path(folder) / f"{pair}-{record}"
                options = LaunchOptions(
                    one_rank_of=chosen.one_rank_of, record=record, observe=False
                )
                run = launcher.run(written, directory, options, lambda _text: None)
                if run.manifest.status != "completed":
                    sys.exit(f"{directory}: {run.manifest.failure}")
                step_s[record] = _slowest_step_s(directory, run.manifest.ranks)
            ratios.append(step_s[True] / step_s[False] - 1)
            print(
                f"pair {pair}: with {step_s[True] * 1e3:.3f} ms, "
                f"without {step_s[False] * 1e3:.3f} ms, {ratios[-1] * 100:+.2f} %",
                flush=True,
            )
    half = stats.sem(ratios) * stats.t.ppf(0.975, len(ratios) - 1) if len(ratios) > 1 else 0
    mean = statistics.fmean(ratios)
    print(
        f"overhead: median {statistics.median(ratios) * 100:+.2f} %, "
        f"mean {mean * 100:+.2f} % [{(mean - half) * 100:+.2f}, {(mean + half) * 100:+.2f}]"
    )
    return 0


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
