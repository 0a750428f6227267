"""From a spec and a limit of memory to the answer of ``fit``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from fsdp_doctor.config.rules import Job
from fsdp_doctor.config.rules.gpu_names import architecture_of
from fsdp_doctor.errors import InputError
from fsdp_doctor.fit.evaluate import Simulator, relative, steady
from fsdp_doctor.fit.legal import Draft, Rulebook
from fsdp_doctor.fit.move import Move
from fsdp_doctor.fit.moves import MOVES
from fsdp_doctor.fit.search import Found, Search, numerics_of, pareto
from fsdp_doctor.gpus_table import GpuModel
from fsdp_doctor.model.estimate import Estimate
from fsdp_doctor.model.fit import Change, Fit, Measured, NeededRanks, Refused, Variant
from fsdp_doctor.model.spec import ProfileSpec

MOST = 6
"""Prescriptions in an answer."""
MARGIN_STEP = 0.02
"""Part of the memory that a dearer prescription must leave free beyond a cheaper one."""
LARGEST_WORLD = 16384
STRATEGIES = ("ddp", "fsdp1", "fsdp2", "megatron")
_SHARDED = ("fsdp1", "fsdp2")


class Evidence(Protocol):
    """Looks a variant up among recorded runs."""

    def __call__(self, spec: ProfileSpec) -> Sequence[Measured]:
        """Return what runs of this very spec measured."""


def fit(
    spec: ProfileSpec,
    *,
    gpu: GpuModel,
    memory_bytes: int | None = None,
    keep: Sequence[str] = (),
    max_simulations: int = 40,
    jobs: int | None = None,
    moves: Sequence[Move] = MOVES,
    evidence: Evidence = lambda _spec: (),
    tell: Callable[[str], None] = lambda _text: None,
) -> Fit:
    """Search the changes that make ``spec`` fit into ``memory_bytes`` (else the GPU's).

    Raises InputError when the spec cannot be simulated or a kept field does not exist.
    """
    if spec.config.strategy not in STRATEGIES:
        raise InputError(
            f"strategy {spec.config.strategy} has no table of changes yet",
            where="config.strategy",
            hint=f"one of: {', '.join(STRATEGIES)}",
        )
    total = gpu.memory_bytes if memory_bytes is None else memory_bytes
    rules = Rulebook(
        spec, Job(gpu_arch=architecture_of(gpu.name), world_size=spec.world_size), keep
    )
    with Simulator(gpu, total, jobs=jobs, tell=tell) as simulator:
        base = simulator.base(rules.base)
        search = Search(
            moves,
            apply=rules.apply,
            evaluate=simulator.evaluate,
            base=base,
            limit=max_simulations - 1,
            saves_nothing=rules.saves_nothing,
        )
        found = Found() if base.fits is True else search.run()
        writer = _Writer(simulator, evidence)
        as_written = writer.variant(rules.base)
        chosen = pareto(found.fitting(), int(MARGIN_STEP * total), MOST)
        tried = [(rules.base, base), *found.outcomes.values()]
        least = min(tried, key=lambda item: item[1].reserved_bytes)[0]
        fits_somehow = any(outcome.fits for _, outcome in tried)
        needed = None if fits_somehow else needed_ranks(least, simulator)
        written = simulator.known(rules.base)
        return Fit(
            world_size=spec.world_size,
            gpu=gpu.name,
            memory_bytes=total,
            outside_pytorch_bytes=written.outside_pytorch_bytes,
            as_written=as_written,
            prescriptions=tuple(writer.variant(draft) for draft, _ in chosen),
            smallest=writer.variant(least),
            tried=tuple(writer.variant(draft) for draft, _ in tried),
            needed=needed,
            refused=_refused(found, moves),
            kept=tuple(keep),
            simulations=simulator.simulations,
            complete=found.complete,
            assumptions=written.assumptions
            + (() if written.step_time is None else written.step_time.assumptions),
        )


class Estimates(Protocol):
    """Whoever simulates a draft."""

    def estimate(self, draft: Draft) -> Estimate:
        """Return the estimate of a draft."""


class _Writer:
    """Describes drafts that were simulated."""

    def __init__(self, simulator: Simulator, evidence: Evidence) -> None:
        self._simulator, self._evidence = simulator, evidence
        self._base_time_s: float | None = None
        self._variants: dict[frozenset[str], Variant] = {}

    def variant(self, draft: Draft) -> Variant:
        """Return a draft with its prediction and what recorded runs of it say."""
        if draft.names not in self._variants:
            self._variants[draft.names] = self._describe(draft)
        return self._variants[draft.names]

    def _describe(self, draft: Draft) -> Variant:
        found: Estimate = self._simulator.known(draft)
        base: Estimate = self._simulator.known(replace(draft, moves=()))
        step = steady(found)
        return Variant(
            changes=tuple(_change(move) for move in draft.moves),
            overrides=draft.overrides,
            environment=dict(draft.environment),
            fits=found.fits,
            peak_allocated_bytes=step.peak_allocated_bytes,
            peak_reserved_bytes=step.peak_reserved_bytes,
            headroom_bytes=found.headroom_bytes,
            step_time=None if found.step_time is None else found.step_time.total,
            step_time_change=relative(base.step_time, found.step_time) if draft.moves else None,
            numerics=numerics_of(draft),
            warnings=draft.warnings,
            measured=() if draft.environment else self._measured(draft),
        )

    def _measured(self, draft: Draft) -> tuple[Measured, ...]:
        """Recorded runs of a draft; their change of step time is from the spec as written's."""
        found = tuple(self._evidence(draft.spec))
        times = [m.step_time_s for m in found if m.step_time_s is not None]
        if not draft.moves:
            self._base_time_s = min(times, default=None)
        base = self._base_time_s
        if base is None or not draft.moves:
            return found
        return tuple(
            replace(m, step_time_change=m.step_time_s / base - 1) if m.step_time_s else m
            for m in found
        )


def _change(move: Move) -> Change:
    return Change(
        name=move.name,
        title=move.title,
        saves=move.saves,
        costs=move.costs,
        numerics=move.numerics,
    )


def _refused(found: Found, moves: Sequence[Move]) -> tuple[Refused, ...]:
    """What is worth telling: not that a move is meant for another engine or is made already."""
    titles = {move.name: move.title for move in moves}
    dull = ("does not apply here", "has no effect here")
    return tuple(
        Refused(name=name, title=titles[name], reason=reason)
        for name, reason in found.refused.items()
        if reason not in dull
    )


def needed_ranks(draft: Draft, simulator: Estimates) -> NeededRanks | None:
    """At how many ranks, doubled again and again, the draft fits; None where shards do not shrink.

    Per-rank batch stays, so the global batch grows along.
    """
    config = draft.spec.config
    meshed = config.fsdp2.mesh if config.strategy == "fsdp2" else config.fsdp1.mesh
    shards = config.strategy in _SHARDED or (
        config.strategy == "megatron" and config.megatron.engine != "megatron_ddp"
    )
    if not shards or meshed is not None:
        return None
    exponents = []
    world = draft.spec.world_size
    while world * 2 <= LARGEST_WORLD:
        world *= 2
        exponents.append(world)
    tried: dict[int, tuple[bool | None, int]] = {}

    def fits(size: int) -> bool:
        found = simulator.estimate(replace(draft, spec=replace(draft.spec, world_size=size)))
        tried[size] = (found.fits, steady(found).peak_reserved_bytes)
        return found.fits is True

    if not exponents or not fits(exponents[-1]):
        peak = tried[exponents[-1]][1] if exponents else None
        return NeededRanks(world_size=None, tried=tuple(sorted(tried)), peak_reserved_bytes=peak)
    low, high = -1, len(exponents) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(exponents[middle]) else (middle, high)
    size = exponents[high]
    return NeededRanks(
        world_size=size, tried=tuple(sorted(tried)), peak_reserved_bytes=tried[size][1]
    )
