"""One self-contained HTML page: no scripts, nothing loaded from elsewhere.

Recorded text reaches the page only through jinja2's autoescape. Plots are SVG drawn by matplotlib,
which escapes its own text.
"""

from __future__ import annotations

import re
from typing import Any

from fsdp_doctor.report.base import DocumentRenderer
from fsdp_doctor.report.document import Block, Cell, Document, PlotFigure, printable
from fsdp_doctor.report.palette import category_color

_BREAKS = re.compile(r"(?<=[._/])(?=[^._/])")
"""Where a browser may break a long name."""


class HtmlRenderer(DocumentRenderer):
    """A page for a browser, light or dark, that prints well."""

    file_extension = ".html"
    is_binary = False

    def render_document(self, document: Document) -> str:
        """Return the document as a page."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        environment = Environment(
            loader=PackageLoader("fsdp_doctor.report", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_finalize,
        )
        environment.filters["kind"] = _kind
        environment.filters["parts"] = _BREAKS.split
        environment.filters["plot"] = _plot
        environment.filters["bar_style"] = _bar_style
        environment.filters["swatch"] = _swatch
        page = environment.get_template("page.html.j2").render(
            document=document, anchors=_anchors(document)
        )
        return page.rstrip() + "\n"


def _finalize(value: Any) -> Any:
    """Show control characters of recorded text as escapes; markup of our own passes."""
    return printable(value) if type(value) is str else value


def _kind(block: Block) -> str:
    """Return the name of the macro that writes a block."""
    return type(block).__name__.lower()


def _plot(figure: PlotFigure) -> Any:
    """Draw a plot; safe, because matplotlib escapes all text in it."""
    from markupsafe import Markup

    return Markup(figure.draw())  # noqa: S704 (see above)


def _bar_style(cell: Cell) -> str:
    """Return the style of a bar: numbers and our own colours only."""
    width = min(max(cell.bar or 0.0, 0.0), 1.0) * 100
    return f"width:{width:.2f}%;background:{category_color(cell.color or '')}"


def _swatch(cell: Cell) -> str:
    """Return the style of a category's colour mark."""
    return f"background:{category_color(cell.color or '')}"


def _anchors(document: Document) -> list[tuple[str, str]]:
    """Return the id and title of every top section, for the list of contents."""
    return [
        (f"s{index}", section.title)
        for index, section in enumerate(document.sections)
        if section.level == 1
    ]
