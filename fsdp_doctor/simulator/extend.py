"""From runs of a few layers to a run of many, where each further layer adds the same marks.

Two tapes, of ``n`` and ``n + p`` layers, are laid side by side. Where the longer one has more it
must repeat what it had just before: that stretch is what ``p`` layers add there. More layers are
more copies of it, with numbers that go on as they began (straight lines in the copy and in the
number of layers). The rule is tried on a third run, of ``n + 2 p`` layers, which it must foretell
mark by mark. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_doctor.simulator.tape import SMALL_BYTES, Mark, Tape

BYTES_PER_LAYER = 256
"""By how much a small block may grow with each layer: a few numbers for each parameter."""


class NotPeriodicError(Exception):
    """Layers do not repeat; the message says where."""


@dataclass(frozen=True, slots=True)
class _Insertion:
    """At mark ``short`` of the shorter tape the longer one has ``count`` more, from ``long``."""

    short: int
    long: int
    count: int


def extend(tapes: Sequence[Tape], counts: Sequence[int], layers: int) -> Tape:
    """Return the tape of ``layers`` layers from three of ``counts`` layers.

    ``counts`` rise by equal steps, and ``layers`` lies further steps ahead. Raises
    NotPeriodicError.
    """
    short, long, proof = tapes
    period = counts[1] - counts[0]
    if counts[2] - counts[1] != period or (layers - counts[1]) % period:
        raise ValueError("the numbers of layers do not rise by equal steps")
    insertions = _align(short.marks, long.marks)
    foretold = _extended(short.marks, long.marks, insertions, 1, period)
    _compare(foretold, proof.marks)
    steps = (layers - counts[1]) // period
    marks = _extended(short.marks, long.marks, insertions, steps, period)
    return Tape(marks, long.blocks, long.identified, long.head_module)


def _align(short: Sequence[Mark], long: Sequence[Mark]) -> list[_Insertion]:
    """Find where the longer tape has more."""
    numbered: dict[object, int] = {}
    a = [numbered.setdefault(mark.key, len(numbered)) for mark in short]
    b = [numbered.setdefault(mark.key, len(numbered)) for mark in long]
    found: list[_Insertion] = []
    left = len(b) - len(a)
    i = j = 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and a[i] == b[j]:
            i, j = i + 1, j + 1
            continue
        count = _repeated(a, b, i, j, left)
        if not count:
            raise NotPeriodicError(f"mark {j} ({long[min(j, len(long) - 1)].key[0]}) is new")
        found.append(_Insertion(i, j, count))
        left -= count
        j += count
    if left:
        raise NotPeriodicError("one tape has marks that the other lacks")
    return found


def _repeated(a: list[int], b: list[int], i: int, j: int, left: int) -> int:
    """How many marks from ``j`` on repeat those before them, so that the tapes agree again for as
    long as possible; 0: none.
    """
    best = best_length = 0
    for count in range(1, min(left, i, j) + 1):
        if b[j : j + count] != b[j - count : j]:
            continue
        length = _agreement(a, b, i, j + count)
        if length > best_length or (length == len(a) - i and not best):
            best, best_length = count, length
    return best


def _agreement(a: list[int], b: list[int], i: int, j: int) -> int:
    begin = i
    while i < len(a) and j < len(b) and a[i] == b[j]:
        i, j = i + 1, j + 1
    return i - begin


def _extended(
    short: Sequence[Mark],
    long: Sequence[Mark],
    insertions: Sequence[_Insertion],
    steps: int,
    period: int,
) -> list[Mark]:
    """``steps`` more copies of each insertion after the longer tape's own."""
    result: list[Mark] = []
    i = j = 0
    for place in insertions:
        result.extend(_moved(short[i : place.short], long[j : place.long], steps, period))
        result.extend(_copies(short, long, place, steps, period))
        i, j = place.short, place.long + place.count
    result.extend(_moved(short[i:], long[j:], steps, period))
    return result


def _moved(short: Sequence[Mark], long: Sequence[Mark], steps: int, period: int) -> list[Mark]:
    """Marks that both tapes have, for more layers."""
    result = []
    for a, b in zip(short, long, strict=True):
        if a.numbers == b.numbers:
            result.append(b)
            continue
        numbers = tuple(y + (y - x) * steps for x, y in zip(a.numbers, b.numbers, strict=True))
        _check_growth(b, a.numbers, numbers, steps + 1, period)
        result.append(Mark(b.key, numbers))
    return result


def _copies(
    short: Sequence[Mark], long: Sequence[Mark], place: _Insertion, steps: int, period: int
) -> list[Mark]:
    """The inserted marks and ``steps`` copies of them."""
    result = []
    count = place.count
    before = long[place.long - count : place.long]
    inserted = long[place.long : place.long + count]
    partners = short[place.short - count : place.short]
    for copy in range(steps + 1):
        for x, y, z in zip(partners, before, inserted, strict=True):
            if x.numbers == y.numbers == z.numbers:
                result.append(z)
                continue
            numbers = tuple(
                w + (w - v) * copy + (v - u) * steps
                for u, v, w in zip(x.numbers, y.numbers, z.numbers, strict=True)
            )
            _check_growth(z, z.numbers, numbers, copy + steps + 1, period)
            result.append(Mark(z.key, numbers))
    return result


def _check_growth(
    mark: Mark, old: tuple[int, ...], new: tuple[int, ...], steps: int, period: int
) -> None:
    """Refuse sizes that grow faster than a list of numbers: a bucket would be full one day."""
    if mark.key[0] != "birth":
        return
    limit = min(BYTES_PER_LAYER * period * steps, SMALL_BYTES)
    if any(abs(y - x) > limit for x, y in zip(old[-2:], new[-2:], strict=True)):
        raise NotPeriodicError("the size of a block depends on the number of layers")


def _compare(foretold: Sequence[Mark], real: Sequence[Mark]) -> None:
    for index, (a, b) in enumerate(zip(foretold, real, strict=False)):
        if a != b:
            raise NotPeriodicError(f"mark {index} ({b.key[0]}) does not go on as it began")
    if len(foretold) != len(real):
        raise NotPeriodicError("a run has marks that do not go on as they began")
