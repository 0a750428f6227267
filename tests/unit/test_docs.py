"""The documentation says what the program does."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from fsdp_doctor.cli import COMMANDS, main

ROOT = Path(__file__).parent.parent.parent


def test_specs_page_is_current() -> None:
    """docs/specs.md is what docs/generate.py writes."""
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["page"]()
    assert (ROOT / "docs" / "specs.md").read_text() == generated


def test_the_table_of_changes_is_current() -> None:
    """docs/fit.md has the table that docs/generate_fit.py writes."""
    generated = runpy.run_path(str(ROOT / "docs" / "generate_fit.py"))["page"]()
    assert (ROOT / "docs" / "fit.md").read_text() == generated


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command of the group exists and has a help text."""
    assert main([command, "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 5
