"""What recording asks of torch.cuda, on a machine without a GPU."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

from fsdp_doctor.profiler.clock import CudaClock
from fsdp_doctor.profiler.observe.cuda_history import CudaHistoryObserver
from fsdp_doctor.profiler.observe.guard import GuardedObserver

DEVICE = torch.device("cuda", 1)


def test_somebody_elses_history_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the allocator's history on already nothing is observed, nor is the history ended."""
    switch = MagicMock()
    warnings: list[str] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", switch)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    observer = GuardedObserver(CudaHistoryObserver(DEVICE), warnings.append)
    observer.start()
    assert not observer.active
    assert "history is on already" in warnings[0]
    switch.assert_not_called()


def test_marks_are_of_the_recorded_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events go to the stream of the job's device, whichever device is current."""
    event, stream = MagicMock(), MagicMock()
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    CudaClock(DEVICE).mark()
    stream.assert_called_once_with(DEVICE)
    event.record.assert_called_once_with(stream.return_value)
