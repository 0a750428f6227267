"""Large snapshots are read without the unpickler where their form allows it: with equal results."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import snapshot_maker as maker
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_snapshot_hostile import HOSTILE, P4, Reduced, bombs, text

from fsdp_doctor.errors import InputError
from fsdp_doctor.memory.snapshot_columns import Reader, reduce_snapshot
from fsdp_doctor.memory.snapshot_merge import MergingReader
from fsdp_doctor.memory.snapshot_pickle import load
from fsdp_doctor.memory.snapshot_reader import ReadLimits, read_snapshot
from fsdp_doctor.memory.snapshot_shorten import load_shortened
from fsdp_doctor.memory.snapshot_walk import UnfitError, Walk, find_layout

ALL_LARGE = ReadLimits(large_bytes=0)
REAL = Path(__file__).parents[3] / "shared" / "snapshots"


def result(header: dict[str, Any], reader: Reader) -> dict[str, Any]:
    """What is told of a snapshot; streams and pools by themselves, whatever their numbers are."""
    found = {key: value for key, value in header.items() if key not in ("streams", "pools")}
    for name, code, values in reader.arrays:
        column = np.frombuffer(values, code).tolist() if len(values) else []
        kind = name.rpartition("/")[2]
        if kind in ("stream", "pool"):
            column = [header[f"{kind}s"][number] for number in column]
        found[name] = column
    return found


def by_unpickler(data: bytes) -> dict[str, Any]:
    """A snapshot as the unpickler builds it."""
    reader = Reader()
    return result(reduce_snapshot(*load(io.BytesIO(data)), reader), reader)


def by_rows(data: bytes) -> tuple[dict[str, Any], int]:
    """A snapshot of whose traces rows of events are read as columns; and how many were."""
    walk = Walk(data)
    snapshot, used, events = load_shortened(walk, find_layout(walk))
    reader = MergingReader(events)
    header = reduce_snapshot(snapshot, used, reader)
    reader.check()
    return result(header, reader), sum(run.count for run in events.runs)


def same(data: bytes) -> int | None:
    """Both ways agree, or the one by rows is not for this file (None); else how many it read."""
    try:
        found, count = by_rows(data)
    except Exception:  # noqa: BLE001 (whatever is wrong: the file is read as a whole)
        return None
    assert found == by_unpickler(data)
    return count


KEYS = ("action", "addr", "size", "stream", "time_us", "compile_context", "user_metadata", "frames")


def job(steps: int) -> dict[str, Any]:
    """A job's snapshot as torch writes it: all events have the same keys."""
    snapshot = maker.training(steps, layers=4).snapshot()
    trace = [{"frames": [], **event} for event in snapshot["device_traces"][0]]
    snapshot["device_traces"][0] = [{key: event[key] for key in KEYS} for event in trace]
    return snapshot


POOL = [{"name": f"f{i}", "filename": f"/torch/m{i}.py", "line": i} for i in range(300)]
POOL.append({"name": "at::_ops::add::call(at::Tensor)", "filename": "??", "line": 0})
SIZES = (0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**40 + 1)


class Events:
    """Random events of one torch version, with shared and new objects and some odd ones."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.version = chance, chance.randrange(5)
        self.stacks = [chance.choices(POOL, k=chance.randrange(1, 9)) for _ in range(6)]
        self.lists: list[list[Any]] = [[]]
        self.new_texts, self.new_lists = chance.random() < 0.7, chance.random()
        self.odd = chance.choice((0.0, 0.02, 0.3))

    def event(self, number: int) -> dict[str, Any]:
        """One event."""
        pick = self.chance.choice
        entry: dict[str, Any] = {
            "action": pick(("alloc", "alloc", "free_requested", "free_completed")),
            "addr": (1 << 46) + self.chance.randrange(1 << 20) * 512,
            "size": pick(SIZES),
            "stream": pick((0, 0, 0, 94_000_000_000_000)),
        }
        if self.version > 0:
            entry["time_us"] = 1_750_000_000_000_000 + number
        if self.version > 1:
            entry["compile_context"] = self.text(pick(("N/A", "N/A", "0/1", "")))
            entry["user_metadata"] = self.text(pick(("", "", "step 7, a longer text")))
        if self.version > 2:
            entry["pool_id"] = (0, self.chance.randrange(2)) if self.version > 3 else (0, 0)
        entry["frames"] = self.frames()
        return self.strange(entry) if self.chance.random() < self.odd else entry

    def text(self, value: str) -> str:
        """A text, new or shared."""
        return "".join(list(value)) if self.new_texts else value

    def frames(self) -> list[Any]:
        """A list of frames, new or one of the last."""
        if self.chance.random() > self.new_lists:
            return self.chance.choice(self.lists[-5:])
        self.lists.append(list(self.chance.choice([*self.stacks, []])))
        return self.lists[-1]

    def strange(self, entry: dict[str, Any]) -> dict[str, Any]:
        """An event of another form."""
        chance = self.chance
        changes: list[dict[str, Any]] = [
            {"addr": (1 << 64) - chance.randrange(1, 1 << 12)},
            {"size": -chance.choice((1, 1 << 20, 1 << 40))},
            {"user_metadata": chance.choice(("Größe", "x" * 300, "}\x94(h", None, True))},
            {"pool_id": chance.choice(((1, 1 << 40), (3, 4), None))},
            {"frames": chance.choice(([chance.choice(POOL)], None))},
            {"action": "snapshot"},
            {"more": {"nested": [1, 2.5, (True, None)]}},
        ]
        kind = chance.randrange(len(changes) + 3)
        if kind < len(changes):
            return {**entry, **changes[kind]}
        if kind == len(changes):
            entry["action"], entry["device_free"] = "oom", entry.pop("addr")
        elif kind == len(changes) + 1:
            entry.pop(chance.choice(("frames", "stream", "addr", "size")))
        return dict(sorted(entry.items())) if chance.random() < 0.3 else entry


def random_snapshot(chance: random.Random) -> dict[str, Any]:
    """A snapshot of any torch version."""
    made = Events(chance)
    count = chance.choice((0, 3, 40, 300))
    traces = [
        [made.event(number) for number in range(count)] for _ in range(chance.randrange(1, 4))
    ]
    block = {"address": 1 << 40, "size": 512, "requested_size": 9, "state": "active_allocated"}
    shared = chance.choice(made.lists)
    blocks = [{**block, "frames": frames} for frames in (shared, list(shared))]
    segment = {"device": 0, "address": 1 << 40, "total_size": 1 << 21, "blocks": blocks}
    snapshot: dict[str, Any] = {"segments": [segment], "device_traces": traces}
    if chance.random() < 0.3:
        snapshot = dict(reversed(snapshot.items()))
    if made.version > 1:
        note = {"name": "Optimizer.step#SGD.step", "stage": "START", "device": 0, "time_us": 5}
        snapshot["external_annotations"] = [note, {**note, "stage": "END"}]
        snapshot["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1}
    return snapshot


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 32), protocol=st.sampled_from((0, 1, 2, 3, 4, 4, 4, 5, 5)))
@example(seed=0, protocol=4)
def test_both_ways_read_the_same(seed, protocol):
    """Random snapshots in all protocols give equal columns, stacks and headers."""
    same(pickle.dumps(random_snapshot(random.Random(seed)), protocol=protocol))


@pytest.mark.parametrize("protocol", [4, 5])
def test_regular_events_are_read_as_rows(protocol):
    """Of a job's events nearly all are in rows, with every stack, size and time right."""
    data = pickle.dumps(job(40), protocol=protocol)
    whole = by_unpickler(data)
    assert same(data) > 0.9 * len(whole["trace/0/action"])
    assert len(data) > 1 << 16  # more than one FRAME


def test_random_snapshots_are_read_as_rows():
    """The random snapshots above do try the rows: many files and events are read so."""
    counts = [
        same(pickle.dumps(random_snapshot(random.Random(seed)), protocol=4)) for seed in range(80)
    ]
    assert sum(count is not None for count in counts) > 30
    assert sum(count or 0 for count in counts) > 8000


@pytest.mark.parametrize("name", ["ddp", "ddp_oom", "fsdp2", "fsdp2_oom"])
@pytest.mark.skipif(not REAL.is_dir(), reason="real snapshots are not beside the checkout")
def test_real_snapshots_are_read_as_rows(name):
    """Snapshots of torch 2.11: nearly all events are in rows."""
    data = (REAL / f"{name}.pickle").read_bytes()
    assert same(data) > 0.97 * len(by_unpickler(data)["trace/0/action"])


@pytest.mark.parametrize("suffix", [".pickle", ".pickle.gz"])
def test_the_command_reads_large_files_so(suffix, tmp_path):
    """The whole way through the process of its own: the same snapshot, plain and gzip."""
    path = maker.write(job(30), tmp_path / f"s{suffix}")
    one, other = read_snapshot(path), read_snapshot(path, ALL_LARGE)
    assert one.stacks == other.stacks
    assert one.size_bytes == other.size_bytes
    for name in ("action", "addr", "size", "time", "stream", "pool", "stack"):
        assert (getattr(one.traces[0], name) == getattr(other.traces[0], name)).all(), name


def events(count: int, **more: Any) -> list[dict[str, Any]]:
    """Regular events without frames."""
    return [{"action": "alloc", "addr": 512 * n, "size": 1 + n, **more} for n in range(count)]


def crafted() -> dict[str, bytes]:
    """Files made to mislead: what looks like rows of events is something else, or is used twice."""
    trace = events(30)
    stack = [{"name": "f", "filename": "a.py", "line": 1}]
    listed = events(30, frames=stack)
    unlisted = listed + events(9, frames=listed[5])
    inner = pickle.dumps(events(30), protocol=4)[11:]
    base = {"segments": [], "device_traces": [trace]}
    plain = pickle.dumps(base, protocol=4)
    row = plain.index(b"}\x94(h", plain.index(b"action") + 20)
    rows = {
        "events as text": {**base, "allocator_settings": {"a": inner.decode("latin-1")}},
        "events as bytes": {**base, "allocator_settings": {"a": inner}},
        "an event twice": {"segments": [], "device_traces": [[*trace, trace[9], trace[20]]]},
        "the trace twice": {"segments": [], "device_traces": [trace, trace]},
        "events as segments": {"segments": events(30), "device_traces": [trace]},
        "events as notes": {**base, "external_annotations": events(20)},
        "events as settings": {**base, "allocator_settings": {"x": events(20)}},
        "events in a tuple": {"segments": [], "device_traces": [[tuple(events(9)), *trace]]},
        "an event as frames": {"segments": [], "device_traces": [unlisted]},
        "a note is an event": {**base, "external_annotations": [trace[7]]},
        "an action is a list": {"segments": [], "device_traces": [[*trace, {"action": []}]]},
        "a number as an event": {"segments": [], "device_traces": [[*trace, 0, *events(9)]]},
    }  # fmt: skip
    return {
        **{name: pickle.dumps(value, protocol=4) for name, value in rows.items()},
        "a persistent id": plain[:row] + b"J\0\0\0\0Q" + plain[row:],
        "a persistent id at the end": plain[:-2] + b"\x8c\x01aJ\0\0\0\0Qu.",
        "POP": plain[:row] + b"N0" + plain[row:],
        "DUP": plain[:row] + b"N20" + plain[row:],
        "PUT": plain[:row] + b"Nq\x010" + plain[row:],
        "a memo number of later": plain.replace(b"}\x94(h", b"}\x94(j\xff\xff\0\0h", 9),
        "trailing events": plain + plain[row : row + 200],
        "a FRAME too long": P4 + b"\x95" + struct.pack("<Q", 1 << 40) + plain[11:],
        "a FRAME too short": P4 + b"\x95" + struct.pack("<Q", 7) + plain[11:],
        "no STOP": plain[:-1],
    }


@pytest.mark.parametrize("name", crafted())
def test_crafted_file_is_read_the_same(name):
    """A file that is made to mislead gives what the unpickler gives, or is left to it."""
    same(crafted()[name])


@pytest.mark.parametrize("name", [*HOSTILE, *bombs()])
def test_hostile_file_is_no_row_of_events(name):
    """What the unpickler refuses is never read as rows."""
    data = HOSTILE.get(name) or bombs()[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011 (UnfitError, or the reader's own)
        by_rows(data + b"." * 300)
    assert not isinstance(caught.value, AssertionError)


def test_call_behind_regular_events_is_refused(tmp_path, monkeypatch):
    """A large file that hides a call among its events is refused, and nothing is executed."""
    monkeypatch.chdir(tmp_path)
    snapshot = job(30)
    snapshot["device_traces"][0].append({"action": Reduced(eval, "open('canary', 'w')")})
    path = maker.write(snapshot, tmp_path / "evil.pickle")
    with pytest.raises(InputError, match=r"builtins\.eval"):
        read_snapshot(path, ALL_LARGE)
    body = P4 + text("posix") + text("system") + b"\x93" + text("touch canary") + b"\x85R."
    path.write_bytes(pickle.dumps(snapshot["segments"], protocol=4)[:-1] + body)
    with pytest.raises(InputError, match=r"posix\.system"):
        read_snapshot(path, ALL_LARGE)
    assert [p.name for p in tmp_path.iterdir()] == ["evil.pickle"]


def test_damaged_files_are_read_the_same():
    """Cut at 200 random places, 600 times with wrong bytes: what rows give, the unpickler gives."""
    whole = pickle.dumps(job(6), protocol=4)
    chance = random.Random(5)
    for _ in range(200):
        with pytest.raises(UnfitError):
            by_rows(whole[: chance.randrange(len(whole))])
    read = 0
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        read += same(bytes(data)) is not None
    assert read > 50


def test_a_size_that_gzip_understates_is_read_as_a_whole(tmp_path):
    """A gzip file with a wrong size at its end is read, by the unpickler."""
    data = pickle.dumps(job(30), protocol=4)
    path = tmp_path / "s.pickle.gz"
    path.write_bytes(gzip.compress(data, mtime=0)[:-4] + b"\x01\0\0\0")
    with pytest.raises(InputError):
        read_snapshot(path, ALL_LARGE)
