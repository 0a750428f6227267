"""Files that are no snapshots, and pickles that want to be more than data."""

from __future__ import annotations

import gzip
import os
import pickle
import random
import re
import struct
import time
from functools import cache
from pathlib import Path

import pytest
import snapshot_maker as maker

from fsdp_doctor.cli import main
from fsdp_doctor.errors import InputError
from fsdp_doctor.memory.snapshot_reader import ReadLimits, read_snapshot

TIGHT = ReadLimits(memory_base=192 << 20, cpu_base_s=1.0)
P4 = b"\x80\x04"
SEGMENTS = b"\x8c\x08segments"


def text(value: str) -> bytes:
    """SHORT_BINUNICODE."""
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


def calls(module: str, name: str, argument: str) -> bytes:
    """STACK_GLOBAL and REDUCE: call ``module.name(argument)``."""
    return P4 + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


def in_segments(body: bytes) -> bytes:
    """A snapshot whose ``segments`` is what ``body`` builds."""
    return P4 + b"}(" + SEGMENTS + body + b"u."


class Reduced:
    """Pickles as a call."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> object:
        return self.call


def nested(depth: int, opener: bytes, closer: bytes) -> bytes:
    """Containers in containers."""
    return P4 + opener * depth + closer * (depth - 1) + b"."


MARK = "touch {canary}"
HOSTILE: dict[str, bytes] = {
    "os.system": calls("os", "system", MARK),
    "posix.system": calls("posix", "system", MARK),
    "builtins.eval": calls("builtins", "eval", "open('{canary}','w')"),
    "builtins.exec": calls("builtins", "exec", "open('{canary}','w')"),
    "subprocess.getoutput": calls("subprocess", "getoutput", MARK),
    "runpy.run_path": calls("runpy", "run_path", "{canary}"),
    "operator.attrgetter": calls("operator", "attrgetter", "__class__"),
    "importlib.import_module": calls("importlib", "import_module", "antigravity"),
    "builtins.getattr": P4 + text("builtins") + text("getattr") + b"\x93.",
    "dotted name": calls("os", "path.join", "x"),
    "codecs.encode": calls("_codecs", "encode", "x"),
    "copyreg._reconstructor": P4 + text("copyreg") + text("_reconstructor") + b"\x93.",
    "GLOBAL": b"\x80\x02cos\nsystem\nU\x01x\x85R.",
    "GLOBAL protocol 0": b"cos\nsystem\n(S'touch {canary}'\ntR.",
    "INST": b"(S'touch {canary}'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch {canary}'\no.",
    "OBJ of a text": b"(S'os'\nS'x'\no.",
    "NEWOBJ": P4 + text("subprocess") + text("Popen") + b"\x93" + text("x") + b"\x85\x81.",
    "NEWOBJ of a text": P4 + text("a") + b")\x81.",
    "NEWOBJ_EX": P4 + text("io") + text("FileIO") + b"\x93)}\x92.",
    "NEWOBJ_EX of a text": P4 + text("a") + b")}\x92.",
    "BUILD": P4 + b"}" + b"}(" + text("__class__") + text("x") + b"ub.",
    "BUILD of a list": P4 + b"]}b.",
    "BUILD slots": P4 + b"}N}(" + text("a") + b"K\x01u\x86b.",
    "REDUCE of a text": P4 + text("print") + b")R.",
    "REDUCE of a dict": P4 + b"})R.",
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT2": b"\x80\x02\x83\x01\x01.",
    "EXT4": b"\x80\x02\x84\x01\x01\x00\x00.",
    "EXT4 negative": b"\x80\x02\x84\xff\xff\xff\xff.",
    "PERSID": b"Pos.system\n.",
    "BINPERSID": P4 + text("id") + b"Q.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "READONLY_BUFFER": b"\x80\x05\x97\x98.",
    "numpy array": P4 + text("numpy.core.multiarray") + text("_reconstruct") + b"\x93.",
    "torch tensor": P4 + text("torch._utils") + text("_rebuild_tensor_v2") + b"\x93.",
    "torch storage": b"\x80\x02ctorch\nFloatStorage\n.",
    "set": in_segments(b"\x8f"),
    "frozenset": in_segments(b"(\x91"),
    "bytearray": in_segments(b"\x96\x01\x00\x00\x00\x00\x00\x00\x00x"),
    "complex": pickle.dumps({"segments": complex(1, 2)}, protocol=4),
    "datetime": pickle.dumps(Reduced(time.gmtime, 0), protocol=4),
    "reduce in a frame": pickle.dumps(
        {"segments": [{"frames": Reduced(os.system, "touch {canary}")}]}, protocol=4
    ),
    "huge BINUNICODE8": P4 + b"\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
    "huge BINBYTES8": P4 + b"\x8e" + struct.pack("<Q", 4 << 30) + b"x.",
    "huge BINBYTES": b"\x80\x03B" + struct.pack("<I", 0xFFFFFFF0) + b"x.",
    "huge BYTEARRAY8": b"\x80\x05\x96" + struct.pack("<Q", 1 << 36) + b"x.",
    "huge LONG4": b"\x80\x02\x8b" + struct.pack("<i", 0x7FFFFFFF) + b"x.",
    "negative LONG4": b"\x80\x02\x8b" + struct.pack("<i", -1) + b"x.",
    "huge FRAME": P4 + b"\x95" + struct.pack("<Q", 1 << 62) + b"}.",
    "huge LONG_BINPUT": b"\x80\x02]r" + struct.pack("<I", 0xFFFFFFF0) + b".",
    "memo of another": b"\x80\x02j\xff\xff\xff\x7f.",
    "deep lists": nested(300_000, b"]", b"a"),
    "deep tuples as a key": P4 + b"}" + b")" + b"\x85" * 300_000 + b"Ns.",
    "deep marks": P4 + b"(" * 500_000 + b".",
    "stack underflow": P4 + b"0.",
    "self reference": P4 + b"]\x94h\x00a.",
    "self as segments": in_segments(b"]\x94h\x00a"),
    "stop at once": b".",
    "future protocol": b"\x80\xff}.",
    "unknown opcode": P4 + b"\xff.",
    "ints as text": b"I99999999999999999999999999999999\n.",
    "long decimal": b"L" + b"9" * 100_000 + b"L\n.",
}


@cache
def bombs() -> dict[str, bytes]:
    """Small files that unfold: shared lists, repeated traces, compressed zeros."""
    event = {"action": "alloc", "addr": 1, "size": 1}
    shared = [event] * 3000
    frames: list[object] = ["x"]
    for _ in range(60):
        frames = [frames, frames]
    deep = [{"action": "alloc", "addr": 1, "size": 1, "frames": frames}]
    return {
        "the same trace a thousand times": pickle.dumps(
            {"segments": [], "device_traces": [shared] * 1000}
        ),
        "one event too often": pickle.dumps({"segments": [], "device_traces": [[event] * 500_000]}),
        "doubling frames": pickle.dumps({"segments": [], "device_traces": [deep]}),
        "the same blocks": pickle.dumps(
            {"segments": [{"address": 0, "total_size": 1, "blocks": shared}] * 2}
        ),
        "a million devices": pickle.dumps({"segments": [], "device_traces": [[]] * 1_000_000}),
        "gzip of zeros": gzip.compress(P4 + b"B" + struct.pack("<I", 1 << 30) + bytes(1 << 24)),
        "gzip that lies about its size": gzip.compress(b"\x80\x04]" * 100)[:-4] + b"\xff" * 4,
        "text of a gigabyte": gzip.compress(
            P4 + b"X" + struct.pack("<I", 1 << 26) + bytes(1 << 26), 1
        ),
    }


def refused(data: bytes, path: Path, limits: ReadLimits = TIGHT) -> str:
    """Read a hostile file; it must end in one clear line, soon."""
    path.write_bytes(data.replace(b"{canary}", b"canary"))
    began = time.monotonic()
    with pytest.raises(InputError) as caught:
        read_snapshot(path, limits)
    assert time.monotonic() - began < 60
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def outcome(path: Path) -> str:
    """What reading says: nothing, or one error."""
    try:
        read_snapshot(path)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickle_is_refused(name, tmp_path, monkeypatch):
    """Nothing is executed, and the file ends in one InputError."""
    monkeypatch.chdir(tmp_path)
    refused(HOSTILE[name], tmp_path / "evil.pickle")
    assert [p.name for p in tmp_path.iterdir()] == ["evil.pickle"]


@pytest.mark.parametrize("name", bombs())
def test_bomb_is_refused(name, tmp_path):
    """A small file that unfolds to a large one ends within its limits."""
    refused(bombs()[name], tmp_path / "bomb.pickle")


def test_endless_work_is_stopped(tmp_path):
    """A file that costs more CPU time than its size allows is stopped by the kernel."""
    # keys that collide: every insertion looks at all those before it
    mersenne = (1 << 61) - 1
    keys = b"".join(
        b"\x8a\x0c" + (index * mersenne).to_bytes(12, "little") + b"N" for index in range(1, 60_000)
    )
    limits = ReadLimits(cpu_base_s=0.0, cpu_bytes_per_s=1e9)
    message = refused(P4 + b"}(" + keys + b"u.", tmp_path / "slow.pickle", limits)
    assert "more time" in message


def test_child_is_bounded_in_memory(tmp_path):
    """The reader's process never holds more than its limit, whatever the file declares."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    data = P4 + b"]" + b"]" * 3_000_000 + b"."
    refused(data, tmp_path / "many.pickle", ReadLimits(memory_base=100 << 20, memory_factor=4))
    after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert after <= max(before, 130 << 10)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"hello: world\n", "not a memory snapshot"),
        (pickle.dumps({"a": 1}), "no segments"),
        (pickle.dumps("segments"), "no segments"),
        (pickle.dumps({"segments": {}}), "no list"),
        (pickle.dumps({"segments": [1]}), "no dict"),
        (pickle.dumps({"segments": [], "device_traces": {}}), "no list"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": 5}]]}), "no text"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": -1}]]}),
         "not a memory snapshot"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": "x"}]]}),
         "not a memory snapshot"),
        (b"\x1f\x8b\x08\x00broken", "cut off"),
    ],
)  # fmt: skip
def test_wrong_content_says_what_is_wrong(data, message, tmp_path):
    """A file of another kind is named as such."""
    assert message in refused(data, tmp_path / "file.pickle")


def test_devices_and_pipes_are_not_read(tmp_path):
    """Only a regular file is opened; a missing one is named."""
    os.mkfifo(tmp_path / "pipe.pickle")
    with pytest.raises(InputError, match="not a regular file"):
        read_snapshot(tmp_path / "pipe.pickle")
    with pytest.raises(InputError, match="No such file"):
        read_snapshot(tmp_path / "none.pickle")


def test_cut_off_files_end_in_one_line(tmp_path):
    """Cut at 200 random places, plain and gzip: a result or one clear line."""
    whole = pickle.dumps(maker.training(2).snapshot(), protocol=4)
    packed = gzip.compress(whole, mtime=0)
    chance = random.Random(7)
    for number in range(200):
        data = packed if number % 4 == 0 else whole
        path = tmp_path / "cut.pickle"
        path.write_bytes(data[: chance.randrange(len(data))])
        assert "\n" not in outcome(path)


def test_flipped_bytes_end_in_one_line(tmp_path):
    """Damaged files: a result or one clear line, whatever byte is wrong."""
    whole = bytearray(pickle.dumps(maker.training(2).snapshot(), protocol=4))
    chance = random.Random(11)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path = tmp_path / "damaged.pickle"
        path.write_bytes(data)
        assert "\n" not in outcome(path)


@pytest.mark.parametrize(
    "command", [["report", "X"], ["compare", "X", "X"], ["oom", "X"], ["oom", "--snapshot", "X"]]
)
def test_commands_end_with_status_two(command, tmp_path, capsys):
    """The command line prints one line of error for a hostile file."""
    path = tmp_path / "evil.pickle"
    path.write_bytes(HOSTILE["os.system"])
    assert main([str(path) if part == "X" else part for part in command]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "os.system" in shown.err


@pytest.mark.parametrize("command", ["report", "oom"])
def test_markup_in_a_file_is_harmless(command, tmp_path, capsys):
    """HTML, ANSI escapes and Markdown in stacks and names stay text in every format."""
    job = maker.training(2)
    evil = "evil<script>alert(1)</script>\x1b[2J`x`.py"
    job.note("FSDP::pre_forward (<img src=x onerror=alert(1)>)", start=False)
    job.alloc(900 * maker.MiB, f"{evil}:3 f<b>")
    job.oom(64 * maker.MiB, stack=f"{evil}:3 f<b>")
    path = maker.write(job.snapshot(), tmp_path / "s.pickle")
    for name in ("r.html", "r.md", "r.json"):
        assert main([command, str(path), "-o", str(tmp_path / name)]) == 0
    assert main([command, str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    page = (tmp_path / "r.html").read_text()
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "\x1b" not in page + (tmp_path / "r.md").read_text()
    outside_code = re.sub(r"(`+).+?\1", "", (tmp_path / "r.md").read_text())
    assert "<script>" not in outside_code.replace("\\<", "")


def test_enough_hostile_files():
    """At least forty different attacks are tried."""
    assert len(HOSTILE) + len(bombs()) >= 40
