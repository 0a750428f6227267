"""Bytes and seconds as text. GiB is 2**30 everywhere."""

from __future__ import annotations

_BINARY = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def format_bytes(value: float | None, *, signed: bool = False) -> str:
    """Return ``value`` bytes with two decimals, e.g. ``12.34 GiB``; ``-`` for None."""
    if value is None:
        return "-"
    sign = "-" if value < 0 else ("+" if signed and value > 0 else "")
    size = abs(value)
    for unit, factor in _BINARY:
        if size >= factor:
            return f"{sign}{size / factor:.2f} {unit}"
    return f"{sign}{size:.0f} B"


def format_seconds(value: float | None, *, signed: bool = False) -> str:
    """Return ``value`` seconds with a fitting unit, e.g. ``41.2 ms``; ``-`` for None."""
    if value is None:
        return "-"
    sign = "-" if value < 0 else ("+" if signed and value > 0 else "")
    size = abs(value)
    if size >= 100:
        return f"{sign}{size:.0f} s"
    if size >= 1:
        return f"{sign}{size:.2f} s"
    if size >= 1e-3:
        return f"{sign}{size * 1e3:.1f} ms"
    return f"{sign}{size * 1e6:.0f} us"


def format_relative(value: float | None) -> str:
    """Return a relative change as percent with sign, e.g. ``+4.5 %``; ``-`` for None.

    From tenfold on, where percent stops telling anything, it is a factor: ``x 28``.
    """
    if value is None:
        return "-"
    return f"x {value + 1:,.0f}" if value >= 9 else f"{value * 100:+.1f} %"
