"""Every rule on one config that breaks it and on one, near it, that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_doctor.config.rules import Job, check_config, load_rules
from fsdp_doctor.config.rules.schema import placeholders
from fsdp_doctor.model.config import NativeConfig, NativeField, Violation

CASES = {
    rule: {"f": table["framework"], **case}
    for path in sorted((Path(__file__).parent / "rule_cases").glob("*.yaml"))
    for table in [yaml.safe_load(path.read_text())]
    for rule, case in table["cases"].items()
}
RULES = {rule.id: rule for rule in load_rules().rules}
REMOVED = "-"


def native(values: dict[str, Any], case: dict[str, Any]) -> NativeConfig:
    """Return a config with these keys; ``env.X`` is a variable."""
    kept = {key: value for key, value in values.items() if value != REMOVED}
    return NativeConfig(
        format="test",
        framework=case["f"],
        version=case.get("v"),
        packages={name: str(version) for name, version in case.get("p", {}).items()},
        fields={
            key: NativeField(value=value, file="config.yaml", line=number)
            for number, (key, value) in enumerate(kept.items(), 1)
            if not key.startswith("env.")
        },
        environment={
            key.removeprefix("env."): str(value)
            for key, value in kept.items()
            if key.startswith("env.")
        },
    )


def violations(values: dict[str, Any], case: dict[str, Any]) -> dict[str, Violation]:
    """Return what is found in a config, by rule."""
    found = check_config(native(values, case), {}, Job(**case.get("job", {}))).violations
    return {violation.rule: violation for violation in found}


def test_every_rule_has_a_case() -> None:
    """No rule is without test, no case without rule."""
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("rule", list(CASES))
def test_a_config_that_breaks_it_is_found(rule: str) -> None:
    """The rule is reported with its severity, keys and a message without gaps."""
    case = CASES[rule]
    found = violations(case["bad"], case)
    assert rule in found, f"found only {list(found)}"
    violation = found[rule]
    assert violation.severity == RULES[rule].severity
    assert violation.fields
    assert set(violation.values) == set(violation.fields)
    for text in (violation.message, violation.fix, violation.source):
        assert text
        assert not placeholders(text)


@pytest.mark.parametrize("rule", list(CASES))
def test_a_config_that_keeps_it_passes(rule: str) -> None:
    """One change, and the rule is kept."""
    case = CASES[rule]
    assert rule not in violations({**case["bad"], **case["good"]}, case)


VERSIONED = [
    rule for rule in CASES if RULES[rule].versions.alternatives or RULES[rule].by_framework
]


@pytest.mark.parametrize("rule", VERSIONED)
def test_other_versions_are_exempt(rule: str) -> None:
    """The same config is not reported in a version outside the rule's range."""
    case, known = CASES[rule], RULES[rule]
    versions = known.by_framework.get(case["f"], known.versions)
    outside = next((v for v in ("0.0.1", "99.0") if v not in versions), None)
    if outside is None:
        pytest.skip("the range is open at both ends")
    other = {**case, "v": outside}
    if known.package and known.package not in ("deepspeed", "transformers"):
        other["p"] = {**case.get("p", {}), known.package: outside}
    assert rule not in violations(case["bad"], other)
