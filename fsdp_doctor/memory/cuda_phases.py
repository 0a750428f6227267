"""Phases of a snapshot that came without marks: from annotations and telltale frames.

``external_annotations`` (torch 2.5+) hold the names of ``record_function`` ranges: the forward of
DDP and FSDP, ``Optimizer.step``. Backward begins where ``torch.autograd`` makes the first
gradient (``_make_grads`` allocates a scalar).
"""

from __future__ import annotations

from typing import Any

from fsdp_doctor.memory.cuda_trace import Begin, End, Mark
from fsdp_doctor.model.memory import Phase

_FORWARD = ("DistributedDataParallel.forward", "FSDP::root_pre_forward")
_FORWARD_FSDP1 = "FullyShardedDataParallel.forward"


def infer_marks(snapshot: dict[str, Any], device_index: int) -> list[Mark]:
    """Set-up (step -1), then forward, backward and optimizer of every step, by time."""
    moments = _moments(snapshot, device_index)
    if not moments:
        return []
    start = min(time for time, _ in moments)
    trace = _trace(snapshot, device_index)
    first = min((entry["time_us"] for entry in trace if "time_us" in entry), default=start)
    marks = [Mark(min(first, start), Begin(-1, Phase.WRAP))]
    step, current = -1, Phase.WRAP
    for time, phase in moments:
        if phase is current:
            continue
        if phase is None:
            marks.append(Mark(time, End()))
        else:
            if phase is Phase.FORWARD and current is not Phase.BACKWARD:
                step += 1
            marks.append(Mark(time, Begin(step, phase)))
        current = phase or Phase.UNKNOWN
    return marks


def _trace(snapshot: dict[str, Any], device_index: int) -> list[dict[str, Any]]:
    traces = snapshot.get("device_traces") or []
    return traces[device_index] if device_index < len(traces) else []


def _moments(snapshot: dict[str, Any], device_index: int) -> list[tuple[int, Phase | None]]:
    """(time, phase that begins there; None: none does), in order."""
    found: list[tuple[int, Phase | None]] = []
    for note in snapshot.get("external_annotations") or ():
        if note.get("device", device_index) != device_index:
            continue
        name, starts = note["name"], note["stage"] == "START"
        if name in _FORWARD or name == _FORWARD_FSDP1:
            if starts:
                found.append((note["time_us"], Phase.FORWARD))
        elif name.startswith("Optimizer.step#"):
            found.append((note["time_us"], Phase.OPTIMIZER if starts else None))
    for entry in _trace(snapshot, device_index):
        frames = entry.get("frames") or ()
        if entry["action"] == "alloc" and frames and frames[0]["name"] == "_make_grads":
            found.append((entry["time_us"], Phase.BACKWARD))
    return sorted(found, key=lambda moment: moment[0])
