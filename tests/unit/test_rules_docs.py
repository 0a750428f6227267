"""The pages on rules say what the rule files hold."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from fsdp_doctor.config.rules import load_rules
from fsdp_doctor.config.rules.expression import FUNCTIONS

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_rules_page_is_current() -> None:
    """docs/rules.md is what docs/generate_rules.py writes."""
    generated = runpy.run_path(str(DOCS / "generate_rules.py"))["page"]()
    assert (DOCS / "rules.md").read_text() == generated


def test_every_rule_is_on_the_page() -> None:
    """No rule is left out, and every file has a title."""
    text = (DOCS / "rules.md").read_text()
    assert [rule.id for rule in load_rules().rules if f"**{rule.id}**" not in text] == []


def test_the_guide_names_every_function() -> None:
    """The guide to conditions explains each function of the language."""
    text = (DOCS / "adding-a-framework.md").read_text()
    assert [name for name in FUNCTIONS if f"`{name}(" not in text] == []


def test_the_guides_rule_file_loads(tmp_path: Path) -> None:
    """The example of the guide is a valid rule file that finds what it says."""
    text = (DOCS / "adding-a-framework.md").read_text()
    example = next(b for b in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "rules:" in b)
    (tmp_path / "example.yaml").write_text(example)
    book = load_rules(tmp_path)
    assert [rule.id for rule in book.rules] == ["MY001"]
