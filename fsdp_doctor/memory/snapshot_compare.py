"""Two snapshots side by side: by category and by the code that asked, at moments that match."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fsdp_doctor.memory.snapshot_analysis import analyse_view, load_view
from fsdp_doctor.memory.snapshot_categories import CATEGORIES
from fsdp_doctor.memory.snapshot_view import View
from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.model.snapshot import (
    CategoryChange,
    Moment,
    SnapshotAnalysis,
    SnapshotComparison,
    StackChange,
)

_LINE = re.compile(r":\d+ ")
_LIBRARY = ("torch/", "fsdp_doctor/")
MAX_STACKS = 200


@dataclass(slots=True)
class _Held:
    """What one piece of code holds at a moment."""

    category: Category
    subcategory: str | None
    phase: Phase
    operator: str | None
    frames: tuple[str, ...]
    bytes: int = 0
    count: int = 0


def compare_snapshots(
    path_a: Path,
    path_b: Path,
    *,
    rank_a: int | None = None,
    rank_b: int | None = None,
) -> SnapshotComparison:
    """Compare two snapshot files at matching moments.

    Raises:
        InputError: one of them cannot be read.
    """
    view_a = load_view(path_a)
    view_b = load_view(path_b)
    return compare_views(view_a, view_b, rank_a=rank_a, rank_b=rank_b)


def compare_views(
    view_a: View, view_b: View, *, rank_a: int | None = None, rank_b: int | None = None
) -> SnapshotComparison:
    """Compare two devices that were read."""
    a = analyse_view(view_a, rank=rank_a)
    b = analyse_view(view_b, rank=rank_b)
    aligned, moment_a, moment_b = _align(view_a, view_b, a, b)
    return SnapshotComparison(
        a=a,
        b=b,
        aligned=aligned,
        moment_a=moment_a,
        moment_b=moment_b,
        categories=_categories(view_a, view_b, moment_a, moment_b),
        stacks=_stacks(_held(view_a, moment_a.position), _held(view_b, moment_b.position)),
        warnings=(*(f"A: {w}" for w in a.warnings), *(f"B: {w}" for w in b.warnings)),
    )


def _align(
    view_a: View, view_b: View, a: SnapshotAnalysis, b: SnapshotAnalysis
) -> tuple[str, Moment, Moment]:
    """Moments that mean the same on both sides, and which they are."""
    if a.failure and b.failure:
        return "the request that failed, on both sides", a.failure, b.failure
    whole_a = {step.step for step in a.steps if step.complete}
    whole_b = {step.step for step in b.steps if step.complete}
    if not a.failure and not b.failure and whole_a & whole_b:
        step = max(whole_a & whole_b)
        return f"the peak of step {step}", _peak_of(view_a, step), _peak_of(view_b, step)
    for failed, other, view in ((a, whole_b, view_b), (b, whole_a, view_a)):
        if failed.failure is not None and other:
            known = failed.failure.step
            step = known if known in other else max(other)
            side, peer = ("A", "B") if failed is a else ("B", "A")
            text = f"{side}: the request that failed; {peer}: the peak of step {step}"
            text += f", {failed.failure.phase}" if _spans(view, step, failed.failure.phase) else ""
            peak = _peak_of(view, step, failed.failure.phase)
            pair = (failed.failure, peak) if failed is a else (peak, failed.failure)
            return text, *pair
    return "the highest moment of each side", a.focus, b.focus


def _peak_of(view: View, step: int, phase: Phase | None = None) -> Moment:
    """The peak of a step; of one of its phases where it has that."""
    spans = _spans(view, step, phase)
    begin, end = spans[-1] if spans else view.step_window(step)
    return view.moment("peak", view.peak_position(begin, end))


def _spans(view: View, step: int, phase: Phase | None) -> list[tuple[int, int]]:
    return [
        (span.begin, view.replay.end if span.end is None else span.end)
        for span in view.places.log.phases
        if span.step == step and span.phase is phase
    ]


def _categories(
    view_a: View, view_b: View, moment_a: Moment, moment_b: Moment
) -> tuple[CategoryChange, ...]:
    starts_a, starts_b = _at_start(view_a, moment_a), _at_start(view_b, moment_b)
    names = {*moment_a.categories, *moment_b.categories}
    rows = [
        CategoryChange(
            category=name,
            a_bytes=moment_a.categories.get(name, 0),
            b_bytes=moment_b.categories.get(name, 0),
            a_start_bytes=None if starts_a is None else starts_a.get(name, 0),
            b_start_bytes=None if starts_b is None else starts_b.get(name, 0),
        )
        for name in names
    ]
    return tuple(sorted(rows, key=lambda r: (-abs(r.b_bytes - r.a_bytes), -r.b_bytes, r.category)))


def _at_start(view: View, moment: Moment) -> dict[str, int] | None:
    """The categories when the moment's step began."""
    if moment.step is None:
        return None
    begin = view.step_window(moment.step)[0]
    column = view.categories_at(np.array([begin]))[:, 0].tolist()
    return {category.value: size for category, size in zip(CATEGORIES, column, strict=True)}


def _held(view: View, position: int) -> list[_Held]:
    """What each group of blocks holds at a position."""
    blocks, verdicts = view.replay.blocks, view.verdicts
    live = blocks.alive_at(position)
    pair = verdicts.group[live] * len(CATEGORIES) + verdicts.category[live]
    found, inverse = np.unique(pair, return_inverse=True)
    sizes = np.zeros(len(found), dtype=np.int64)
    np.add.at(sizes, inverse.reshape(-1), blocks.size[live] + blocks.rest[live])
    counts = np.bincount(inverse.reshape(-1), minlength=len(found))
    held = []
    for code, size, count in zip(found.tolist(), sizes.tolist(), counts.tolist(), strict=True):
        example = verdicts.groups[code // len(CATEGORIES)]
        category = CATEGORIES[code % len(CATEGORIES)]
        subcategory = example.subcategory if category is example.category else None
        held.append(
            _Held(
                category, subcategory, example.phase, example.operator, example.frames, size, count
            )
        )
    return held


def _stacks(a: list[_Held], b: list[_Held]) -> tuple[StackChange, ...]:
    """What changed, by stack without line numbers; what then has no partner, by the user's own
    frames alone (another version of a library has other frames of its own).
    """
    pairs = _matched(a, b, lambda h: (h.category, h.phase, h.operator, _plain(h.frames)))
    single_a = [p[0] for p in pairs if p[0] and not p[1]]
    single_b = [p[1] for p in pairs if p[1] and not p[0]]
    both = [p for p in pairs if p[0] and p[1]]
    again = _matched(
        [h for h in single_a if h], [h for h in single_b if h],
        lambda h: (h.category, h.phase, h.operator, _plain(h.frames)[:1], _own(_plain(h.frames))),
    )  # fmt: skip
    changes = [_change(*pair) for pair in (*both, *again)]
    changes = [change for change in changes if change.what != "same"]
    changes.sort(key=lambda c: (-abs(c.delta_bytes), c.category, c.frames))
    return tuple(changes[:MAX_STACKS])


def _matched(
    a: Iterable[_Held], b: Iterable[_Held], key: Callable[[_Held], Hashable]
) -> list[tuple[_Held | None, _Held | None]]:
    sides: list[dict[Hashable, _Held]] = [{}, {}]
    for side, items in zip(sides, (a, b), strict=True):
        for held in items:
            name = key(held)
            known = side.get(name)
            if known is None:
                side[name] = replace(held)
            else:
                known.bytes += held.bytes
                known.count += held.count
    first, second = sides
    return [(first.get(name), second.get(name)) for name in {**first, **second}]


def _plain(frames: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_LINE.sub(" ", frame) for frame in frames)


def _own(frames: tuple[str, ...]) -> tuple[str, ...]:
    """The user's own frames."""
    return tuple(frame for frame in frames if not frame.startswith(_LIBRARY))


def _change(a: _Held | None, b: _Held | None) -> StackChange:
    shown = b or a
    assert shown is not None
    return StackChange(
        category=shown.category,
        subcategory=shown.subcategory,
        phase=shown.phase,
        operator=shown.operator,
        frames=shown.frames,
        a_bytes=a.bytes if a else 0,
        b_bytes=b.bytes if b else 0,
        a_count=a.count if a else 0,
        b_count=b.count if b else 0,
    )
