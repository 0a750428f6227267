"""What a renderer is, which there are, and how one is chosen.

A renderer takes records and returns text: it opens no files, decides no thresholds and prints
nothing.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.comparison import Comparison
from fsdp_doctor.model.run import Run

if TYPE_CHECKING:
    from fsdp_doctor.report.document import Document

ReportFormat = Literal["terminal", "html", "markdown", "json", "csv"]

_RENDERERS = {
    "terminal": "fsdp_doctor.report.terminal:TerminalRenderer",
    "html": "fsdp_doctor.report.html:HtmlRenderer",
    "markdown": "fsdp_doctor.report.markdown:MarkdownRenderer",
    "json": "fsdp_doctor.report.json_format:JsonRenderer",
    "csv": "fsdp_doctor.report.csv_format:CsvRenderer",
}
FORMATS = tuple(_RENDERERS)
_EXTENSIONS: dict[str, ReportFormat] = {
    ".txt": "terminal",
    ".html": "html",
    ".htm": "html",
    ".md": "markdown",
    ".markdown": "markdown",
    ".json": "json",
    ".csv": "csv",
}


class Renderer(Protocol):
    """Turns runs or a comparison into one format."""

    file_extension: str
    """With the dot."""
    is_binary: bool
    """Whether the text must not be printed to a terminal."""

    def render_runs(self, runs: Sequence[Run]) -> str:
        """Return the report of one or more runs."""

    def render_comparison(
        self, comparison: Comparison, runs_a: Sequence[Run], runs_b: Sequence[Run]
    ) -> str:
        """Return the report of a comparison."""


class DocumentRenderer(ABC):
    """A renderer that lays out the same document as its siblings."""

    @abstractmethod
    def render_document(self, document: Document) -> str:
        """Return the document in this format."""

    def render_runs(self, runs: Sequence[Run]) -> str:
        """Return the report of one or more runs."""
        from fsdp_doctor.report.run_document import runs_document

        return self.render_document(runs_document(runs))

    def render_comparison(
        self, comparison: Comparison, runs_a: Sequence[Run], runs_b: Sequence[Run]
    ) -> str:
        """Return the report of a comparison."""
        from fsdp_doctor.report.comparison_document import comparison_document

        return self.render_document(comparison_document(comparison, runs_a, runs_b))


def renderer_for(fmt: str, **options: Any) -> Renderer:
    """Return the renderer of a format; its module, and what that needs, is imported only now.

    ``options`` go to the renderer (terminal: ``color``, ``width``). Raises InputError for a format
    that does not exist.
    """
    if fmt not in _RENDERERS:
        raise InputError(f"no format {fmt!r}", hint=f"one of {', '.join(FORMATS)}")
    module, _, name = _RENDERERS[fmt].partition(":")
    renderer: Renderer = getattr(importlib.import_module(module), name)(**options)
    return renderer


def format_of(path: Path) -> ReportFormat:
    """Return the format that a file name's extension asks for. Raises InputError for others."""
    fmt = _EXTENSIONS.get(path.suffix.lower())
    if fmt is None:
        raise InputError(
            f"no report format for the extension {path.suffix!r}",
            where=str(path),
            hint=f"one of {', '.join(_EXTENSIONS)}, or say --format",
        )
    return fmt


def render_runs(runs: Sequence[Run], fmt: str, **options: Any) -> str:
    """Return the report of one or more runs in a format."""
    return renderer_for(fmt, **options).render_runs(runs)


def render_comparison(
    comparison: Comparison,
    runs_a: Sequence[Run],
    runs_b: Sequence[Run],
    fmt: str,
    **options: Any,
) -> str:
    """Return the report of a comparison, with the runs of both sides, in a format."""
    return renderer_for(fmt, **options).render_comparison(comparison, runs_a, runs_b)
