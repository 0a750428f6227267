"""Does what ``fit`` prescribes really fit? Recorded runs as truth.

    python benchmarks/fit_recorded.py [CASE ...] [-o docs/fit-recorded.md] [--cache FOLDER]

Each case takes a recorded H200 run and a limit of memory between its reserved peak and that of a
recorded neighbour with one field changed. ``fit`` is asked for the spec of the first under that
limit, without knowing of any recording. Of every combination that it simulated and that happens to
be recorded, what it said (fits or not) is compared with what the run reserved, and the guessed
change of step time with the recorded change of the time in kernels. (Step times of these recordings
vary with the load of the host, see ``step_time_guess.py``; and as one rank of many they have no
communication, which the guess has.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fsdp_doctor.config.spec import apply_overrides
from fsdp_doctor.fit.prescribe import fit
from fsdp_doctor.fit.recorded import RecordedRuns, measured, recorded_spec
from fsdp_doctor.gpus_table import find_gpu
from fsdp_doctor.model.fit import Fit, Variant
from fsdp_doctor.model.run import Run
from fsdp_doctor.runs import load_run
from fsdp_doctor.simulator.estimate import outside_pytorch
from fsdp_doctor.units import format_bytes, format_relative

RECORDED = Path(__file__).parent.parent / "profiles" / "h200"
CASES = (
    ("world-2/fsdp2-no-reshard", "world-2/fsdp2-reshard"),
    ("world-2/fsdp2-reshard", "world-2/fsdp2-checkpoint-every-2"),
    ("world-2/fsdp2-checkpoint-every-2", "world-2/fsdp2-checkpoint-full"),
    ("world-2/fsdp1-no-shard", "world-2/fsdp1-shard-grad-op"),
    ("world-2/fsdp1-shard-grad-op", "world-2/fsdp1-full-shard"),
    ("world-2/fsdp2-accumulate-no-sync", "world-2/fsdp2-accumulate-sync"),
    ("world-2/ddp", "world-2/ddp-bucket-view"),
    ("world-8/fsdp2-hsdp-8", "world-8/fsdp2-reshard"),
    ("world-2/fsdp2-no-reshard-fp32", "world-2/fsdp2-reshard-fp32"),
    ("world-2/factorial-keep-save-batch2", "world-2/factorial-reshard-checkpoint-batch2"),
)
MOST_SIMULATIONS = 20


@dataclass(frozen=True, slots=True)
class Case:
    """One question and its answer."""

    name: str
    neighbour: str
    capacity_bytes: int
    """What the limit leaves for torch at the high end of what lies outside of it."""
    answer: Fit


def ask(name: str, neighbour: str) -> Case:
    """Ask for the spec of a recorded run, between its reserved peak and its neighbour's."""
    run = load_run(RECORDED / name)
    spec = recorded_spec(run)
    high, low = (
        measured(load_run(RECORDED / n), "recorded").peak_reserved_bytes for n in (name, neighbour)
    )
    assert high is not None
    assert low is not None
    assert low < high, f"{name}: the neighbour reserves more"
    capacity = (low + high) // 2
    answer = fit(
        spec,
        gpu=find_gpu("h200"),
        memory_bytes=capacity + outside_pytorch(spec)[1],
        max_simulations=MOST_SIMULATIONS,
        tell=lambda text: print(f"  {text}", file=sys.stderr, flush=True),
    )
    return Case(name, neighbour, capacity, answer)


def rows(case: Case, runs: RecordedRuns) -> Iterator[tuple[Variant, int, float | None]]:
    """Yield every simulated variant that is recorded, its reserved peak and change of kernels."""
    written = load_run(RECORDED / case.name)
    spec, base = recorded_spec(written), kernels_s(written)
    for variant in case.answer.tried:
        if variant.environment:
            continue
        found = [m for m in runs(apply_overrides(spec, variant.overrides)) if m.peak_reserved_bytes]
        for run in found[:1]:
            time = kernels_s(load_run(Path(run.source)))
            yield variant, run.peak_reserved_bytes or 0, time / base - 1 if time and base else None


def kernels_s(run: Run) -> float:
    """Return the seconds in kernels of the profiled step; 0 where there was none."""
    return sum(part.kernel_s for rank in run.ranks for part in rank.time_breakdown)


def report(cases: list[Case]) -> str:
    """Return the result as Markdown."""
    runs = RecordedRuns(RECORDED)
    lines, verdicts, prescribed, inside = [], [], [], []
    for case in cases:
        answer = case.answer
        lines += [
            f"### {case.name}",
            "",
            f"Limit between its recorded reserved peak and that of {case.neighbour}: "
            f"{format_bytes(case.capacity_bytes)} for torch, {format_bytes(answer.memory_bytes)} "
            f"of memory. {answer.simulations} simulations.",
            "",
            f"The answer: {'; '.join(map(title_of, answer.prescriptions)) or 'nothing'}.",
            "",
            "| change | predicted reserved | recorded reserved | says | is | step time, guess | "
            "kernels, recorded |",
            "|---|--:|--:|---|---|--:|--:|",
        ]
        listed = {variant.overrides for variant in answer.prescriptions if not variant.environment}
        for variant, reserved, change in rows(case, runs):
            says = variant.fits is True and variant.headroom_bytes >= 0
            really = reserved <= case.capacity_bytes
            verdicts.append(says == really)
            title = title_of(variant)
            if variant.overrides in listed:
                prescribed.append(really)
                title = f"**{title}**"
            guess = variant.step_time_change
            text = "-"
            if guess is not None and change is not None:
                inside.append((guess.low, guess.high, change))
                text = f"{format_relative(guess.low)} .. {format_relative(guess.high)}"
            lines.append(
                f"| {title} | {format_bytes(variant.peak_reserved_bytes)} | "
                f"{format_bytes(reserved)} | {_fits(says)} | {_fits(really)} | {text} | "
                f"{format_relative(change) if variant.changes else '-'} |"
            )
        lines.append("")
    signs = [(low + high) / 2 * change > 0 for low, high, change in inside if abs(change) > 0.03]
    head = [
        f"- cases: {len(cases)}; in which a combination that is said to fit is recorded, and fits: "
        f"{sum(_found_one(case, runs) for case in cases)}; in which the answer has one that is "
        f"recorded: {sum(_has_recorded(case, runs) for case in cases)}",
        f"- prescriptions (bold) that are recorded: {len(prescribed)}; of these the run really "
        f"fits: {sum(prescribed)}",
        f"- simulated combinations that are recorded: {len(verdicts)}; fits or not said right: "
        f"{sum(verdicts)}",
        f"- direction, where kernels changed by more than 3 %: {sum(signs)} of {len(signs)} right",
        "",
    ]
    return "\n".join([*head, *lines]).rstrip() + "\n"


def title_of(variant: Variant) -> str:
    """Return a variant's changes in words."""
    return " + ".join(change.title for change in variant.changes) or "as written"


def _found_one(case: Case, runs: RecordedRuns) -> bool:
    return any(
        variant.fits and variant.headroom_bytes >= 0 and reserved <= case.capacity_bytes
        for variant, reserved, _ in rows(case, runs)
    )


def _has_recorded(case: Case, runs: RecordedRuns) -> bool:
    listed = {variant.overrides for variant in case.answer.prescriptions if not variant.environment}
    return any(variant.overrides in listed for variant, _, _ in rows(case, runs))


def _fits(value: bool) -> str:
    return "fits" if value else "does not fit"


def main() -> int:
    """Ask every case and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="runs to start from, as world-2/ddp")
    parser.add_argument("-o", "--output", type=Path, help="also write the result here")
    parser.add_argument("--cache", type=Path, help="folder of answers: done ones are not asked")
    arguments = parser.parse_args()
    done = []
    for name, neighbour in CASES:
        if arguments.cases and name not in arguments.cases:
            continue
        print(name, file=sys.stderr, flush=True)
        path = arguments.cache and arguments.cache / f"{name.replace('/', '-')}.json"
        if path and path.exists():
            done.append(msgspec.json.decode(path.read_bytes(), type=Case))
            continue
        done.append(ask(name, neighbour))
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(done[-1]))
    if not done:
        parser.error("no case starts from that run")
    text = report(done)
    print(text, end="")
    if arguments.output:
        head = "# What `fit` prescribes, against recorded runs\n\n"
        asked = " ".join([*arguments.cases, "-o"])
        source = f"Written by `python benchmarks/fit_recorded.py {asked}` from the runs in "
        what = "`profiles/h200` (an H200, as one rank of many). Bold: in the answer.\n\n"
        arguments.output.write_text(head + source + what + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
