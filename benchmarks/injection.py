"""Which flag did it? Pairs of specs with known culprits, and what ``compare`` says of them.

    python benchmarks/injection.py [--pairs 60] [--seed 1] [--work DIR] [-o docs/injection.md]

Each pair differs in 1 to 6 fields (and its name): one to three of them move memory, the rest are
decoys, which are inert, cosmetic or without effect on memory. The truth comes from real training
steps: a rank of 2 on the CPU for every combination of the culprits, whose Shapley values are the
true shares of the peak; runs of A with all decoys, and of B without them, show that these are
harmless beside the culprits too. ``compare`` is
then given the runs of A and B alone, and may simulate. Pairs in which nothing moved, or whose
decoys were not harmless, are drawn anew and counted.

Runs are kept in ``--work`` by the hash of their spec, so an interrupted benchmark goes on; another
``--seed`` makes other pairs of the same kinds. About 2 s of CPU for each run and for each
simulation.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import msgspec

from fsdp_doctor.attribution.compare import compare_runs
from fsdp_doctor.attribution.shares import divide
from fsdp_doctor.attribution.what_if import Simulation
from fsdp_doctor.config.spec import written_spec_from_mapping
from fsdp_doctor.model.comparison import Comparison
from fsdp_doctor.model.estimate import RankEstimate
from fsdp_doctor.model.run import Run
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.profiler.launch import Launcher, LaunchOptions
from fsdp_doctor.runs import load_run
from fsdp_doctor.runs.summary import steady_peak_bytes
from fsdp_doctor.simulator.many import Simulations

WORLD_SIZE = 2
HARMLESS = 0.001
"""Decoys may move a peak by this share: below it ``compare`` calls memory the same."""
NAMED = 0.02
"""Share of the difference from which a field counts as blamed, and as a culprit."""
GOALS = {"top": 0.97, "all": 0.95, "decoy": 0, "error": 0.05}

BASE: dict[str, Any] = {
    "world_size": WORLD_SIZE,
    "workload": {
        "model": {"layers": 2, "hidden": 256, "heads": 4, "ffn": 704, "vocab": 4096},
        "micro_batch": 2,
        "sequence_length": 128,
    },
    "steps": {"warmup": 3, "timed": 1, "kernel_profile": False},
}
Field = tuple[str, Any, Any]
"""Key of the spec, its value where it is not written, and its other value."""

_ANY_CULPRITS: list[Field] = [
    ("workload.micro_batch", 2, 4),
    ("workload.sequence_length", 128, 256),
    ("workload.model.layers", 2, 3),
    ("workload.model.ffn", 704, 1408),
    ("workload.model.vocab", 4096, 6144),
    ("config.activation_checkpointing.mode", "none", "full"),
    ("config.optimizer.name", "adamw", "sgd"),
    ("config.precision.autocast", None, "bfloat16"),
]
CULPRITS: dict[str, list[Field]] = {
    "ddp": [
        *_ANY_CULPRITS,
        ("config.ddp.gradient_as_bucket_view", False, True),
        ("config.precision.parameters", "float32", "bfloat16"),
    ],
    "fsdp1": [
        *_ANY_CULPRITS,
        ("config.fsdp1.sharding_strategy", "FULL_SHARD", "SHARD_GRAD_OP"),
        ("config.fsdp1.mixed_precision.param_dtype", None, "bfloat16"),
        ("config.fsdp1.wrap", "block", "none"),
    ],
    "fsdp2": [
        *_ANY_CULPRITS,
        ("config.fsdp2.reshard_after_forward", True, False),
        ("config.fsdp2.mp_policy.param_dtype", None, "bfloat16"),
        ("config.fsdp2.wrap", "block", "none"),
        ("config.precision.parameters", "float32", "bfloat16"),
    ],
}
_ANY_DECOYS: list[Field] = [
    ("workload.seed", 0, 7),
    ("config.optimizer.learning_rate", 1e-4, 3e-4),
    ("config.optimizer.weight_decay", 0.01, 0.1),
    ("config.activation_checkpointing.every_n", 2, 4),
    ("config.gradient_accumulation.sync", "every_microbatch", "last_microbatch"),
    ("steps.timed", 1, 2),
]
DECOYS: dict[str, list[Field]] = {
    "ddp": [
        *_ANY_DECOYS,
        ("config.fsdp2.reshard_after_forward", None, False),
        ("config.fsdp1.sharding_strategy", None, "NO_SHARD"),
        ("config.ddp.find_unused_parameters", False, True),
    ],
    "fsdp1": [
        *_ANY_DECOYS,
        ("config.ddp.bucket_cap_mb", None, 200),
        ("config.fsdp2.reshard_after_forward", None, False),
        ("config.fsdp1.forward_prefetch", False, True),
        ("config.fsdp1.limit_all_gathers", True, False),
    ],
    "fsdp2": [
        *_ANY_DECOYS,
        ("config.ddp.bucket_cap_mb", None, 200),
        ("config.fsdp1.sharding_strategy", None, "NO_SHARD"),
        ("config.fsdp1.use_orig_params", None, True),
        ("config.optimizer.momentum", 0.0, 0.9),
    ],
}
STRATEGIES = ("fsdp2", "fsdp1", "ddp")


@dataclass(frozen=True)
class Pair:
    """A spec and the fields in which another one differs from it."""

    number: int
    strategy: str
    culprits: tuple[Field, ...]
    decoys: tuple[Field, ...]
    reversed: bool
    """Whether A has the other values and B the plain ones."""

    def spec(self, flipped: Sequence[Field], name: str) -> dict[str, Any]:
        """Return A with some fields as in B."""
        raw = copy.deepcopy(BASE)
        raw["name"] = name
        raw["config"] = {"strategy": self.strategy}
        for one in (*self.culprits, *self.decoys):
            if (one in flipped) != self.reversed:
                _put(raw, one[0], one[2])
        return raw


def _put(raw: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    section = raw
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = value


def draw_pairs(seed: int) -> Iterator[Pair]:
    """Yield pairs without end, the same for the same seed."""
    chance = random.Random(seed)  # noqa: S311 (pairs for a benchmark)
    number = 0
    while True:
        strategy = STRATEGIES[number % len(STRATEGIES)]
        number += 1
        count = chance.choice((1, 1, 2, 2, 3))
        culprits = chance.sample(CULPRITS[strategy], count)
        taken = {one[0] for one in culprits}
        pool = [d for d in DECOYS[strategy] if d[0] not in taken and not _acts(d, taken)]
        decoys = chance.sample(pool, chance.randint(0, 6 - count))
        yield Pair(
            number=number,
            strategy=strategy,
            culprits=tuple(culprits),
            decoys=tuple(decoys),
            reversed=chance.random() < 0.5,
        )


def _acts(decoy: Field, culprits: set[str]) -> bool:
    """Return whether a decoy is none beside these culprits."""
    return decoy[0].startswith("config.optimizer.") and "config.optimizer.name" in culprits


class Recorder:
    """Runs specs for real, each once."""

    def __init__(self, work: Path, launcher: Launcher, device: str, ranks: int) -> None:
        self._work, self._launcher = work, launcher
        self.ran = 0
        self._options = LaunchOptions(device=device, one_rank_of=ranks, force=True)
        self._prefix = "" if (device, ranks) == ("cpu", WORLD_SIZE) else f"{device}-{ranks}-"

    def run(self, raw: dict[str, Any]) -> Run:
        """Return the run of a spec, recorded now or before."""
        told = {key: value for key, value in raw.items() if key != "name"}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
        directory = self._work / f"{self._prefix}{digest}"
        if (directory / "run.json").exists():
            run = load_run(directory)
            if run.manifest.status == "completed":
                return run
        self.ran += 1
        spec = written_spec_from_mapping(raw, "the benchmark")
        own = directory.with_name(f"{directory.name}.{os.getpid()}")
        run = self._launcher.run(spec, own, self._options, lambda _text: None)
        with contextlib.suppress(OSError):  # another process was faster
            own.rename(directory)
            return load_run(directory)
        return run


class KnownSimulations:
    """Simulates specs, each once, whatever became of this process."""

    def __init__(self, work: Path, simulations: Simulations) -> None:
        self._work, self._simulations = work, simulations

    @property
    def ran(self) -> int:
        """Simulations so far, by this process."""
        return self._simulations.ran

    def ask(self, spec: ProfileSpec, **where: Any) -> RankEstimate | str:
        """Return what a rank of ``spec`` allocates."""
        told = msgspec.json.encode((spec, sorted(where.items())))
        path = self._work / f"simulated-{hashlib.sha256(told).hexdigest()[:16]}.json"
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=RankEstimate | str)
        found = self._simulations.ask(spec, **where)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(msgspec.json.encode(found))
        own.rename(path)
        return found


@dataclass
class Row:
    """What is true of a pair, and what was said."""

    pair: Pair
    delta: int
    true: dict[str, float]
    """Culprit -> share of the difference."""
    said: dict[str, float]
    """Injected field -> share as ``compare`` says."""
    together: float = 0.0
    """Share that was put down to several fields and not divided."""
    unexplained: float = 0.0
    points: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def top_is_right(self) -> bool:
        """Whether the field that did most is named first."""
        best = max(self.said, key=lambda key: abs(self.said[key]), default="")
        most = max(abs(value) for value in self.true.values())
        return most - abs(self.true.get(best, 0.0)) <= 0.01 * most

    @property
    def all_found(self) -> bool:
        """Whether every field that did something is named."""
        return all(
            abs(self.said.get(key, 0.0)) >= NAMED
            for key, value in self.true.items()
            if abs(value) >= NAMED
        )

    @property
    def worst_decoy(self) -> float:
        """Largest share put down to a decoy."""
        return max((abs(self.said.get(d[0], 0.0)) for d in self.pair.decoys), default=0.0)

    @property
    def error(self) -> float:
        """Mean error of the culprits' shares."""
        return sum(abs(v - self.said.get(k, 0.0)) for k, v in self.true.items()) / len(self.true)


def peak_of(run: Run) -> int | None:
    """Return the steady peak of the one recorded rank."""
    return steady_peak_bytes(run.ranks[0]) if run.manifest.status == "completed" else None


def examine(pair: Pair, recorder: Recorder, simulations: KnownSimulations) -> Row | str:
    """Find the truth of a pair and what ``compare`` says; text: why the pair is no good."""
    fields = pair.culprits
    values: dict[frozenset[int], int] = {}
    for size in range(len(fields) + 1):
        for chosen in combinations(range(len(fields)), size):
            found = peak_of(recorder.run(pair.spec([fields[n] for n in chosen], "point")))
            if found is None:
                return "a combination does not run"
            values[frozenset(chosen)] = found
    a = recorder.run(pair.spec([], "a"))
    b = recorder.run(pair.spec([*fields, *pair.decoys], "b"))
    with_decoys = peak_of(recorder.run(pair.spec(pair.decoys, "decoys")))
    start, end = peak_of(a), peak_of(b)
    if start is None or end is None or with_decoys is None:
        return "A or B does not run"
    culprits_alone = values[frozenset(range(len(fields)))]
    moved = max(abs(with_decoys - start) / start, abs(end - culprits_alone) / end)
    if moved > HARMLESS:
        return "decoys are not harmless"
    delta = end - start
    if abs(delta) < max(1 << 20, 0.001 * start):
        return "nothing moved"
    division = divide(len(fields), values, ())
    true = {
        one[0]: float((share.value or Fraction(0)) / delta)
        for one, share in zip(fields, division.shares, strict=True)
    }
    comparison = compare_runs([a], [b], simulation=Simulation(simulate=simulations.ask))
    points = 0 if comparison.what_if is None else len(comparison.what_if.points)
    row = Row(pair=pair, delta=delta, true=true, said={}, points=points)
    _read(comparison, row)
    return row


def _read(comparison: Comparison, row: Row) -> None:
    """Sum what is said of the peak over all ranks, by injected field."""
    injected = [one[0] for one in (*row.pair.culprits, *row.pair.decoys)]
    natives = {c.key: {*c.a.native, *c.b.native} for c in comparison.diff.changed}
    for part in comparison.attribution:
        if (part.metric, part.rank, part.phase) != ("peak_allocated_bytes", None, None):
            continue
        share = part.value / row.delta
        if len(part.keys) != 1:
            row.together += share if part.keys else 0.0
            row.unexplained += share if not part.keys else 0.0
            continue
        owners = [p for p in injected if p in natives.get(part.keys[0], ())]
        for owner in owners[:1] or [part.keys[0]]:
            row.said[owner] = row.said.get(owner, 0.0) + share
    row.problems = list(_problems(row))


def _problems(row: Row) -> Iterator[str]:
    if not row.top_is_right:
        yield "top cause"
    if not row.all_found:
        yield "a culprit is missing"
    if row.worst_decoy > NAMED:
        yield "a decoy is blamed"
    if row.error > GOALS["error"]:
        yield "shares"


def report(rows: Sequence[Row], dropped: Counter[str], seed: int) -> str:
    """Return the table of all pairs, and the scores."""
    count = len(rows)
    top = sum(row.top_is_right for row in rows) / count
    found = sum(row.all_found for row in rows) / count
    decoys = sum(row.worst_decoy > NAMED for row in rows)
    error = sum(row.error for row in rows) / count
    kinds = Counter(row.pair.strategy for row in rows)
    lines = [
        f"{count} pairs (seed {seed}): "
        + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
        + f"; {sum(len(r.pair.culprits) for r in rows)} culprits, "
        f"{sum(len(r.pair.decoys) for r in rows)} decoys. Drawn anew: "
        + (", ".join(f"{n} ({why})" for why, n in sorted(dropped.items())) or "none")
        + ".",
        "",
        "| score | goal | result |",
        "|---|---|---|",
        f"| top cause right | {GOALS['top']:.0%} | {top:.1%} |",
        f"| all culprits found | {GOALS['all']:.0%} | {found:.1%} |",
        f"| pairs with a decoy blamed for more than {NAMED:.0%} | 0 | {decoys} |",
        f"| mean error of a culprit's share | {GOALS['error']:.0%} | {error:.2%} |",
        "",
        "| pair | strategy | change of the peak | culprits: true share, said | decoys, most blamed "
        "| simulated | missed |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    culprits = "<br>".join(
        f"`{key.removeprefix('config.')}` {value:.1%}, {row.said.get(key, 0.0):.1%}"
        for key, value in sorted(row.true.items(), key=lambda item: -abs(item[1]))
    )
    decoys = f"{len(row.pair.decoys)}, {row.worst_decoy:.1%}" if row.pair.decoys else "0"
    change = f"{row.delta / (1 << 20):+.1f} MiB"
    cells = (row.pair.number, row.pair.strategy, change, culprits, decoys, row.points)
    return f"| {' | '.join(map(str, cells))} | {', '.join(row.problems) or '-'} |"


HEAD = """# Injection benchmark: which flag did it

Written by `python benchmarks/injection.py --pairs {pairs} --seed {seed} -o docs/injection.md`.

Each pair of specs differs in 1 to 6 fields: culprits that move memory, and decoys that are inert,
cosmetic or without effect on memory. True shares are Shapley values of the peak over real runs of
every combination of the culprits (a rank of {ranks} on {device});
decoys are shown to be harmless by runs of A with all of them and of B without. `compare` sees the
runs of A and B alone and simulates what lies between. "Simulated": the points of its design; 0
where one field alone differs, whose pair of runs settles it.

"""


def main(arguments: Sequence[str]) -> int:
    """Draw pairs, examine them, print and write the table; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=None, help="where runs are kept")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--one-rank-of", type=int, default=WORLD_SIZE)
    parser.add_argument("--part", default="0/1", help="K/N: every N-th pair only, from the K-th on")
    parser.add_argument("--minutes", type=float, default=None, help="stop drawing after so long")
    parser.add_argument("-o", "--output", type=Path, default=None)
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    work = options.work or Path(tempfile.mkdtemp(prefix="injection-"))
    started = time.monotonic()
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    with Launcher() as launcher, Simulations() as simulations:
        recorder = Recorder(work, launcher, options.device, options.one_rank_of)
        known = KnownSimulations(work, simulations)
        part, parts = map(int, options.part.split("/"))
        for pair in islice(draw_pairs(options.seed), part, None, parts):
            minutes = (time.monotonic() - started) / 60
            out_of_time = options.minutes is not None and minutes > options.minutes
            if len(rows) == options.pairs or out_of_time:
                break
            found = examine(pair, recorder, known)
            if isinstance(found, str):
                dropped[found] += 1
                print(f"pair {pair.number}: {found}", flush=True)
                continue
            rows.append(found)
            print(_line(found), flush=True)
        print(f"{recorder.ran} runs, {simulations.ran} simulations")
    if not rows:
        return 1
    text = report(rows, dropped, options.seed)
    print(text)
    if options.output is not None:
        device = {"cpu": "the CPU, counted by the CPU tracker", "cuda": "one GPU"}[options.device]
        head = HEAD.format(
            pairs=len(rows), seed=options.seed, ranks=options.one_rank_of, device=device
        )
        options.output.write_text(head + text)
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
