"""Where the time of one step goes: ``torch.profiler`` over one untimed step, phase by phase.

On CUDA the device is synchronised at every phase border, so that kernels lie in the phase that
launched them; the step's duration therefore means nothing and only the shares do. On CPU the
"kernels" are the outermost operators of all threads, and a collective is what runs on its worker
thread: time spent waiting for it without working is idle.

Private: ``profile.profiler.kineto_results.events()`` and of its events ``name, start_ns,
duration_ns, device_type, start_thread_id, is_user_annotation`` (``_KinetoEvent``; torch 2.4 -
2.14).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import TimeBreakdown
from fsdp_doctor.profiler.observe.intervals import Interval, clip, length, subtract, union

_MARK = "fsdp_doctor_phase:"
_COPIES = ("Memcpy", "Memset")
_CPU_COLLECTIVES = ("gloo:", "c10d::", "_c10d_functional::", "mpi:")
_CPU_COPIES = ("aten::copy_",)


class Span(NamedTuple):
    """One event of the trace."""

    name: str
    start_ns: int
    end_ns: int
    thread: int
    on_device: bool


class KernelProfile:
    """Profiles one step. Enter it around the step, and ``phase`` around each phase in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._spans: list[Span] = []

    def __enter__(self) -> KernelProfile:
        self._synchronise()
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._synchronise()
        self._profile.__exit__(None, None, None)
        if error[0] is None:
            self._spans = list(_read_spans(self._profile))

    @contextmanager
    def phase(self, phase: Phase, microbatch: int = 0) -> Iterator[None]:  # noqa: ARG002
        """Mark one phase; on CUDA its kernels end before the mark does."""
        with record_function(_MARK + phase.value):
            yield
            self._synchronise()

    def breakdown(self) -> tuple[TimeBreakdown, ...]:
        """One entry per phase in order of first appearance; micro batches are added up."""
        return break_down(self._spans, on_cuda=self._device.type == "cuda")

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _read_spans(profiler: Any) -> Iterator[Span]:
    """The events of a finished profile. Annotations repeated on the device are left out."""
    results = profiler.profiler.kineto_results
    for event in results.events():
        on_device = event.device_type().name == "CUDA"
        name = event.name()
        if on_device and (_is_annotation(event) or name.startswith(_MARK)):
            continue
        start = event.start_ns()
        yield Span(name, start, start + event.duration_ns(), event.start_thread_id(), on_device)


def _is_annotation(event: Any) -> bool:
    """Whether a device event only mirrors a ``record_function`` range (``gpu_user_annotation``)."""
    asked = getattr(event, "is_user_annotation", None)
    named = event.name().startswith(("nccl:", "FSDP::", "Optimizer.", "DistributedDataParallel."))
    return named or (asked is not None and bool(asked()))


def break_down(spans: list[Span], *, on_cuda: bool) -> tuple[TimeBreakdown, ...]:
    """Divide every phase's time: compute, communication, copies, none of them. Pure."""
    compute, communication, copies = _classes(spans, on_cuda=on_cuda)
    total: dict[Phase, list[int]] = {}
    for mark in sorted(spans, key=lambda span: span.start_ns):
        if not mark.name.startswith(_MARK) or mark.on_device:
            continue
        window = (mark.start_ns, mark.end_ns)
        sums = total.setdefault(Phase(mark.name.removeprefix(_MARK)), [0] * 6)
        for index, value in enumerate(_window(window, compute, communication, copies)):
            sums[index] += value
    return tuple(
        TimeBreakdown(
            phase=phase,
            wall_s=wall / 1e9,
            kernel_s=kernel / 1e9,
            exposed_communication_s=exposed / 1e9,
            communication_s=sent / 1e9,
            copy_s=copied / 1e9,
            idle_s=idle / 1e9,
        )
        for phase, (wall, kernel, exposed, sent, copied, idle) in total.items()
    )


def _window(
    window: Interval,
    compute: list[Interval],
    communication: list[Interval],
    copies: list[Interval],
) -> tuple[int, int, int, int, int, int]:
    """(wall, kernel, exposed communication, communication, exposed copies, idle) of one window."""
    kernels, sent, copied = (clip(kind, *window) for kind in (compute, communication, copies))
    exposed = subtract(sent, kernels)
    bare_copies = subtract(copied, kernels)
    busy = union([*kernels, *exposed, *bare_copies])
    wall = window[1] - window[0]
    return (
        wall,
        length(kernels),
        length(exposed),
        length(sent),
        length(bare_copies),
        wall - length(busy),
    )


def _classes(
    spans: list[Span], *, on_cuda: bool
) -> tuple[list[Interval], list[Interval], list[Interval]]:
    """Unions of compute, communication and copies over the whole trace."""
    compute: list[Interval] = []
    communication: list[Interval] = []
    copies: list[Interval] = []
    for span in spans if on_cuda else _cpu_operators(spans):
        interval = (span.start_ns, span.end_ns)
        if on_cuda and not span.on_device:
            continue
        if "nccl" in span.name.lower() or span.name.startswith(_CPU_COLLECTIVES):
            communication.append(interval)
        elif span.name.startswith(_COPIES if on_cuda else _CPU_COPIES):
            copies.append(interval)
        else:
            compute.append(interval)
    return union(compute), union(communication), union(copies)


def _cpu_operators(spans: list[Span]) -> list[Span]:
    """The outermost operators and collectives of every thread.

    Outermost, because an operator's own work shows only in its own interval, not in its parts'.
    Ranges that enclose Python (autograd nodes, FSDP's marks) are not operators.
    """
    found: list[Span] = []
    end_of: dict[int, int] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        is_operator = "::" in span.name and not span.name.startswith(("autograd::", "FSDP::"))
        if not (is_operator or span.name.startswith(_CPU_COLLECTIVES)):
            continue
        if span.start_ns >= end_of.get(span.thread, 0):
            end_of[span.thread] = span.end_ns
            found.append(span)
    return found
