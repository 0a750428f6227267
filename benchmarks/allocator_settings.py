"""The allocator model under other settings against a real GPU's allocator.

    python benchmarks/allocator_settings.py events  # no GPU; writes benchmarks/allocator/*.json.gz
    python benchmarks/allocator_settings.py play -o RAW.json  # on a CUDA device; torch is enough
    python benchmarks/allocator_settings.py table RAW.json [-o docs/allocator-settings.md]

``events`` writes traces of allocations and chooses cases for each: a setting of
``PYTORCH_CUDA_ALLOC_CONF`` and, where something shall act under a limit, a limit between what the
trace allocates and what the model reserves for it. ``play`` asks the GPU's caching allocator for
the same bytes on as many streams in the same order, in a process for each case, and writes what it
counted, after every case again. ``table`` plays the traces through the model and sets both beside
each other.

The traces: three steps of a spec's dry run (``steady``), and twelve whose short-lived blocks on the
compute stream have another size in every step, as batches of varying length have (``varying``).
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TRACES = HERE / "allocator"
sys.path[:0] = [str(HERE), str(TRACES)]
from page import show  # noqa: E402
from play import play  # noqa: E402
from traces import POINTS, UNIT, Event, Outcome, name_of, read  # noqa: E402

SPEC = HERE.parent / "profiles" / "h200" / "specs" / "fsdp2-reshard.yaml"
WORLD_SIZE = 8
ORDERS = 5
"""Other orders of segments' addresses that every case is played with."""
STEPS = {"steady": 3, "varying": 12}
SHORTEST = 0.35
"""Of the spec's sequence, the shortest of ``varying``."""
SEED = 7

UNLIMITED = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:16",
)
COLLECTED = ("garbage_collection_threshold:0.6", "garbage_collection_threshold:0.8")
"""Under a limit that the default settings keep, so that the threshold alone acts."""
TIGHT = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "garbage_collection_threshold:0.8",
    "garbage_collection_threshold:0.8,max_split_size_mb:128",
)
"""Under limits below what the default settings reserve."""

# -- traces and cases -------------------------------------------------------------------------


def simulated(steps: int, *, varying: bool) -> Iterator[Event]:
    """Yield allocations and frees of a dry run in this process. Patches torch."""
    from fsdp_doctor.config.spec import load_written_spec
    from fsdp_doctor.gpus_table import find_gpu
    from fsdp_doctor.simulator.dry_run import dry_run
    from fsdp_doctor.simulator.estimate import with_world_size

    spec = with_world_size(load_written_spec(SPEC, ()).spec, WORLD_SIZE)
    workspace = find_gpu("h200").cublas_workspace_bytes
    log = dry_run(spec, rank=0, world_size=WORLD_SIZE, steps=steps, workspace_bytes=workspace).log
    numbers = random.Random(SEED)  # noqa: S311
    factors = {step: numbers.uniform(SHORTEST, 1) for step in range(-1, steps)}
    ends = {span.step: span.end or log.position for span in log.phases}
    for event in log.events:
        if event < 0:
            yield -event - 1
            continue
        block = log.allocations[event - 1]
        size = block.requested_bytes
        short = block.died is not None and block.died <= ends[block.step]
        if varying and short and block.step >= 0 and block.stream == 0 and size > 1 << 16:
            size = int(size * factors[block.step])
        yield [size, block.stream]


def chosen_cases(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return settings and limits for a trace, the limits from what the model holds for it."""
    from model import play_on_model

    free = play_on_model(events, "", None)
    needed, reserved = free.allocated_peak, free.peak
    limits = {
        "roomy": reserved + reserved // 10,
        "between": needed + (reserved - needed) // 2,
        "close": needed + (reserved - needed) // 3,
        "tight": needed + needed // 100,
    }
    # no multiple of 2 MiB: a byte of rounding in a fraction of the GPU's memory decides nothing
    limits = {name: size // UNIT * UNIT + UNIT // 2 for name, size in limits.items()}
    cases: list[dict[str, Any]] = [{"conf": conf, "limit": None} for conf in UNLIMITED]
    cases += [{"conf": conf, "limit": limits["roomy"]} for conf in COLLECTED]
    cases += [
        {"conf": conf, "limit": limits[name]}
        for name in ("between", "close", "tight")
        for conf in TIGHT
    ]
    return cases


def write_events(name: str) -> None:
    """Write a trace with its cases."""
    from model import play_on_model

    events = list(simulated(STEPS[name], varying=name == "varying"))
    found: dict[str, Any] = {"cases": chosen_cases(events), "events": events}
    data = json.dumps(found, separators=(",", ":")).encode()
    TRACES.mkdir(exist_ok=True)
    (TRACES / f"{name}.json.gz").write_bytes(gzip.compress(data, 9, mtime=0))
    for case in found["cases"]:
        outcome = play_on_model(events, case["conf"], case["limit"])
        print(name, case, outcome.peak, outcome.retries, outcome.failed_at, flush=True)


# -- the table --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A case: what the GPU counted and what the model says."""

    trace: str
    conf: str
    limit: int | None
    real: Outcome
    model: Outcome
    others: list[Outcome]
    """The model's with segments in other orders of addresses."""

    @property
    def exact(self) -> bool:
        """Whether nothing that was counted differs."""
        return self.real == self.model

    @property
    def hangs_on_addresses(self) -> bool:
        """Whether any other order of addresses changes what the model counts."""
        return any(other != self.model for other in self.others)

    @property
    def peak_error(self) -> float:
        """Of the peak of reserved bytes, relative."""
        return self.model.peak / self.real.peak - 1

    @property
    def worst_over_time(self) -> float:
        """Largest difference at any of the moments, of the recorded peak."""
        pairs = zip(self.real.over_time, self.model.over_time, strict=False)
        most = max((abs(a - b) for a, b in pairs), default=0)
        return most * UNIT / self.real.peak

    def cells(self) -> list[str]:
        """Return a line of the table."""
        limit = "-" if self.limit is None else f"{self.limit / (1 << 30):.3f}"
        difference = self.model.peak - self.real.peak
        error = f"{difference:+,} ({self.peak_error:+.2%})" if difference else "0"
        real, model = self.real, self.model
        return [
            self.conf or "as torch is",
            limit,
            f"{real.peak:,}",
            error,
            f"{self.worst_over_time:.2%}" if self.worst_over_time else "0",
            f"{model.last - real.last:+,}" if model.last != real.last else "0",
            f"{real.device_allocations}, {model.device_allocations}",
            f"{real.retries}, {model.retries}",
            _ends(real.failed_at, model.failed_at),
            "yes" if self.hangs_on_addresses else "no",
        ]


def _ends(real: int | None, model: int | None) -> str:
    if real is None and model is None:
        return "fits, both"
    if real == model:
        return f"out of memory at event {real}, both"
    told = ["fits" if at is None else f"out of memory at event {at}" for at in (real, model)]
    return "; model: ".join(told)


def rows(answers: Sequence[dict[str, Any]], folder: Path) -> Iterator[Row]:
    """Play every answered case through the model."""
    from model import play_on_model

    events = {name_of(path): read(path)["events"] for path in folder.glob("*.json.gz")}
    for answer in answers:
        if "error" in answer:
            continue
        real = Outcome(**{name: answer[name] for name in Outcome.__slots__})
        conf, limit = answer["conf"], answer["limit"]
        trace = events[answer["trace"]]
        model = play_on_model(trace, conf, limit)
        others = [play_on_model(trace, conf, limit, seed) for seed in range(ORDERS)]
        yield Row(answer["trace"], conf, limit, real, model, others)


def table(answers: Sequence[dict[str, Any]], folder: Path = TRACES) -> str:
    """Return the Markdown text: how near the model is, then every case."""
    found = list(rows(answers, folder))
    lines = sorted({f"{a['device']}, torch {a['torch']}" for a in answers if "error" not in a})
    failed = [answer for answer in answers if "error" in answer]
    lost = [f"Not played: {a['trace']} {a.get('conf')}: {a['error'][-200:]}" for a in failed]
    if not found:
        return "\n".join(lost) + "\n"
    errors = sorted(abs(row.peak_error) for row in found)
    over_time = sorted(row.worst_over_time for row in found)
    agree = sum(row.real.failed_at == row.model.failed_at for row in found)
    count = len(found)
    free = [row for row in found if not row.hangs_on_addresses]
    shuffled = [abs(o.peak / row.real.peak - 1) for row in found for o in row.others]
    lines += [
        "",
        f"Peak reserved: median error {errors[count // 2]:.2%}, worst {errors[-1]:.2%}, exact in "
        f"{errors.count(0)} of {count} cases. At {POINTS} moments of each trace: largest "
        f"difference, of the peak, {over_time[-1]:.2%}; none in {over_time.count(0)} of {count}. "
        f"Whether and where memory runs out: the same in {agree} of {count}.",
        "",
        f"In {len(free)} cases nothing changes when the model places segments in {ORDERS} other "
        f"orders of addresses; of those {sum(row.exact for row in free)} agree in everything that "
        f"was counted. Of the other {count - len(free)}, "
        f"{sum(row.exact for row in found) - sum(row.exact for row in free)} do. Peak reserved "
        f"under the other orders, all cases: worst error {max(shuffled):.2%}.",
    ]
    for name in sorted({row.trace for row in found}):
        lines += [
            "",
            f"`{name}`: peak allocated {found_peak(found, name):,} bytes",
            "",
            "| setting | limit, GiB | peak reserved, bytes | model's | largest over time | at the "
            "end | device allocations | retries | outcome | hangs on addresses |",
            "|---|--:|--:|--:|--:|--:|--:|--:|---|---|",
        ]
        lines += [f"| {' | '.join(row.cells())} |" for row in found if row.trace == name]
    lines += lost
    return "\n".join(lines) + "\n"


def found_peak(found: Sequence[Row], name: str) -> int:
    """Return what a trace allocates at most where nothing limits or rounds it."""
    played = [row.real for row in found if row.trace == name and row.real.failed_at is None]
    return min((outcome.allocated_peak for outcome in played), default=0)


def main() -> int:
    """Do one of the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    events = parts.add_parser("events")
    events.add_argument("names", nargs="*", choices=[*STEPS, []])
    player = parts.add_parser("play")
    player.add_argument("traces", nargs="*", type=Path)
    player.add_argument("-o", "--output", type=Path, required=True)
    player.add_argument("--jobs", type=int, default=8)
    player.add_argument("--max-seconds", type=float, default=300)
    tabled = parts.add_parser("table")
    tabled.add_argument("raw", type=Path)
    tabled.add_argument("--traces", type=Path, default=TRACES, help="folder of the traces")
    tabled.add_argument("-o", "--output", type=Path, help="document whose table is written anew")
    chosen = parser.parse_args()
    if chosen.part == "events":
        names = chosen.names or list(STEPS)
        if len(names) == 1:
            write_events(names[0])
            return 0
        return max(
            subprocess.run([sys.executable, __file__, "events", name], check=False).returncode
            for name in names
        )
    if chosen.part == "play":
        paths = chosen.traces or sorted(TRACES.glob("*.json.gz"))
        return play(paths, chosen.output, chosen.jobs, chosen.max_seconds)
    text = table(json.loads(chosen.raw.read_text()), chosen.traces)
    show(text, chosen.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
