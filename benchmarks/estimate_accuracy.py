"""Predicted against recorded memory, over every run on an H200 under profiles/.

    python benchmarks/estimate_accuracy.py [NAME ...] [-o docs/estimate-accuracy.md]

For each run the dry run of its spec (no GPU, about 10 s of CPU) is compared with what the H200's
allocator counted: allocated peaks of forward, backward and optimizer in the steady steps, of the
first step, what is resident between steps, and the peak of reserved memory: that of a host which
runs ahead of the GPU, and the low end of the range (they differ with FSDP1). Beside it stand two
other estimates of the same peak: closed forms (``closed_forms.py``), and for FSDP2 what torch's
FSDPMemTracker finds (``torch_tracker.py``; 20 s of CPU each).
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from closed_forms import closed_form_bytes
from page import show
from torch_tracker import tracked_peak_bytes

from fsdp_doctor.config.spec import spec_from_mapping
from fsdp_doctor.gpus_table import find_gpu
from fsdp_doctor.model.estimate import RankEstimate
from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import RankSeries, Run
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.runs import load_run
from fsdp_doctor.runs.summary import peak, resident_bytes, steady_peak_bytes
from fsdp_doctor.simulator.dry_run import answer
from fsdp_doctor.simulator.estimate import STEADY_STEPS
from fsdp_doctor.simulator.request import DryRunRequest

PROFILES = Path(__file__).parent.parent / "profiles"
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
COLUMNS = (
    *("forward", "backward", "optimizer", "peak", "first step", "resident"),
    *("reserved", "reserved, low"),
)


OTHERS = ("closed form", "FSDPMemTracker")
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Row:
    """One run: column -> (predicted, recorded) bytes, and what others say of the peak."""

    name: str
    strategy: str
    values: dict[str, tuple[int, int]]
    others: dict[str, int]
    notes: tuple[str, ...] = ()
    """What could not be predicted, and why."""

    def error(self, column: str) -> float | None:
        """Relative error of a prediction; None: there is none."""
        predicted, recorded = self.values.get("peak" if column in OTHERS else column, (0, 0))
        if column in OTHERS:
            predicted = self.others.get(column, 0)
        return predicted / recorded - 1 if predicted and recorded else None


def compare(directory: Path) -> Row:
    """Simulate the spec of a recorded run and set both beside each other."""
    run = load_run(directory)
    series = run.ranks[0]
    spec = recorded_spec(run)
    request = DryRunRequest(
        spec=dict(run.manifest.spec or {}) | {"world_size": run.manifest.world_size},
        rank=series.rank,
        steps=STEADY_STEPS.get(spec.config.strategy, 1),
        workspace_bytes=find_gpu("h200").cublas_workspace_bytes,
        alloc_conf=allocator_settings(run),
    )
    values: dict[str, tuple[int, int]] = {}
    others: dict[str, int] = {}
    notes = []
    form = closed_form_bytes(spec, parameters(run))
    if form is not None:
        others["closed form"] = form
    try:
        values = dict(beside(simulate(request), series))
        if spec.config.strategy == "fsdp2":
            others["FSDPMemTracker"] = apart(tracked_peak_bytes, spec, series.rank)
    except Exception as error:  # noqa: BLE001 (told in the table; the other runs go on)
        told = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        notes.append(f"{told}{str(error)[:300]}")
    return Row(
        name=name_of(directory, run.manifest.world_size),
        strategy=spec.config.strategy,
        values=values,
        others=others,
        notes=tuple(notes),
    )


def name_of(directory: Path, world_size: int) -> str:
    """Return what the table calls a run."""
    first, *between, last = directory.relative_to(PROFILES).parts
    kind = first.removeprefix("h200").strip("-").replace("-", " ")
    if last.startswith("launch"):  # a point of bisect
        *_, last = between
    told = between and (between[0].startswith("check") or kind == "fit")
    apart = f" ({between[0]})" if told else ""
    return f"{kind}, 1 of {world_size}: {last}{apart}".removeprefix(", ")


def compare_once(directory: Path, cache: Path | None) -> Row:
    """Compare, unless the row lies in the cache."""
    if cache is None:
        return compare(directory)
    path = cache / f"{'-'.join(directory.relative_to(PROFILES).parts)}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Row)
    row = compare(directory)
    cache.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(row))
    return row


def import_ahead() -> None:
    """Import what every simulation needs, so that forked processes need not: 5 s each."""
    import torch._dynamo
    import torch.distributed._tools.fsdp2_mem_tracker
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401


def apart(function: Callable[..., _Found], *arguments: object) -> _Found:
    """Call a function in a process forked from this one, which has imported torch already."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork) as pool:  # not a Pool: its children have none
        return pool.submit(function, *arguments).result()


def simulate(request: DryRunRequest) -> RankEstimate:
    """Simulate in a process of its own."""
    found = apart(answer, request)
    assert found.estimate is not None, found.input_error
    return found.estimate


def recorded_runs() -> list[Path]:
    """Return every run on an H200 that came to its end, by set, world size and name."""
    found = []
    for path in PROFILES.glob("h200*/**/run.json"):
        manifest = load_run(path.parent).manifest
        if manifest.status == "completed" and manifest.device_type == "cuda":
            first, *rest = path.parent.relative_to(PROFILES).parts
            if not first.endswith("step-time") or "calibration" in rest:  # launches of one spec
                found.append((first, manifest.world_size, rest, path.parent))
    return [directory for *_, directory in sorted(found)]


def called(directory: Path) -> set[str]:
    """Return the names under which a run is chosen."""
    parts = directory.relative_to(PROFILES).parts
    places = range(len(parts) + 1)
    return {"/".join(parts[i:j]) for i in places for j in places if i < j} - {parts[-1]}


def recorded_spec(run: Run) -> ProfileSpec:
    """Return the spec that was run."""
    raw = dict(run.manifest.spec or {}) | {"world_size": run.manifest.world_size}
    return spec_from_mapping(raw, "run.json")


def allocator_settings(run: Run) -> str:
    """Return the ``PYTORCH_CUDA_ALLOC_CONF`` that a job was run with."""
    variables = run.manifest.environment.get("variables")
    found = variables.get("PYTORCH_CUDA_ALLOC_CONF") if isinstance(variables, dict) else None
    return str(found or "")


def parameters(run: Run) -> int:
    """Return the number of parameters of the recorded model."""
    assert run.manifest.sizes is not None
    return run.manifest.sizes.parameters


def beside(estimate: RankEstimate, series: RankSeries) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield column, predicted and recorded bytes."""
    steady = estimate.steady
    pairs: list[tuple[str, int | None, int | None]] = []
    for phase in PHASES:
        predicted = steady.phases.get(phase.value)
        pairs.append(
            (
                phase.value,
                None if predicted is None else predicted.peak_allocated_bytes,
                steady_peak_bytes(series, phase),
            )
        )
    first = peak([p.peak for p in series.steps[0].phases], "allocated_bytes")
    reserved = steady_peak_bytes(series, counter="reserved_bytes")
    pairs += [
        ("peak", steady.peak_allocated_bytes, steady_peak_bytes(series)),
        ("first step", estimate.first_step.peak_allocated_bytes, first),
        ("resident", steady.resident_bytes, resident_bytes(series)),
        ("reserved", steady.peak_reserved_bytes, reserved),
        ("reserved, low", steady.peak_reserved_low_bytes, reserved),
    ]
    for column, told, recorded in pairs:
        if told is not None and recorded:
            yield column, (told, recorded)


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table, its summary first."""
    columns = (*COLUMNS, *OTHERS)
    head = ["| | " + " | ".join(columns) + " |", "|---" + "|--:" * len(columns) + "|"]
    lines = list(head)
    for label, chosen in groups(rows):
        errors = [[e for row in chosen if (e := row.error(c)) is not None] for c in columns]
        for name, pick in (("median", statistics.median), ("worst", max)):
            cells = [_percent(pick(list(map(abs, found)))) if found else "-" for found in errors]
            lines.append(f"| {label}, {name} | {' | '.join(cells)} |")
        exact = [str(found.count(0)) if found else "-" for found in errors]
        lines.append(f"| {label}, exact to the byte | {' | '.join(exact)} |")
        cells = ["" if c != "reserved" else within_range(chosen) for c in columns]
        lines.append(f"| {label}, recorded within the range | {' | '.join(cells)} |")
    lines += ["", head[0].replace("| |", "| run |", 1), head[1]]
    for row in rows:
        cells = [_signed(row.values[c]) if c in row.values else "-" for c in COLUMNS]
        for name in OTHERS:
            error = row.error(name)
            cells.append("" if error is None else f"{error * 100:+.1f} %")
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    lines += ["", *(f"{row.name}: {note}" for row in rows for note in row.notes)]
    return "\n".join(lines).rstrip() + "\n"


def within_range(rows: Sequence[Row]) -> str:
    """Return in how many runs the recorded reserved memory lies between both ends."""
    known = [row.values for row in rows if "reserved, low" in row.values]
    inside = [
        low <= recorded <= high
        for low, (high, recorded) in ((v["reserved, low"][0], v["reserved"]) for v in known)
    ]
    return f"{sum(inside)} of {len(known)}" if known else "-"


def groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield all rows, those held out, then those of each strategy."""
    yield f"all {len(rows)}", list(rows)
    held_out = [row for row in rows if row.name.startswith("held out")]
    if held_out:
        yield f"held out ({len(held_out)})", held_out
    for strategy in sorted({row.strategy for row in rows}):
        chosen = [row for row in rows if row.strategy == strategy]
        yield f"{strategy} ({len(chosen)})", chosen


def _percent(value: float) -> str:
    return f"{value * 100:.4f} %" if value else "0"


def _signed(pair: tuple[int, int]) -> str:
    predicted, recorded = pair
    if predicted == recorded:
        return "0"
    return f"{predicted - recorded:+,} ({(predicted / recorded - 1) * 100:+.3f} %)"


def main() -> int:
    """Compare every run whose folder's name was given (all without names), and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", help="runs, as world-8/fsdp2-reshard, or a whole world-8"
    )
    parser.add_argument("-o", "--output", type=Path, help="also write the table here")
    parser.add_argument("--cache", type=Path, help="folder of rows: done ones are not run again")
    arguments = parser.parse_args()
    names = set(arguments.names)
    chosen = [run for run in recorded_runs() if not names or names & called(run)]
    if not chosen:
        parser.error("no recorded run has that name")
    import_ahead()
    rows = []
    for directory in chosen:
        rows.append(compare_once(directory, arguments.cache))
        told = rows[-1].notes or _signed(rows[-1].values["peak"])
        print(rows[-1].name, told, file=sys.stderr, flush=True)
    text = table(rows)
    show(text, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
