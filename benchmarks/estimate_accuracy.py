"""Predicted against recorded memory, over every run in profiles/h200.

    python benchmarks/estimate_accuracy.py [NAME ...] [-o docs/estimate-accuracy.md]

For each run the dry run of its spec (no GPU, about 10 s of CPU) is compared with what the H200's
allocator counted: allocated peaks of forward, backward and optimizer in the steady steps, of the
first step, what is resident between steps, and the peak of reserved memory. Beside it stands a
closed-form estimate of the same peak: model states as DeepSpeed's ``estimate_zero*_model_states``
count them, activations as Megatron-LM's ``theoretical_memory_usage.py`` does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

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
RECORDED = PROFILES / "h200"
HELD_OUT = PROFILES / "h200-held-out"
"""Runs that were not used while the simulator was written; in the table once they are recorded."""
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
COLUMNS = ("forward", "backward", "optimizer", "peak", "first step", "resident", "reserved")


@dataclass(frozen=True, slots=True)
class Row:
    """One run: column -> (predicted, recorded) bytes, and the closed form of the peak."""

    name: str
    strategy: str
    values: dict[str, tuple[int, int]]
    closed_form: int

    def error(self, column: str) -> float:
        """Relative error of a prediction."""
        predicted, recorded = self.values[column]
        return predicted / recorded - 1


def compare(directory: Path) -> Row:
    """Simulate the spec of a recorded run and set both beside each other."""
    run = load_run(directory)
    (series,) = run.ranks
    spec = recorded_spec(run)
    kind = "held out, " if directory.is_relative_to(HELD_OUT) else ""
    request = DryRunRequest(
        spec=dict(run.manifest.spec or {}) | {"world_size": run.manifest.world_size},
        rank=series.rank,
        steps=STEADY_STEPS[spec.config.strategy],
        workspace_bytes=find_gpu("h200").cublas_workspace_bytes,
    )
    return Row(
        name=f"{kind}1 of {run.manifest.world_size}: {directory.name}",
        strategy=spec.config.strategy,
        values=dict(beside(simulate(request), series)),
        closed_form=closed_form_bytes(spec, parameters(run)),
    )


def compare_once(directory: Path, cache: Path | None) -> Row:
    """Compare, unless the row lies in the cache."""
    if cache is None:
        return compare(directory)
    path = cache / f"{directory.parent.name}-{directory.name}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Row)
    row = compare(directory)
    cache.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(row))
    return row


def simulate(request: DryRunRequest) -> RankEstimate:
    """Simulate in a process forked from this one, which has imported torch already."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork) as pool:  # not a Pool: its children have none
        found = pool.submit(answer, request).result()
    assert found.estimate is not None, found.input_error
    return found.estimate


def recorded_spec(run: Run) -> ProfileSpec:
    """Return the spec that was run."""
    raw = dict(run.manifest.spec or {}) | {"world_size": run.manifest.world_size}
    return spec_from_mapping(raw, "run.json")


def parameters(run: Run) -> int:
    """Return the number of parameters of the recorded model."""
    assert run.manifest.sizes is not None
    return run.manifest.sizes.parameters


def beside(estimate: RankEstimate, series: RankSeries) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield column, predicted and recorded bytes."""
    steady = estimate.steady
    for phase in PHASES:
        recorded = steady_peak_bytes(series, phase)
        yield phase.value, (steady.phases[phase.value].peak_allocated_bytes, recorded or 0)
    yield "peak", (steady.peak_allocated_bytes, steady_peak_bytes(series) or 0)
    first = peak([p.peak for p in series.steps[0].phases], "allocated_bytes")
    yield "first step", (estimate.first_step.peak_allocated_bytes, first or 0)
    yield "resident", (steady.resident_bytes, resident_bytes(series) or 0)
    reserved = steady_peak_bytes(series, counter="reserved_bytes")
    yield "reserved", (steady.peak_reserved_bytes, reserved or 0)


def closed_form_bytes(spec: ProfileSpec, count: int) -> int:
    """Model states by DeepSpeed's rule for the nearest ZeRO stage, activations by Megatron's.

    DDP: 18 bytes a parameter; FSDP: 18 bytes over the ranks and 4 of the largest layer, as
    ``estimate_zero3_model_states_mem_needs`` has it. Activations of a layer: ``s b h (18 + 4 f/h)``
    bytes, 2 s b h where it is recomputed; logits and embedding ``4 s b h (1 + v/h)``.
    """
    model, workload = spec.workload.model, spec.workload
    tokens = workload.micro_batch * workload.sequence_length
    ffn = model.ffn or 4 * model.hidden
    layer = 4 * model.hidden**2 + 3 * model.hidden * ffn
    states = 18 * count
    if spec.config.strategy != "ddp":
        states = 4 * layer + 18 * count // spec.world_size
    full = tokens * (18 * model.hidden + 4 * ffn)
    if spec.config.activation_checkpointing.mode == "full":
        full = 2 * tokens * model.hidden
    head = 4 * tokens * (model.hidden + model.vocab)
    return states + full * model.layers + head


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table, its summary first."""
    lines = ["| | " + " | ".join(COLUMNS) + " | closed form |", "|---" + "|--:" * 8 + "|"]
    for label, chosen in groups(rows):
        for name, pick in (("median", statistics.median), ("worst", max)):
            cells = [_percent(pick([abs(row.error(c)) for row in chosen])) for c in COLUMNS]
            forms = [abs(row.closed_form / row.values["peak"][1] - 1) for row in chosen]
            cells.append(_percent(pick(forms)))
            lines.append(f"| {label}, {name} | {' | '.join(cells)} |")
        exact = [sum(row.error(c) == 0 for row in chosen) for c in COLUMNS]
        lines.append(f"| {label}, exact to the byte | {' | '.join(map(str, exact))} | - |")
    lines += [
        "",
        "| run | " + " | ".join(COLUMNS) + " | closed form |",
        "|---" + "|--:" * 8 + "|",
    ]
    for row in rows:
        cells = [_signed(row.values[column]) for column in COLUMNS]
        form = row.closed_form / row.values["peak"][1] - 1
        lines.append(f"| {row.name} | {' | '.join(cells)} | {form * 100:+.0f} % |")
    return "\n".join(lines) + "\n"


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
    found = [path.parent for path in sorted(RECORDED.glob("world-*/*/run.json"))]
    found += [path.parent for path in sorted(HELD_OUT.glob("world-*/*/run.json"))]
    names = set(arguments.names)
    chosen = [d for d in found if not names or names & {f"{d.parent.name}/{d.name}", d.parent.name}]
    if not chosen:
        parser.error("no recorded run has that name")
    chosen.sort(key=lambda d: (int(d.parent.name.removeprefix("world-")), d.name))
    rows = []
    for directory in chosen:
        rows.append(compare_once(directory, arguments.cache))
        print(rows[-1].name, _signed(rows[-1].values["peak"]), file=sys.stderr, flush=True)
    text = table(rows)
    if arguments.output:
        intro = arguments.output.read_text(encoding="utf-8").partition("<!-- table -->")[0]
        arguments.output.write_text(f"{intro}<!-- table -->\n\n{text}", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
