"""The language of conditions: reading, three-valued evaluation, hostile text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_doctor.config.rules.absence import absent_names
from fsdp_doctor.config.rules.evaluate import Unknown, equal, evaluate, truth
from fsdp_doctor.config.rules.expression import ExpressionError, names_of, parse
from fsdp_doctor.config.version_range import parse_range


@dataclass
class Config:
    """Names of a test; ``unknown`` is never known."""

    values: dict[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """Return a value, None where there is none."""
        return Unknown(frozenset({name})) if name == "unknown" else self.values.get(name)

    def is_written(self, name: str) -> bool:
        """Return whether the test gives the name."""
        return name in self.values

    def has_key(self, pattern: str) -> bool:
        """Return whether the pattern is one of the names."""
        return pattern in self.values

    def in_range(self, package: str, versions: str) -> bool | Unknown:
        """Return whether the value of ``package`` is in the range."""
        if package not in self.values:
            return Unknown(frozenset({package}))
        return self.values[package] in parse_range(versions)


def run(text: str, **values: Any) -> Any:
    """Return the value of a condition."""
    return evaluate(parse(text), Config(values))


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("1 + 2 * 3 == 7", {}, True),
        ("(1 + 2) * 3 == 9", {}, True),
        ("7 % 4 == 3 and 8 / 4 == 2 and -1 < 0", {}, True),
        ("not a and b", {"a": False, "b": True}, True),
        ("not (a and b)", {"a": False, "b": True}, True),
        ("a or b and c", {"a": True, "b": False, "c": False}, True),
        ("x in ['a', 'b']", {"x": "A"}, True),
        ("x not in [1, 2]", {"x": "2"}, False),
        ("'moe' in x", {"x": ["core_attn", "moe"]}, True),
        ("'moe' in words(x)", {"x": "core_attn, moe"}, True),
        ("count(x) == 2", {"x": "[a, b]"}, True),
        ("count(x) == 0", {"x": None}, True),
        ("x == 'bf16'", {"x": "torch.bfloat16"}, True),
        ("x == 'fp32'", {"x": {"_target_": "torch.float32"}}, True),
        ("x == true", {"x": "True"}, True),
        ("x == 1", {"x": "1"}, True),
        ("x == 1", {"x": True}, True),
        ("x == null", {}, True),
        ("x > 1", {}, False),
        ("x > 1", {"x": "2"}, True),
        ("x", {"x": "none"}, False),
        ("set(x) and unset(y) and written(y)", {"x": 0, "y": None}, True),
        ("mentions(x, 'FSDP')", {"x": "a.b.FSDPStrategy"}, True),
        ("version('torch', '>=2.4')", {"torch": "2.11.0+cu130"}, True),
        ("any_key('a.*')", {"a.*": 1}, True),
        ("`a-b/c` == 1", {"a-b/c": 1}, True),
    ],
)
def test_values(text: str, values: dict[str, Any], expected: bool) -> None:
    """Precedence, comparisons, lists and functions are as the guide says."""
    assert truth(run(text, **values)) is expected


@pytest.mark.parametrize(
    "text",
    [
        "unknown",
        "unknown and true",
        "false or unknown",
        "not unknown",
        "unknown == 1",
        "unknown > 1",
        "unknown in ['a']",
        "'a' in [unknown]",
        "words(unknown)",
        "1 / 0 == 1",
        "5 % 0 == 1",
        "'abc' > 1",
        "absent + 1 == 1",
        "shell == 'x'",
        "version('nothing', '>=1')",
    ],
)
def test_what_cannot_be_known_is_not_true(text: str) -> None:
    """A missing fact, a shell variable and senseless arithmetic decide nothing."""
    assert isinstance(truth(run(text, shell="${STRATEGY}")), Unknown)


def test_a_decided_operand_decides() -> None:
    """``false and unknown`` is false, ``true or unknown`` is true, in either order."""
    assert run("false and unknown") is False
    assert run("unknown and false") is False
    assert run("true or unknown") is True
    assert run("unknown or true") is True


def test_what_is_needed_is_said() -> None:
    """An undecided condition names what it lacks."""
    assert truth(run("unknown > 1 and true")) == Unknown(frozenset({"unknown"}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a ==",
        "(a",
        "a b",
        "a = 1",
        "a.b()",
        "__import__('os')",
        "eval('1')",
        "set(1)",
        "set(a, b)",
        "version(torch, '2')",
        "a if b else c",
        "lambda: 1",
        "a[0]",
        "'unclosed",
        "a; b",
        "a and",
        "[1, 2",
        "a ** 2",
        "a not 2",
        "(" * 100 + "a" + ")" * 100,
        "not " * 100 + "a",
        "- " * 100 + "1",
        "a or " * 1000 + "a",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    """Anything outside the language is an error, never run."""
    with pytest.raises(ExpressionError):
        parse(text)


def test_names_in_order() -> None:
    """The keys of a condition are found, those of functions on packages are not."""
    node = parse("b > 1 and (set(a) or version('torch', '<2')) and any_key('x.*') and b in [c]")
    assert list(names_of(node)) == ["b", "a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a and set(b) or c > 1 or 'x' in d", ""),
        ("not a and unset(b) and c != 1 and not set(d)", "a b c d"),
        ("not (a == 1 or b in [1] or written(c))", "a b c"),
        ("a == null or count(b) == 0 or c == 1", "a b"),
        ("not (not a) and not (b != 1)", ""),
    ],
)
def test_keys_that_a_condition_holds_without(text: str, names: str) -> None:
    """Only keys whose absence can be what is wrong are found."""
    assert sorted(set(absent_names(parse(text)))) == names.split()


def test_definitions_stand_for_their_conditions() -> None:
    """A defined name is replaced by its tree."""
    node = parse("not big", {"big": parse("size > 5")})
    assert evaluate(node, Config({"size": 3})) is True


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text does anything but parse or raise the one error."""
    try:
        node = parse(text)
    except ExpressionError:
        return
    evaluate(node, Config())


_LEAVES = st.sampled_from(["a", "unknown", "1", "0", "true", "false", "null", "'x'", "b.c"])
_CONDITIONS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.tuples(
            inner,
            st.sampled_from(["and", "or", "==", "!=", "<", ">=", "+", "-", "*", "/", "%"]),
            inner,
        ).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda t: f"(not {t})"),
        inner.map(lambda t: f"words({t})"),
        inner.map(lambda t: f"[{t}, {t}]"),
    ),
    max_leaves=12,
)
_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=8),
        st.sampled_from(["torch.bfloat16", "1", "true", "none", "1e999", "9" * 19]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(_CONDITIONS, _VALUES)
def test_every_condition_has_a_value(text: str, value: Any) -> None:
    """Conditions of the grammar never fail, whatever the config holds."""
    names = Config({"a": value, "b.c": 1})
    held = truth(evaluate(parse(text), names))
    opposite = truth(evaluate(parse(f"not {text}"), names))
    if isinstance(held, Unknown):
        assert isinstance(opposite, Unknown)
    else:
        assert opposite is (not held)


@given(_VALUES, _VALUES)
def test_equality_is_symmetric(a: Any, b: Any) -> None:
    """``a == b`` as ``b == a``, and everything equals itself."""
    assert equal(a, b) == equal(b, a)
    assert equal(a, a)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        (
            ">=0.16,<0.19",
            ["0.16", "0.18.2", "0.18.0rc1"],
            ["0.15.9", "0.19.0", "0.19.0rc1", "main"],
        ),
        ("==0.16", ["0.16.0", "0.16.1", "core_v0.16.2"], ["0.15", "0.17"]),
        ("<=0.19", ["0.19.2", "0.1"], ["0.20", "1"]),
        ("<0.16 | >=0.19", ["0.15", "0.19.2", "HEAD"], ["0.16.1", "0.18"]),
        ("!=2.10", ["2.9", "2.11"], ["2.10.1"]),
        ("<5.10.1", ["5.10.0", "5.9.1", "5.10"], ["5.10.1", "5.24"]),
        ("", ["0", "anything", ""], []),
    ],
)
def test_version_ranges(text: str, inside: list[str], outside: list[str]) -> None:
    """A bound speaks of as many numbers as it has; only the release counts."""
    versions = parse_range(text)
    assert [v for v in inside if v not in versions] == []
    assert [v for v in outside if v in versions] == []


@pytest.mark.parametrize("text", ["0.16", ">=", "=>1", ">=1;<2", ">=1,,<2", "latest"])
def test_other_ranges_are_refused(text: str) -> None:
    """A range that cannot be read is an error."""
    with pytest.raises(ValueError, match="not a version range"):
        parse_range(text)
