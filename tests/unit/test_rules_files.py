"""Rule files: their form is checked, errors name file and rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_doctor.config.rules import RuleFileError, load_rules
from fsdp_doctor.config.rules.schema import fill, placeholders

RULE = """
  - id: XX001
    severity: note
    when: a > 1
    message: a is {a}.
    fix: Lower it.
    source: here
"""


def write(folder: Path, text: str, name: str = "x.yaml") -> Path:
    """Write a rule file and return its folder."""
    (folder / name).write_text(text)
    return folder


def test_the_packaged_files_load() -> None:
    """All packaged rules are of the required form, with ids of their own."""
    rules = load_rules().rules
    assert len(rules) > 300
    assert len({rule.id for rule in rules}) == len(rules)
    for rule in rules:
        assert not re.search(
            r"[{}]", fill(rule.message, dict.fromkeys(placeholders(rule.message), ""))
        )
        assert rule.fields, rule.id
        assert rule.fix.endswith((".", "1", "0", "2", "false")), rule.id


def test_a_small_file(tmp_path: Path) -> None:
    """A framework's file needs its name and a rule."""
    book = load_rules(write(tmp_path, f"framework: x\nrules:{RULE}"))
    (rule,) = book.for_framework("x")
    assert (rule.id, rule.fields, rule.condition) == ("XX001", ("a",), "a > 1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "x.yaml: Expected `object`"),
        ("rules: []\n", "x.yaml: give either framework or frameworks"),
        ("framework: x\nframeworks: [y]\n", "x.yaml: give either framework or frameworks"),
        ("framework: x\nrulez: []\n", "x.yaml: Object contains unknown field `rulez`"),
        (f"framework: x\nrules:{RULE}    extra: 1\n", "x.yaml: XX001: .*unknown field `extra`"),
        (f"framework: x\nrules:{RULE.replace('note', 'fatal')}", "x.yaml: XX001: .*'fatal'"),
        (f"framework: x\nrules:{RULE.replace('a > 1', 'a >')}", "x.yaml: XX001: unexpected"),
        (f"framework: x\nrules:{RULE.replace('XX001', 'rule one')}", "an id is two letters"),
        (f"framework: x\nrules:{RULE}    versions: '1'\n", "XX001: '1' is not a version range"),
        (f"framework: x\nrules:{RULE}    versions: {{y: '>=1'}}\n", r"XX001: versions of \['y'\]"),
        ("framework: x\nrules:\n  - {severity: note}\n", "x.yaml: rule 1: .*missing"),
        (f"framework: x\nrules:{RULE}{RULE}", "XX001: also in x.yaml"),
        ("framework: x\ndefine: {a: '1 +'}\n", "x.yaml: define a: unexpected"),
        ("framework: x\nlookup: ['a']\n", "lookup 'a' must hold one {}"),
        ("framework: x\ndefaults: {a: {'1': 2}}\n", "x.yaml: a: '1' is not a version range"),
        ("framework: !!python/object:os.system x\n", "x.yaml: could not determine"),
        ("framework: [\n", "x.yaml: while parsing"),
    ],
)
def test_wrong_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    """The error says which file, and which rule of it, is wrong."""
    with pytest.raises(RuleFileError, match=message):
        load_rules(write(tmp_path, text))


def test_two_files_of_one_framework(tmp_path: Path) -> None:
    """How a framework's keys are looked up is said once."""
    write(tmp_path, "framework: x\n", "a.yaml")
    write(tmp_path, "frameworks: [x, y]\nlookup: ['b.{}']\n", "b.yaml")
    with pytest.raises(RuleFileError, match=r"b.yaml: x has another file already"):
        load_rules(tmp_path)


def test_filled_values_are_not_templates() -> None:
    """A value with braces is printed, not filled again."""
    assert fill("a is {a}, {b}", {"a": "{b}", "b": "2"}) == "a is {b}, 2"
