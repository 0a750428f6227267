"""Simulate drafts as ``estimate`` does, several at a time, each of them once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Self

from fsdp_doctor.errors import InputError
from fsdp_doctor.fit.legal import Draft
from fsdp_doctor.fit.move import ALLOC_CONF
from fsdp_doctor.fit.search import Outcome
from fsdp_doctor.gpus_table import GpuModel
from fsdp_doctor.model.estimate import Estimate, StepEstimate
from fsdp_doctor.model.fit import RelativeRange
from fsdp_doctor.model.work import StepTimeGuess
from fsdp_doctor.simulator.estimate import estimate
from fsdp_doctor.simulator.many import Simulations
from fsdp_doctor.simulator.roofline import faster


class Simulator:
    """Estimates of one spec's variants. Use as a context manager.

    ``jobs``: simulations that run side by side; the answers do not depend on it.
    """

    def __init__(
        self,
        gpu: GpuModel,
        memory_bytes: int,
        *,
        jobs: int | None = None,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._gpu, self._memory_bytes, self._tell = gpu, memory_bytes, tell
        self._jobs = jobs or len(os.sched_getaffinity(0))
        self._idle: SimpleQueue[Simulations] = SimpleQueue()
        self._stack = ExitStack()
        self._pool = ThreadPoolExecutor(self._jobs)
        """Its threads outlive the servers that they start: a server dies with its thread."""
        self._known: dict[frozenset[str], Estimate] = {}
        self.simulations = 0
        """How many were run."""

    def __enter__(self) -> Self:
        self._stack.callback(self._pool.shutdown, wait=True, cancel_futures=True)
        for _ in range(self._jobs):
            self._idle.put(self._stack.enter_context(Simulations()))
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def estimate(self, draft: Draft) -> Estimate:
        """Return the estimate of a draft. Raises InputError when it cannot be simulated."""
        self.simulations += 1
        return self._run(draft)

    def _run(self, draft: Draft) -> Estimate:
        server = self._idle.get()
        try:
            return estimate(
                draft.spec,
                gpu=self._gpu,
                memory_bytes=self._memory_bytes,
                alloc_conf=draft.environment.get(ALLOC_CONF, ""),
                run=server.simulate,
            )
        finally:
            self._idle.put(server)

    def known(self, draft: Draft) -> Estimate:
        """Return the estimate of a draft that was evaluated."""
        return self._known[draft.names]

    def base(self, draft: Draft) -> Outcome:
        """Simulate the spec as written. Raises InputError when it cannot be simulated."""
        self._tell("simulating the spec as written")
        self._known[draft.names] = self.estimate(draft)
        return self._outcome(draft)

    def evaluate(self, drafts: Sequence[Draft]) -> list[Outcome]:
        """Simulate drafts; call ``base`` before."""
        first = self.simulations + 1
        self.simulations += len(drafts)
        return list(self._pool.map(self._evaluate, drafts, range(first, first + len(drafts))))

    def _evaluate(self, draft: Draft, number: int) -> Outcome:
        self._tell(f"simulation {number}: {', '.join(sorted(draft.names))}")
        try:
            self._known[draft.names] = self._run(draft)
        except InputError as error:
            return Outcome(fits=None, reserved_bytes=0, cost=0.0, failure=str(error))
        return self._outcome(draft)

    def _outcome(self, draft: Draft) -> Outcome:
        found, base = self._known[draft.names], self._known[frozenset()]
        cost = 0.0
        if found.step_time is not None and base.step_time is not None:
            cost = faster(base.step_time, found.step_time)
        reserved = steady(found).peak_reserved_bytes
        return Outcome(fits=_verdict(found), reserved_bytes=reserved, cost=cost)


def _verdict(found: Estimate) -> bool | None:
    """Whether it fits with something left over. None: perhaps, or only while the allocator gives
    cached segments back again and again.
    """
    if found.fits is False:
        return False
    return True if found.fits and found.headroom_bytes >= 0 else None


def steady(estimate: Estimate) -> StepEstimate:
    """Return the steady step of the estimate's largest rank."""
    return max((rank.steady for rank in estimate.ranks), key=lambda s: s.peak_reserved_bytes)


def relative(a: StepTimeGuess | None, b: StepTimeGuess | None) -> RelativeRange | None:
    """Return the smallest and largest relative change of low end, middle and high end."""
    if a is None or b is None:
        return None
    ratios = [
        b.total.low_s / a.total.low_s - 1,
        faster(a, b),
        b.total.high_s / a.total.high_s - 1,
    ]
    return RelativeRange(low=min(ratios), high=max(ratios))
