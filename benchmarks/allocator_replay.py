"""The model of the caching allocator against real memory snapshots.

    python benchmarks/allocator_replay.py SNAPSHOT.pickle ...

Every allocation and completed free of the trace is given to the model by size and stream, under the
settings that the snapshot tells; the segments that it takes (mappings, where they are expandable)
and the bytes that it holds reserved after every allocation are set beside the recorded ones. What
was allocated before the trace began is adopted in segments of its own. Limits are not in a
snapshot: where segments were given back, the model gives everything back that it can.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_doctor.memory.caching_allocator import AllocatorSettings, Block
from fsdp_doctor.memory.expandable_segments import make_allocator
from fsdp_doctor.memory.snapshot_child import load
from fsdp_doctor.memory.snapshot_whatif import recorded_settings

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


def play(
    trace: list[dict[str, Any]], older: list[dict[str, Any]], settings: AllocatorSettings
) -> tuple[Played, Played]:
    """Return (recorded, modelled)."""
    allocator = make_allocator(settings)
    recorded, modelled = Played(), Played()
    for segment in older:
        pieces = at_start(segment, trace)
        adopted = allocator.adopt(
            segment["total_size"],
            segment["stream"],
            [(size, size, used) for _, size, used in pieces],
        )
        for block, (address, _, used) in zip(adopted, pieces, strict=True):
            if used:
                modelled.blocks[address] = block
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


def main() -> int:
    """Print one line for each device with a trace."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("snapshots", nargs="+", type=Path)
    print("snapshot | events | segments: real, model | peak reserved: real, model | largest error")
    for path in parser.parse_args().snapshots:
        with path.open("rb") as file:
            snapshot, _ = load(file)
        for device, trace in enumerate(snapshot["device_traces"]):
            if not trace:
                continue
            made = {e["addr"] for e in trace if e["action"] in TAKEN}
            segments = [s for s in snapshot["segments"] if s.get("device", 0) == device]
            older = [s for s in segments if s["address"] not in made]
            settings = recorded_settings(snapshot.get("allocator_settings", {}))
            real, model = play(trace, older, settings)
            error = model.peak / real.peak - 1
            most = real.largest_difference
            print(
                f"{path.name} | {real.events} | {real.segments}, {model.segments} | "
                f"{real.peak:,}, {model.peak:,} ({error:+.3%}) | {most:,} ({most / real.peak:.3%})"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
