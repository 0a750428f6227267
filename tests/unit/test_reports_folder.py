"""The reports in the repository are rendered from the recorded runs."""

from __future__ import annotations

import runpy
from pathlib import Path

REPORTS = Path(__file__).parent.parent.parent / "reports"


def test_reports_are_current() -> None:
    """Every Markdown and JSON report is what reports/render.py writes."""
    rendered = dict(runpy.run_path(str(REPORTS / "render.py"))["reports"]())
    for name, text in rendered.items():
        assert (REPORTS / name).read_text(encoding="utf-8") == text, name
    written = {path.name for path in REPORTS.iterdir() if path.suffix in {".md", ".json"}}
    assert written == set(rendered)
