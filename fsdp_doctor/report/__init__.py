"""Reports of runs and comparisons: terminal, HTML, Markdown, JSON, CSV."""

from fsdp_doctor.report.base import (
    FORMATS,
    Renderer,
    ReportFormat,
    format_of,
    render_comparison,
    render_runs,
    renderer_for,
)

__all__ = [
    "FORMATS",
    "Renderer",
    "ReportFormat",
    "format_of",
    "render_comparison",
    "render_runs",
    "renderer_for",
]
