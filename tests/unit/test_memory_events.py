"""The event log and what is read from it: exact integers, whatever the order of events."""

# ruff: noqa: D103 - the names say it

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_doctor.memory import EventLog, Label, analyse, build_anatomy
from fsdp_doctor.memory.events import Allocation, stronger
from fsdp_doctor.memory.timeline import (
    alive,
    by_category,
    fold_layers,
    level_curve,
    top_allocations,
)
from fsdp_doctor.model.memory import Category, Phase

PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
ACTION = st.one_of(
    st.tuples(st.just("alloc"), st.integers(1, 10**12)),
    st.tuples(st.just("free"), st.integers(0, 50)),
    st.tuples(st.just("resize"), st.integers(0, 50)),
    st.tuples(st.just("phase"), st.integers(0, 3)),
    st.tuples(st.just("enter"), st.integers(0, 3)),
    st.tuples(st.just("leave"), st.integers(0, 3)),
)


def play(actions: list[tuple[str, int]]) -> EventLog:
    """A log of one step from random actions (those that make no sense are skipped)."""
    log = EventLog()
    log.begin_phase(0, Phase.DATA)
    live: list[Allocation] = []
    for action, number in actions:
        if action == "alloc":
            live.append(log.allocate(number, size_bytes=-(-number // 512) * 512))
        elif action == "phase":
            log.begin_phase(0, PHASES[number])
        elif action == "enter":
            log.enter_module(f"layer.{number}" if number else "")
        elif action == "leave":
            log.leave_module(f"layer.{number}" if number else "")
        elif live:
            chosen = live.pop(number % len(live))
            if action == "free":
                log.free(chosen)
            else:
                live.append(log.resize(chosen, number + 1))
    log.end_phase()
    return log


@given(st.lists(ACTION, max_size=120))
def test_categories_sum_to_every_peak(actions: list[tuple[str, int]]) -> None:
    log = play(actions)
    curve = level_curve(log)
    memory = analyse(log, 0)
    for span in log.phases:
        end = span.end
        assert end is not None
        assert memory.phases[span.phase].peak_bytes >= max(curve[span.begin : end + 1])
    anatomy = build_anatomy(log, 0, source="fake")
    assert anatomy.peak_allocated_bytes == max(curve)
    assert sum(anatomy.categories.values()) == anatomy.peak_allocated_bytes
    assert sum(top.bytes for top in anatomy.top_allocations) <= anatomy.peak_allocated_bytes
    for phase in anatomy.phases.values():
        assert sum(phase.categories.values()) == phase.peak_allocated_bytes
    assert sum(anatomy.resident.values()) == curve[-1] == log.current_bytes
    assert anatomy.events == log.position


@given(st.lists(ACTION, max_size=120))
def test_a_position_is_a_prefix(actions: list[tuple[str, int]]) -> None:
    log = play(actions)
    curve = level_curve(log)
    for position in range(log.position + 1):
        assert sum(a.size_bytes for a in alive(log, position)) == curve[position]


def test_measured_peak_overrules() -> None:
    """The device's peak counts; what large blocks can hold unsplit is rounding, more is told."""
    log = EventLog()
    log.begin_phase(0, Phase.FORWARD)
    large = (1 << 20) + 512
    log.allocate(large - 100, size_bytes=large)
    log.end_phase()
    unsplit = {"forward": large + (1 << 20)}
    more = build_anatomy(log, 0, source="cuda_history", measured_peak_bytes=unsplit)
    assert more.categories == {"activations": large, "rounding": 1 << 20}
    assert more.incomplete is None
    beyond = {"forward": large + (1 << 20) + 512}
    assert build_anatomy(log, 0, source="cuda_history", measured_peak_bytes=beyond).incomplete
    below = {"forward": large - 24}
    less = build_anatomy(log, 0, source="cuda_history", measured_peak_bytes=below)
    assert less.categories == {"activations": large}
    assert less.incomplete == "forward: the device counted 24 bytes less than the history"
    huge = build_anatomy(log, 0, source="cuda_history", measured_peak_bytes={"forward": 1 << 40})
    assert huge.incomplete is not None
    assert sum(huge.categories.values()) == 1 << 40


def test_microbatches_merge() -> None:
    log = EventLog()
    for micro, size in enumerate((10, 30, 20)):
        log.begin_phase(1, Phase.FORWARD, micro)
        block = log.allocate(size)
        if micro:
            log.free(block)
        log.end_phase()
    forward = build_anatomy(log, 1, source="fake").phases["forward"]
    assert (forward.peak_allocated_bytes, forward.end_allocated_bytes) == (40, 10)


def test_a_block_dies_once() -> None:
    log = EventLog()
    block = log.allocate(1)
    log.free(block)
    with pytest.raises(ValueError, match="freed before"):
        log.free(block)


def test_resize_needs_both_blocks_for_a_moment() -> None:
    log = EventLog()
    log.begin_phase(0, Phase.DATA)
    block = log.allocate(100)
    block.label = Label(Category.BUFFERS)
    new = log.resize(block, 300)
    assert (log.current_bytes, log.peak_bytes) == (300, 400)
    assert new.label == block.label


def test_an_unobserved_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="not observed"):
        build_anatomy(EventLog(), 3, source="fake")


@pytest.mark.parametrize(
    ("module", "folded"),
    [
        ("blocks.3.attention", "blocks.*.attention"),
        ("blocks.31", "blocks.*"),
        ("0.weight", "*.weight"),
        ("norm1", "norm1"),
        (None, None),
    ],
)
def test_layers_fold(module: str | None, folded: str | None) -> None:
    assert fold_layers(module) == folded


def test_equal_layers_are_one_group() -> None:
    log = EventLog()
    log.begin_phase(0, Phase.FORWARD)
    for layer in range(3):
        log.enter_module(f"blocks.{layer}.ffn")
        log.allocate(10, operator="aten.mm.default", frames=("train.py:3 forward",))
        log.leave_module(f"blocks.{layer}.ffn")
    (top,) = top_allocations(alive(log, log.position))
    assert (top.bytes, top.count, top.module) == (30, 3, "blocks.*.ffn")
    assert by_category(alive(log, log.position)) == {"activations": 30}


def test_the_longer_lived_owner_wins() -> None:
    assert stronger(Label(Category.PARAMETERS), Label(Category.UNSHARDED_PARAMETERS))
    assert not stronger(Label(Category.INPUTS), Label(Category.GRADIENTS))
    assert stronger(Label(Category.INPUTS), None)
