"""The model of the caching allocator against real memory snapshots.

    python benchmarks/allocator_replay.py [SNAPSHOT.pickle ...] [-o docs/allocator-replay.md]

Without snapshots: all that were recorded on an H200, of whole steps (``allocator/snapshots/``) and
of jobs that ran out of memory (``tests/recorded/ooms/``).

Every allocation and completed free of the trace is given to the model by size and stream, under the
settings that the snapshot tells; the segments that it takes (mappings, where they are expandable)
and the bytes that it holds reserved after every allocation are set beside the recorded ones. What
was allocated before the trace began is adopted in segments of its own. Limits are not in a
snapshot: where segments were given back, the model gives everything back that it can.

The model invents addresses, and of blocks of one size the lowest is taken; so everything is played
again with each new segment at its recorded address, which leaves the rules alone to be tested.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from page import show

from fsdp_doctor.memory.caching_allocator import AllocatorSettings, Block, CachingAllocator
from fsdp_doctor.memory.expandable_segments import make_allocator
from fsdp_doctor.memory.snapshot_pickle import load
from fsdp_doctor.memory.snapshot_whatif import recorded_settings

HERE = Path(__file__).parent
SNAPSHOTS = ("benchmarks/allocator/snapshots/*.pickle.gz", "tests/recorded/ooms/*/*.pickle.gz")
TAKEN = ("segment_alloc", "segment_map")
GIVEN_BACK = ("segment_free", "segment_unmap")


@dataclass(slots=True)
class Played:
    """Counts of one device's trace."""

    events: int = 0
    segments: int = 0
    reserved: int = 0
    peak: int = 0
    largest_difference: int = 0
    blocks: dict[int, Block] = field(default_factory=dict)


class AtRecordedAddresses(CachingAllocator):
    """Takes segments where the trace says that they lay."""

    def __init__(self, settings: AllocatorSettings, older: list[int]) -> None:
        super().__init__(settings)
        self.addresses = older
        """Of the segments to come, the next one last."""

    def _new_address(self, size: int) -> int:
        return self.addresses.pop() if self.addresses else super()._new_address(size)


def play(
    trace: list[dict[str, Any]],
    older: list[dict[str, Any]],
    settings: AllocatorSettings,
    *,
    recorded_addresses: bool = False,
) -> tuple[Played, Played]:
    """Return (recorded, modelled). Addresses make no difference to expandable segments."""
    allocator = make_allocator(settings)
    if recorded_addresses and not settings.expandable_segments:
        addresses = [segment["address"] for segment in older]
        addresses += [event["addr"] for event in trace if event["action"] == "segment_alloc"]
        allocator = AtRecordedAddresses(settings, addresses[::-1])
    recorded, modelled = Played(), Played()
    for segment in older:
        adopt(allocator, segment, trace, modelled.blocks)
        recorded.reserved += segment["total_size"]
    action = ""
    for event in trace:
        before, action = action, event["action"]
        recorded.events += 1
        if action == "alloc":
            block = allocator.allocate(event["size"], event["stream"])
            modelled.blocks[event["addr"]] = block
            modelled.peak = max(modelled.peak, allocator.reserved_bytes)
            difference = abs(allocator.reserved_bytes - recorded.reserved)
            recorded.largest_difference = max(recorded.largest_difference, difference)
        elif action == "free_completed" and event["addr"] in modelled.blocks:
            allocator.free(modelled.blocks.pop(event["addr"]))
        elif action in TAKEN:
            recorded.segments += 1
            recorded.reserved += event["size"]
            recorded.peak = max(recorded.peak, recorded.reserved)
        elif action in GIVEN_BACK:
            recorded.reserved -= event["size"]
            if before not in GIVEN_BACK:
                allocator.release_cached()
    modelled.segments = allocator.segment_allocations
    modelled.reserved = allocator.reserved_bytes
    return recorded, modelled


def adopt(
    allocator: CachingAllocator,
    segment: dict[str, Any],
    trace: list[dict[str, Any]],
    blocks: dict[int, Block],
) -> None:
    """Give the allocator a segment that is older than the trace; note its used blocks."""
    pieces = at_start(segment, trace)
    adopted = allocator.adopt(
        segment["total_size"], segment["stream"], [(size, size, used) for _, size, used in pieces]
    )
    for block, (address, _, used) in zip(adopted, pieces, strict=True):
        if used:
            blocks[address] = block


def taken_in(trace: list[dict[str, Any]], address: int) -> bool:
    """Whether the memory at an address was taken from the GPU within the trace.

    A segment that can expand may begin amid a mapping at the end: what lay before was given back.
    """
    return any(
        event["addr"] <= address < event["addr"] + event["size"]
        for event in trace
        if event["action"] in TAKEN
    )


def at_start(segment: dict[str, Any], trace: list[dict[str, Any]]) -> list[tuple[int, int, bool]]:
    """Return a segment's pieces before the trace: (address, size, used).

    Used was what the trace frees without having made it, and what is used at the end and was not
    made in the trace.
    """
    begin, end = segment["address"], segment["address"] + segment["total_size"]
    used: dict[int, int] = {}
    made: set[int] = set()
    for event in trace:
        if begin <= event.get("addr", -1) < end:
            if event["action"] == "alloc":
                made.add(event["addr"])
            elif event["action"] == "free_completed" and event["addr"] not in made:
                used.setdefault(event["addr"], event["size"])
    for block in segment["blocks"]:
        if block["state"] != "inactive" and block["address"] not in made:
            used[block["address"]] = block["size"]
    pieces, position = [], begin
    for address in sorted(used):
        if address > position:
            pieces.append((position, address - position, False))
        size = -(-used[address] // 512) * 512
        pieces.append((address, size, True))
        position = address + size
    if position < end:
        pieces.append((position, end - position, False))
    return pieces


@dataclass(frozen=True, slots=True)
class Row:
    """One device's trace, played with invented and with recorded addresses."""

    name: str
    conf: str
    real: Played
    model: Played
    rules: tuple[Played, Played]
    """(recorded, modelled) with recorded addresses."""

    @property
    def exact(self) -> bool:
        """Whether reserved bytes were equal after every allocation."""
        return not self.real.largest_difference and self.real.segments == self.model.segments

    @property
    def rules_exact(self) -> bool:
        """The same, with recorded addresses."""
        real, model = self.rules
        return not real.largest_difference and real.segments == model.segments

    def cells(self) -> list[str]:
        """Return a line of the table."""
        real, model = self.real, self.model
        most, other = real.largest_difference, self.rules[0].largest_difference
        return [
            self.name,
            self.conf or "-",
            f"{real.events:,}",
            f"{real.segments}, {model.segments}",
            f"{real.peak:,}",
            f"{model.peak - real.peak:+,}" if model.peak != real.peak else "0",
            f"{most:,} ({most / real.peak:.2%})" if most else "0",
            f"{other:,} ({other / real.peak:.2%})" if other else "0",
        ]


def rows(path: Path) -> Iterator[Row]:
    """Play every device of a snapshot."""
    with path.open("rb") as file:
        snapshot, _ = load(file)
    settings = recorded_settings(snapshot.get("allocator_settings", {}))
    conf = snapshot.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF") or ""
    name = path.parent.name if path.name == "snapshot.pickle.gz" else path.name.partition(".")[0]
    for device, trace in enumerate(snapshot["device_traces"]):
        if not trace:
            continue
        segments = [s for s in snapshot["segments"] if s.get("device", 0) == device]
        older = [s for s in segments if not taken_in(trace, s["address"])]
        real, model = play(trace, older, settings)
        yield Row(name, conf, real, model, play(trace, older, settings, recorded_addresses=True))


def table(found: list[Row]) -> str:
    """Return the Markdown text: how many are exact, then each."""
    taken = sum(row.real.segments for row in found)
    lines = [
        f"{len(found)} traces, {taken:,} segments or mappings taken. Their number, and reserved "
        f"bytes after every allocation, are equal in {sum(row.exact for row in found)}; with "
        f"recorded addresses in {sum(row.rules_exact for row in found)}.",
        "",
        "| trace | settings | events | taken: real, model | peak reserved, bytes | model's | "
        "largest difference at any time | with recorded addresses |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [f"| {' | '.join(row.cells())} |" for row in found]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print one line for each device with a trace."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("snapshots", nargs="*", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="document whose table is written anew")
    chosen = parser.parse_args()
    paths = chosen.snapshots or [p for glob in SNAPSHOTS for p in sorted(HERE.parent.glob(glob))]
    text = table([row for path in paths for row in rows(path)])
    show(text, chosen.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
