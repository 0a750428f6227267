"""What is kept of a failure: its log and snapshot, without this machine's paths and names."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import socket
from pathlib import Path
from typing import Any

from cases import OomCase

MAX_BYTES = 295_000
ROOT = Path(__file__).resolve().parents[2]
_PATH = re.compile(r"(?<![\w.:/])/(?:[^\s\"'<>:,;()\[\]{}/]+/)+[^\s\"'<>:,;()\[\]{}/]*")
_LIBRARY = re.compile(r"^.*/(?:site|dist)-packages/")
_PYTHON = re.compile(r"^.*/lib/(python3\.\d+)/")
_NAMESPACE = re.compile(r"^.*/(?=megatron/(?:core|training|bridge)/)")
_BUILD = "/pytorch/"
"""Where torch's own wheels are built: these paths are part of its messages."""


def clean_path(path: str) -> str:
    """Return a path as it would read with everything below ``/workspace``."""
    if path.startswith(("/workspace/", _BUILD)):
        return path
    if path.startswith(f"{ROOT}/"):
        inside = path[len(str(ROOT)) :]
        if not _LIBRARY.match(inside) and not _NAMESPACE.match(inside):
            return "/workspace" + inside
    for pattern, place in (
        (_LIBRARY, "site-packages/"),
        (_NAMESPACE, "site-packages/"),
        (_PYTHON, r"\1/"),
    ):
        if pattern.match(path):
            return "/workspace/" + pattern.sub(place, path)
    return "/workspace/" + path.rstrip("/").rsplit("/", 1)[-1] if path.startswith("/") else path


def clean_log(text: str) -> str:
    """Return a log without machine paths and host names."""
    text = _PATH.sub(lambda match: clean_path(match[0]), text)
    for name in sorted({socket.gethostname(), socket.getfqdn()}, key=len, reverse=True):
        if len(name) > 3 and name != "localhost":
            text = text.replace(name, "node-0")
    return text


def clean_snapshot(snapshot: dict[str, Any]) -> None:
    """Clean the paths of all frames in place."""
    seen: set[int] = set()
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    events = [event for trace in snapshot["device_traces"] for event in trace]
    for holder in (*snapshot["segments"], *blocks, *events):
        for frame in holder.get("frames") or ():
            if id(frame) not in seen:
                seen.add(id(frame))
                frame["filename"] = clean_path(frame["filename"])


def trimmed(snapshot: dict[str, Any], most: int = MAX_BYTES) -> bytes:
    """Return a snapshot as gzip of at most ``most`` bytes: its oldest events are cut off.

    The pickle is one that this script's own job has just written.
    """
    while True:
        data = gzip.compress(pickle.dumps(snapshot, protocol=4), 9, mtime=0)
        traces = snapshot["device_traces"]
        longest = max(traces, key=len)
        if len(data) <= most or len(longest) < 64:
            return data
        part = min(0.95, max(0.4, most / len(data)))
        del longest[: len(longest) - int(len(longest) * part)]
        first = longest[0].get("time_us", 0)
        notes = snapshot.get("external_annotations") or []
        snapshot["external_annotations"] = [n for n in notes if n.get("time_us", 0) >= first]


def keep(case: OomCase, folder: Path, out: Path, printed: str, limit: int | None) -> str:
    """Write what the tests need; return what was written, in words."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    (out / "log.txt").write_text(clean_log(printed))
    (out / "config.json").write_text(json.dumps(case.spec(), indent=1) + "\n")
    truth = json.loads((folder / "truth.json").read_text())
    truth["error"] = clean_log(truth["error"])
    told = {
        "cause": case.cause, "fault": case.fault, "arguments": case.extra, "limit_bytes": limit,
        "allocator": case.allocator, "second_process": case.holder, **truth,
    }  # fmt: skip
    (out / "case.json").write_text(json.dumps(told, indent=1) + "\n")
    source = folder / "snapshot.pickle"
    if not source.exists():
        return "no snapshot"
    snapshot = pickle.loads(source.read_bytes())  # noqa: S301 (our own, just written)
    events = sum(map(len, snapshot["device_traces"]))
    clean_snapshot(snapshot)
    data = trimmed(snapshot)
    (out / "snapshot.pickle.gz").write_bytes(data)
    kept = sum(map(len, snapshot["device_traces"]))
    return f"{kept} of {events} events in {len(data)} bytes"
