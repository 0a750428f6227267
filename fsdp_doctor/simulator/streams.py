"""Which stream is current on the simulated GPU: ``torch.cpu`` counts on none, CUDA's autograd does.

On a GPU the engine runs every node of the backward graph on the stream that was current when its
forward ran (``Node::stream``, ``torch/csrc/autograd/engine.cpp``), with the node's hooks. FSDP1
cuts its flat parameter into views on the stream that gathers it, so the gradient of the whole unit
is put together there, not on the stream that computes. On a CPU the engine knows no streams.

Private: ``torch.cpu.StreamContext``, ``torch._C._autograd._get_sequence_nr``,
``torch._C._current_autograd_node``, ``_current_graph_task_id`` (torch 2.6 - 2.14).
"""
# ruff: noqa: SLF001

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch

_ACCUMULATE_GRAD = (1 << 64) - 1
"""The sequence number of every ``AccumulateGrad`` node."""


def in_backward() -> int:
    """A number for the autograd node that is being evaluated; 0 outside of backward."""
    if torch._C._current_graph_task_id() == -1:
        return 0
    node = torch._C._current_autograd_node()
    return 0 if node is None else node._sequence_nr() + 1


_numbered: list[Any] = []


def stream_number(stream: Any) -> int:
    """A number for a stream object; the default stream, asked for first, is 0."""
    for number, known in enumerate(_numbered):
        if known is stream:
            return number
    _numbered.append(stream)
    return len(_numbered) - 1


def current_stream() -> int:
    """A number for the stream that is current on the simulated GPU."""
    return stream_number(torch.cpu.current_stream())


class _Streams:
    """Open ``with stream`` blocks, and where the current stream changed while forward ran."""

    def __init__(self) -> None:
        self._default = torch.cpu.current_stream()
        self._entered: list[tuple[int, Any]] = []
        self._first: list[int] = [0]
        self._then: list[Any] = [self._default]
        self._last = self._default

    def enter(self, stream: Any) -> None:
        self._entered.append((in_backward(), stream))
        self._note()

    def leave(self) -> None:
        self._entered.pop()
        self._note()

    def _note(self) -> None:
        """Nodes from here on are made on another stream than those before."""
        number, stream = torch._C._autograd._get_sequence_nr(), self.current()
        if stream is not self._then[-1]:
            self._first.append(number)
            self._then.append(stream)

    def current(self) -> Any:
        node = in_backward()
        if not node or (self._entered and self._entered[-1][0] == node):
            return self._entered[-1][1] if self._entered else self._default
        return self._of_node(node - 1)

    def _of_node(self, number: int) -> Any:
        """``AccumulateGrad`` has no number of its own: it is made on the stream of the first
        operator that reads the leaf, whose backward is what ran just before.
        """
        if number != _ACCUMULATE_GRAD:
            self._last = self._then[bisect_right(self._first, number) - 1]
        return self._last


def install() -> None:
    """Let ``torch.cpu`` answer as ``torch.cuda`` would, until the next run, which counts anew."""
    streams = _Streams()
    _numbered.clear()

    class StreamContext:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is not None:
                streams.enter(self.stream)

        def __exit__(self, *_error: object) -> None:
            if self.stream is not None:
                streams.leave()

    cpu: Any = torch.cpu
    cpu.StreamContext = cpu.stream = StreamContext
    cpu.current_stream = lambda _device=None: streams.current()
    current_stream()
