"""The table of stacks of a snapshot. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fsdp_doctor.memory.snapshot_pickle import RefusedError

MAX_TEXT = 400
_OPERATOR = re.compile(r"^at::_ops::(\w+)::(?:call|redispatch)\(")


class Codes(dict[Any, int]):
    """Numbers for values in order of appearance."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


class Stacks:
    """Every different stack once: its Python frames and the ATen operator."""

    def __init__(self) -> None:
        self.frames = Codes()
        self.stacks = Codes()
        self._near: dict[tuple[int, int, int], tuple[list[Any], int]] = {}
        self._exact: dict[tuple[int, ...], int] = {}

    def number(self, frames: Any) -> int:
        """The stack's number, -1 for none.

        Stacks share their frames: equal ones hold the same objects, and most that differ do so in
        one of three places.
        """
        if not frames:
            return -1
        if type(frames) is not list:
            raise RefusedError("frames are no list")
        n = len(frames)
        key = id(frames[0]), id(frames[n >> 2]), id(frames[n >> 1])
        near = self._near.get(key)
        if near is None:
            number = self._add(frames)
            self._near[key] = frames, number
            return number
        if near[0] == frames:
            return near[1]
        exact = tuple(map(id, frames))
        known = self._exact.get(exact)
        if known is None:
            known = self._exact[exact] = self._add(frames)
        return known

    def numbers(self, many: Iterable[Any]) -> list[int]:
        """``number`` of each: its most frequent way, without a call for each."""
        near_get, number = self._near.get, self.number
        found: list[int] = []
        append = found.append
        for frames in many:
            if type(frames) is list and frames:
                n = len(frames)
                near = near_get((id(frames[0]), id(frames[n >> 2]), id(frames[n >> 1])))
                if near is not None and near[0] == frames:
                    append(near[1])
                    continue
            append(number(frames))
        return found

    def _add(self, frames: list[Any]) -> int:
        found, operator = [], ""
        for frame in frames:
            file, line, name = frame["filename"], frame["line"], frame["name"]
            if file == "??":
                match = None if operator else _OPERATOR.match(name)
                operator = match[1] if match else operator
            else:
                place = (str(file)[-MAX_TEXT:], int(line), str(name)[:MAX_TEXT])
                found.append(self.frames[place])
        if not found and not operator:
            return -1
        return self.stacks[tuple(found), operator]
