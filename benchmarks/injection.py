"""Which flag did it? Pairs of specs with known culprits, and what ``compare`` says of them.

    python benchmarks/injection.py [--pairs 60] [--seed 1] [--work DIR] [-o docs/injection.md]

Each pair differs in 1 to 6 fields (and its name): one to three of them may move memory, the rest
are decoys, which are inert, cosmetic or without effect on memory; up to two other fields have
their other value on both sides. The truth comes from real training steps: one rank of many for
every combination of the culprits, whose Shapley values are the true shares of the peak; runs of A
with all decoys, and of B without them, show that these are harmless beside the culprits too.
``compare`` is then given the runs of A and B alone, and may simulate. Pairs in which nothing moved,
whose decoys were not harmless, or which the rules forbid, are drawn anew and counted; pairs with a
launch that failed are listed as not judged, and replaced.

On a GPU, launches only, several at a time; judged later where there is none, by the versions of
torch and Megatron-Core that are installed there:

    python benchmarks/injection.py --device cuda --one-rank-of 8 --jobs 12 --record-only --work DIR
    python benchmarks/injection.py --device cuda --one-rank-of 8 --judge-only --work DIR

What is measured is kept in ``--work``, so an interrupted benchmark goes on; another ``--seed``
makes other pairs of the same kinds. About 2 s of CPU for each run and each simulation of torch's
strategies, 4 to 8 s for Megatron's.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from injected.fields import STRATEGIES, TORCH
from injected.judge import KnownSimulations, NoGood, Row, Truth, find_truth, judge
from injected.measure import Measurements
from injected.pairs import DrawnPairs, Pair, draw_pairs
from injected.table import head, line, report, truth_line

from fsdp_doctor.errors import DoctorError
from fsdp_doctor.simulator.many import Simulations

TRIES = 3
"""Pairs drawn for each that is wanted, at most."""


class Benchmark:
    """Draws, measures and judges until there are pairs enough."""

    def __init__(
        self, measurements: Measurements, simulations: KnownSimulations | None, until: float | None
    ) -> None:
        """``simulations`` None: nothing is judged."""
        self._measurements, self._simulations, self._until = measurements, simulations, until
        self.rows: list[Row] = []
        self.truths: list[Truth] = []
        self.drawn_anew: Counter[str] = Counter()
        self.not_judged: dict[int, str] = {}

    def run(self, pairs: Iterator[Pair], wanted: int) -> None:
        """Work in rounds: as many pairs as are missing are measured together."""
        pairs = islice(pairs, TRIES * wanted)
        while len(self.truths) < wanted and not self._out_of_time():
            batch = list(islice(pairs, wanted - len(self.truths)))
            if not batch:
                return
            legal = [pair for pair in batch if not self._forbidden(pair)]
            self._measurements.take(legal)
            if legal and not any(map(self._measurements.knows, legal)):
                return  # nothing further was recorded
            for pair in legal:
                self._settle(pair)

    def _out_of_time(self) -> bool:
        return self._until is not None and time.time() > self._until

    def _forbidden(self, pair: Pair) -> bool:
        rule = pair.broken_rule()
        if rule is not None:
            self.drawn_anew["not legal"] += 1
            print(f"pair {pair.number}, {pair.strategy}: not legal: {rule}", flush=True)
        return rule is not None

    def _settle(self, pair: Pair) -> None:
        truth = find_truth(pair, self._measurements)
        if isinstance(truth, NoGood):
            print(f"pair {pair.number}, {pair.strategy}: {truth.reason}", flush=True)
            if truth.judged:
                self.drawn_anew[truth.reason] += 1
            else:
                self.not_judged[pair.number] = truth.reason
            return
        if self._simulations is None:
            print(truth_line(truth), flush=True)
        else:
            try:
                self.rows.append(judge(truth, self._measurements, self._simulations))
            except DoctorError as error:
                self.not_judged[pair.number] = str(error)
                print(f"pair {pair.number}, {pair.strategy}: {error}", flush=True)
                return
            print(line(self.rows[-1]), flush=True)
        self.truths.append(truth)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=STRATEGIES,
        default=list(TORCH),
        metavar="NAME",
        help=f"of {', '.join(STRATEGIES)}; those of torch unless told otherwise",
    )
    parser.add_argument("--work", type=Path, default=None, help="where runs are kept")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--one-rank-of", type=int, default=4, metavar="N")
    parser.add_argument("--jobs", type=int, default=1, help="launches at a time")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th pair only, from the K-th on")
    parser.add_argument("--max-minutes", type=float, default=None, help="launch no more then")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--record-only", action="store_true", help="launch, but do not judge")
    what.add_argument("--judge-only", action="store_true", help="launch nothing")
    parser.add_argument("-o", "--output", type=Path, default=None)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Draw pairs, examine them, print and write the table; 1 when a goal is missed."""
    options = _parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    work = options.work or Path(tempfile.mkdtemp(prefix="injection-"))
    work.mkdir(parents=True, exist_ok=True)
    until = None if options.max_minutes is None else time.time() + 60 * options.max_minutes
    part, parts = map(int, options.part.split("/"))
    drawn = DrawnPairs(work, options.seed)
    pairs = drawn.recorded()
    if not options.judge_only:
        ranks = options.one_rank_of
        pairs = drawn.kept(draw_pairs(options.seed, options.strategies, options.device, ranks))
    started = time.monotonic()
    with ExitStack() as stack:
        measurements = stack.enter_context(
            Measurements(
                work,
                device=options.device,
                ranks=options.one_rank_of,
                jobs=0 if options.judge_only else options.jobs,
                until=until,
            )
        )
        simulations = None
        if not options.record_only:
            simulations = KnownSimulations(work, stack.enter_context(Simulations()))
        benchmark = Benchmark(measurements, simulations, until)
        benchmark.run(islice(pairs, part, None, parts), options.pairs)
        done = len(benchmark.truths)
        print(
            f"{done} pairs of {options.pairs}, {measurements.ran} launches, "
            f"{0 if simulations is None else simulations.ran} simulations, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
    if options.record_only:
        return int(done < options.pairs)
    if not benchmark.rows:
        return 1
    text = report(benchmark.rows, benchmark.drawn_anew, benchmark.not_judged, options.seed)
    print(text)
    if options.output is not None:
        command = f"python benchmarks/injection.py {shlex.join(arguments)}"
        runs = [measurements.run_of(row.pair.a).manifest for row in benchmark.rows]
        options.output.write_text(head(command, benchmark.rows, runs) + text)
    return int(any(True for row in benchmark.rows for _ in row.problems()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
