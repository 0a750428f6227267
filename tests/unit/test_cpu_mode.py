"""The books of the dispatch mode hold whenever and wherever a storage dies."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from fsdp_doctor.profiler.observe.cpu_mode import StorageMode

CPU = torch.device("cpu")


class Sink:
    """Notes what it is told; ``during_birth`` runs in the middle of a birth."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.during_birth = lambda: None

    def born(self, key: int, size: int, operator: str | None, cast_of: int | None) -> None:
        """Run ``during_birth`` once."""
        self.told.append(f"birth of {key} begins")
        act, self.during_birth = self.during_birth, lambda: None
        act()
        self.told.append(f"birth of {key} ends")

    def resized(self, key: int, size: int) -> None:
        """Note it."""
        self.told.append(f"{key} has {size} B")

    def died(self, key: int) -> None:
        """Note it."""
        self.told.append(f"{key} died")

    def renamed(self, old: int, new: int) -> None:
        """Note it."""
        self.told.append(f"{old} is {new}")


def in_thread(act: Callable[[], None]) -> None:
    """Run something in another thread, to its end."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.parametrize("run", [lambda act: act(), in_thread], ids=["collector", "thread"])
def test_a_death_in_the_middle_of_a_birth_is_told_after_it(
    run: Callable[[Callable[[], None]], None],
) -> None:
    """Whether the collector or another thread drops it."""
    sink = Sink()
    mode = StorageMode(sink, CPU)
    mode.install()
    try:
        held = [torch.ones(4)]
        sink.told.clear()
        sink.during_birth = lambda: run(held.clear)
        kept = torch.ones(8)
    finally:
        mode.uninstall()
    assert kept.numel() == 8
    assert sink.told == ["birth of 2 begins", "birth of 2 ends", "1 died"]
    assert mode.faults.first is None


def test_a_death_in_another_thread_is_told_at_once_when_nobody_keeps_books() -> None:
    """Its end is where it happened in the log."""
    sink = Sink()
    mode = StorageMode(sink, CPU)
    mode.install()
    try:
        held = [torch.ones(4)]
        sink.told.clear()
        in_thread(held.clear)
        assert sink.told == ["1 died"]
    finally:
        mode.uninstall()


def test_an_error_at_a_death_is_kept_for_the_end_of_the_phase() -> None:
    """Nobody could raise it to: the storage was dropped by anyone."""
    sink = Sink()
    mode = StorageMode(sink, CPU)
    mode.install()
    try:
        held = [torch.ones(4)]
        sink.died = lambda key: 1 // 0  # type: ignore[method-assign]
        held.clear()
    finally:
        mode.uninstall()
    assert isinstance(mode.faults.first, ZeroDivisionError)


def accumulated(function: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    """What is told while two uses of one tensor are differentiated: births and renamings."""
    leaf = torch.ones(2, 4, 4, requires_grad=True)
    sink = Sink()
    mode = StorageMode(sink, CPU)
    output = function(leaf * 1.0)
    mode.install()
    try:
        output.backward(torch.ones_like(output))
    finally:
        mode.uninstall()
    return sink.told


def test_a_gradient_is_added_to_in_place_unless_it_is_a_view() -> None:
    """As autograd does without the mode: a view holds its base, so the sum gets memory of its own,
    and the next addition goes into that.
    """
    left, right = torch.ones(4, 4), torch.ones(8, 4)

    def thrice(x: torch.Tensor) -> torch.Tensor:
        flat = x.view(8, 4)
        return (x @ left) * (x @ left) + flat.mul(right).view(2, 4, 4)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x.cos()

    assert sum(" is " in line for line in accumulated(plain)) == 1
    assert sum(" is " in line for line in accumulated(thrice)) == 1
