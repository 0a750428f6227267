"""The CPU tracker against torch's own profiler, allocation by allocation.

A plain run (no tracker) is profiled with ``profile_memory``; the tracked run's allocations must be
the same ones, in the same order, with the same lifetimes. Left out, exactly:

* *kernel scratch*: born and dead inside one dispatched operator (found by nesting in the
  profiler's event tree). A dispatch mode sees an operator's results, not its insides;
* *the collective's own staging*: born inside a ``c10d`` operator or on gloo's worker thread. What
  of it surfaces later is seen by the tracker as a view whose storage is new: left out there;
* *memory made without the dispatcher*: wrapped scalars of 8 bytes or less, and generator states.

When a block dies is compared too, except for sizes that were handed to a collective: gloo's worker
thread may be their last owner, and it lets go when it likes.
"""

# ruff: noqa: D102 - the names say it

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_tracker_model import CASES, Case, NoObserver, on_ranks, train  # noqa: E402
from torch._C._profiler import _EventType  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from fsdp_doctor.model.memory import Phase  # noqa: E402
from fsdp_doctor.profiler.observe import cpu_mode  # noqa: E402
from fsdp_doctor.profiler.observe.cpu_tracker import CpuObserver  # noqa: E402

CPU = torch.device("cpu")
Life = tuple[int, str | None, str | None]
"""Bytes, phase of birth, phase of death."""


class PhaseMarks(NoObserver):
    """Marks phases in the profiler's trace."""

    def begin_phase(self, step: int, phase: Phase, microbatch: int) -> None:
        self._mark = record_function(f"phase:{step}:{phase.value}:{microbatch}")
        self._mark.__enter__()

    def end_phase(self) -> None:
        self._mark.__exit__(None, None, None)


def tracked(case: Case) -> tuple[list[Life], set[str], set[int]]:
    """The tracker's allocations, the operators dispatched, the sizes handed to collectives."""
    seen: set[str] = set()
    sent: set[int] = set()
    original = cpu_mode.StorageMode.__torch_dispatch__

    def noting(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.add(func._schema.name)
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            sent.update(x.untyped_storage().nbytes() for x in tensors)
        return original(self, func, types, args, kwargs)

    cpu_mode.StorageMode.__torch_dispatch__ = noting
    observer = CpuObserver(CPU)
    observer.start()
    keep = train(case, observer, CPU)
    end = observer.log.position
    observer.finish(2, None)
    del keep
    log = observer.log

    def phase_at(index: int | None) -> str | None:
        for span in log.phases:
            if index is not None and span.begin <= index < (span.end or end):
                return f"phase:{span.step}:{span.phase.value}:{span.microbatch}"
        return None

    lives = [
        (a.size_bytes, phase_at(a.born), phase_at(a.died))
        for a in log.allocations
        if a.born < end and a.operator != "aten.split.Tensor"
    ]
    return lives, seen, sent


def profiled(case: Case, seen: set[str]) -> list[Life]:
    """The profiler's allocations of a plain run, without the three classes above."""
    generator_state = torch.get_rng_state().nbytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        keep = train(case, PhaseMarks(), CPU)
    del keep
    memory: list[tuple[int, Any, list[Any]]] = []
    spans: list[tuple[int, int, str]] = []
    todo = [(e, []) for e in profiler.profiler.kineto_results.experimental_event_tree()]
    while todo:
        event, above = todo.pop()
        if event.name.startswith("phase:"):
            spans.append((event.start_time_ns, event.end_time_ns, event.name))
        if event.tag == _EventType.Allocation:
            memory.append((event.start_time_ns, event.typed[1], above))
        todo += [(child, [*above, event]) for child in event.children]
    memory.sort(key=lambda item: item[0])

    def phase_at(time: int) -> str | None:
        return next((name for start, end, name in spans if start <= time <= end), None)

    found: list[dict[str, Any]] = []
    alive: dict[int, dict[str, Any]] = {}
    for time, block, above in memory:
        if block.alloc_size > 0:
            outer = next((e for e in above if e.name in seen), None)
            gloo = any(e.name.startswith(("gloo:", "c10d::")) for e in above)
            bare = outer is None and block.alloc_size in (4, 8, generator_state)
            life = {"size": block.alloc_size, "born": phase_at(time), "died": None}
            life |= {"outer": outer, "skip": gloo or bare}
            found.append(life)
            alive[block.ptr] = life
        elif block.alloc_size < 0 and block.ptr in alive:
            life = alive.pop(block.ptr)
            life["died"] = phase_at(time)
            inside = life["outer"] is not None and time <= life["outer"].end_time_ns
            life["skip"] = life["skip"] or inside
    return [(life["size"], life["born"], life["died"]) for life in found if not life["skip"]]


CHOSEN = [case for case in CASES if case.name not in ("view", "original", "mixed", "autocast")]
"""Those left out differ in categories only; see ``test_tracker_categories``."""


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_tracker_sees_what_a_plain_run_allocates(case: Case, tmp_path: Path) -> None:
    """Tracker and profiler agree on every allocation that outlives its operator, to the byte.

    The profiler's clock decides what lived inside an operator, and gloo's threads free when they
    like: on a loaded machine a run may differ, so a second one decides.
    """

    def work(rank: int) -> tuple[list[Life], list[Life], set[int]]:
        lives, seen, sent = tracked(case)
        return lives, profiled(case, seen), sent

    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    if all(same_lives(case, *rank) for rank in on_ranks(work, folders[0])):
        return
    for ours, truth, sent in on_ranks(work, folders[1]):
        assert same_lives(case, ours, truth, sent)


def same_lives(case: Case, ours: list[Life], truth: list[Life], sent: set[int]) -> bool:
    """Whether both saw the same sizes in the same order in every phase, and the same deaths."""
    phases = {life[1] for life in truth} - {None}
    if len(phases) != 2 + 3 * (3 * case.accumulation + 1):
        return False
    for phase in sorted(phases):
        smallest = 5 if "wrap" in phase else 0  # FSDP1 makes a flag of 4 bytes in passing
        mine, theirs = (
            [x for x in lives if x[1] == phase and x[0] >= smallest] for lives in (ours, truth)
        )
        if [life[0] for life in mine] != [life[0] for life in theirs]:
            return False
        deaths = [(a, b) for a, b in zip(mine, theirs, strict=True) if a[0] not in sent]
        if [a for a, _ in deaths] != [b for _, b in deaths]:
            return False
    return True
