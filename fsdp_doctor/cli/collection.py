"""How often Python's garbage collector runs in a command."""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()


def collect_rarely() -> None:
    """For a short life: collecting while importing only costs time."""
    gc.set_threshold(100_000, 50, 50)


def collect_as_usual() -> None:
    """For training steps in this process: tensors in cycles live until a collection."""
    gc.set_threshold(*_USUAL)
