"""One device of a snapshot, replayed and classified: what the analyses below ask questions of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from fsdp_doctor.memory.events import Allocation
from fsdp_doctor.memory.snapshot_categories import CATEGORIES, Verdicts, block_at, categorise
from fsdp_doctor.memory.snapshot_phases import Places, find_places
from fsdp_doctor.memory.snapshot_reader import Ints, Snapshot
from fsdp_doctor.memory.snapshot_replay import Replay, replay
from fsdp_doctor.memory.timeline import top_allocations
from fsdp_doctor.model.memory import Category, Phase, TopAllocation
from fsdp_doctor.model.snapshot import Moment, StepSummary, Timeline

SAMPLES = 400
CATEGORY_NUMBER = {category: number for number, category in enumerate(CATEGORIES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A device of a snapshot and everything derived from it."""

    snapshot: Snapshot
    replay: Replay
    places: Places
    verdicts: Verdicts

    def block(self, index: int) -> Allocation:
        """One block, classified."""
        return block_at(self.snapshot, self.replay, self.places, self.verdicts, index)

    def tops(self, indexes: Ints, limit: int = 40) -> tuple[TopAllocation, ...]:
        """The blocks of these indexes by the code that asked for them."""
        return top_allocations((self.block(index) for index in indexes.tolist()), limit)

    def categories_at(self, positions: Ints) -> Ints:
        """Bytes of every category (row) at every position (column); positions ascend."""
        blocks = self.replay.blocks
        count = len(positions)
        sums = np.zeros((len(CATEGORIES), count + 1), dtype=np.int64)
        rounding = CATEGORY_NUMBER[Category.ROUNDING]
        lived = blocks.died >= 0
        enters = np.searchsorted(positions, blocks.born[lived], "right")
        leaves = np.searchsorted(positions, blocks.died[lived], "right")
        category = self.verdicts.category[lived]
        rows = (
            (category, blocks.size[lived]),
            (np.full_like(category, rounding), blocks.rest[lived]),
        )
        for row, sizes in rows:
            # float64 holds these sums exactly: they stay below 2**53
            for sign, column in ((1, enters), (-1, leaves)):
                flat = np.bincount(row * (count + 1) + column, sizes, sums.size)
                sums += sign * flat.astype(np.int64).reshape(sums.shape)
        return np.cumsum(sums, axis=1)[:, :count]

    def moment(
        self, name: Literal["peak", "failure", "end"], position: int, *, tops: bool = True
    ) -> Moment:
        """Everything about one position."""
        place = self.places.at(position - 1 if name == "peak" and position else position)
        column = self.categories_at(np.array([position]))[:, 0]
        named = {c.value: int(column[n]) for c, n in CATEGORY_NUMBER.items() if column[n]}
        return Moment(
            name=name,
            position=position,
            time_s=self.time_s(position),
            step=place.step if place.step >= 0 else None,
            phase=place.phase,
            unit=self.places.unit_at(max(position - 1, 0)),
            allocated_bytes=int(self.replay.allocated[position]),
            active_bytes=int(self.replay.active[position]),
            reserved_bytes=int(self.replay.reserved[position]),
            categories=dict(sorted(named.items(), key=lambda item: (-item[1], item[0]))),
            top_allocations=self.tops(self.replay.blocks.alive_at(position)) if tops else (),
        )

    def time_s(self, position: int) -> float | None:
        """Seconds since the first entry."""
        times = self.replay.trace.time
        if not self.snapshot.has_time or not len(times):
            return None
        return int(times[min(position, len(times) - 1)] - times[0]) / 1e6

    def peak_position(self, begin: int = 0, end: int | None = None) -> int:
        """The first position of the largest allocated memory in a window."""
        return begin + int(self.replay.allocated[begin : None if end is None else end + 1].argmax())

    def steps(self) -> list[StepSummary]:
        """The steps that were recognised, in order."""
        spans: dict[int, list[tuple[int, int, Phase]]] = {}
        for span in self.places.log.phases:
            if span.step >= 0:
                end = self.replay.end if span.end is None else span.end
                spans.setdefault(span.step, []).append((span.begin, end, span.phase))
        return [self._step(step, parts) for step, parts in sorted(spans.items())]

    def _step(self, step: int, parts: list[tuple[int, int, Phase]]) -> StepSummary:
        begin, end = parts[0][0], parts[-1][1]
        peak = self.peak_position(begin, end)
        return StepSummary(
            step=step,
            peak_allocated_bytes=int(self.replay.allocated[peak]),
            peak_reserved_bytes=int(self.replay.reserved[begin : end + 1].max()),
            peak_phase=self.places.at(max(peak - 1, begin)).phase,
            start_allocated_bytes=int(self.replay.allocated[begin]),
            complete=parts[-1][2] is Phase.OPTIMIZER and end < self.replay.end,
        )

    def step_window(self, step: int) -> tuple[int, int]:
        """First and last position of a step."""
        own = [span for span in self.places.log.phases if span.step == step]
        end = own[-1].end
        return own[0].begin, self.replay.end if end is None else end

    def timeline(self, marked: int) -> Timeline | None:
        """The categories over the steps around ``marked``, or over the whole trace."""
        if not self.replay.end:
            return None
        begin, end = self._window(marked)
        positions = self._samples(begin, end, marked)
        sums = self.categories_at(positions)
        used = [n for n in range(len(CATEGORIES)) if sums[n].any()]
        times = [self.time_s(position) for position in positions.tolist()]
        return Timeline(
            positions=tuple(positions.tolist()),
            times_s=None if None in times else tuple(t for t in times if t is not None),
            categories={CATEGORIES[n].value: tuple(sums[n].tolist()) for n in used},
            active_bytes=tuple(self.replay.active[positions].tolist()),
            reserved_bytes=tuple(self.replay.reserved[positions].tolist()),
            phases=self._phases(positions),
            marked=int(np.searchsorted(positions, marked)),
        )

    def _window(self, marked: int) -> tuple[int, int]:
        """The step of the moment and the two before it."""
        step = self.places.at(max(marked - 1, 0)).step
        if step < 0:
            return 0, self.replay.end
        steps = sorted({s.step for s in self.places.log.phases if 0 <= s.step <= step})[-3:]
        begin, end = self.step_window(steps[0])[0], self.step_window(step)[1]
        if end == self.replay.end:  # what a failure lets go of is not the story
            end = min(end, marked + max((marked - begin) // 10, 1))
        return begin, max(end, marked)

    def _samples(self, begin: int, end: int, marked: int) -> Ints:
        """Of every bin the position of its maximum, and where the phases begin."""
        edges = np.unique(np.linspace(begin, end + 1, SAMPLES + 1).astype(np.int64))
        curve = self.replay.allocated
        tops = [int(low) + int(curve[low:high].argmax()) for low, high in pairwise(edges)]
        borders = [s.begin for s in self.places.log.phases if begin <= s.begin <= end]
        return np.unique(np.array([begin, *tops, *borders[:SAMPLES], marked, end]))

    def _phases(self, positions: Ints) -> tuple[tuple[int, int, int, Phase], ...]:
        found = []
        for span in self.places.log.phases:
            end = self.replay.end if span.end is None else span.end
            low, high = np.searchsorted(positions, (span.begin, end)).tolist()
            high = min(high, len(positions) - 1)
            if low < high and span.begin >= positions[0]:
                found.append((low, high, span.step, span.phase))
        return tuple(found)


def view_device(snapshot: Snapshot, device: int) -> View:
    """Replay and classify one device of a snapshot."""
    replayed = replay(snapshot, device)
    places = find_places(snapshot, replayed)
    return View(
        snapshot=snapshot,
        replay=replayed,
        places=places,
        verdicts=categorise(snapshot, replayed, places),
    )
