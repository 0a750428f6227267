"""Turn a matplotlib figure into SVG that can stand inside an HTML page."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from io import StringIO
from typing import Any

INK = "#010203"
"""Stands for the page's text colour, whichever it is."""
GRID = "#040506"
"""Stands for the page's line colour."""
WIDTH = 8.6
"""Inches; the page scales it."""

_STYLE: dict[str, Any] = {
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.labelsize": 9,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "grid.linewidth": 0.6,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "xtick.labelsize": 8,
    "ytick.color": INK,
    "ytick.labelsize": 8.5,
}
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def draw_svg(paint: Callable[[Any], None], *, height: float, key: str) -> str:
    """Return what ``paint`` draws on one axes as an ``<svg>`` element.

    ``key`` keeps the element ids of different plots of a page apart. The same input gives the same
    text: no date, no random ids.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = _STYLE | {"svg.hashsalt": key}
    with mpl.rc_context(mpl.rcParamsDefault), mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        stream = StringIO()
        with warnings.catch_warnings():
            # a letter that the font lacks: the text stays text, the browser has other fonts
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(stream, format="svg", transparent=True, metadata=_NO_METADATA)
    return _for_page(stream.getvalue(), key)


_ID = re.compile(
    r' id="((?:figure|axes|patch|text|line2d|legend|xtick|ytick|matplotlib|'
    r'PathCollection|LineCollection)[^"]*)"'
)
_NAMESPACE = re.compile(r' xmlns(?::\w+)?="[^"]*"')
_SIZE = re.compile(r' (?:width|height)="[^"]*"')


def _for_page(text: str, key: str) -> str:
    """Drop what only a file needs, and take colours from the page."""
    start = text.index("<svg")
    end = text.index(">", start)
    head = _SIZE.sub("", _NAMESPACE.sub("", text[start:end]))
    body = _ID.sub(rf' id="{key}-\1"', text[end:])
    return (head + body).replace(INK, "currentColor").replace(GRID, "var(--line)").strip()
