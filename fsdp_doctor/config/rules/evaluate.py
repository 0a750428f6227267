"""Evaluate a rule's condition against a config, in three values: true, false, not known.

Not known is what a variable of a shell script, an unnamed GPU or an unnamed version gives; a rule
is broken only by a condition that is surely true.

Text is compared as frameworks read it: without case, ``'true'`` is true, ``'8'`` is 8, and the
spellings of one dtype (``torch.bfloat16``, ``bf16``) are equal.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fsdp_doctor.config.rules.expression import Call, Items, Literal, Name, Node, Operation


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that cannot be known; ``needs`` says what would have to be given."""

    needs: frozenset[str] = frozenset()


class Names(Protocol):
    """What a condition is evaluated against."""

    def value(self, name: str) -> Any:
        """Return a key's value: as written, its default, None (unset), or Unknown."""

    def is_written(self, name: str) -> bool:
        """Return whether someone wrote the key, perhaps as null."""

    def has_key(self, pattern: str) -> bool:
        """Return whether a written key matches the pattern."""

    def in_range(self, package: str, versions: str) -> bool | Unknown:
        """Return whether the package's version is in the range."""


_FALSE_WORDS = frozenset({"", "false", "no", "off", "none", "null", "0", "n", "f"})
_DTYPES = {
    "float32": "fp32",
    "float": "fp32",
    "32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}
_ORDER: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": operator.mod,
}
_NUMBER = re.compile(r"[-+]?\d{1,20}(_\d{3})*(\.\d{0,20})?([eE][-+]?\d{1,3})?")
_TEMPLATE = re.compile(r"\$[\w{(]|\{\{")


def evaluate(node: Node, names: Names) -> Any:
    """Return the value of a condition or of a part of it."""
    if isinstance(node, Literal):
        return node.value
    if isinstance(node, Name):
        value = names.value(node.name)
        return Unknown() if isinstance(value, str) and _TEMPLATE.search(value) else value
    if isinstance(node, Items):
        return [evaluate(item, names) for item in node.items]
    if isinstance(node, Call):
        return _call(node, names)
    return _operate(node, names)


def truth(value: Any) -> bool | Unknown:
    """Return whether a framework would read ``value`` as true."""
    if isinstance(value, Unknown):
        return value
    if isinstance(value, str):
        return value.strip().lower() not in _FALSE_WORDS
    return bool(value)


def _call(node: Call, names: Names) -> Any:
    argument = node.arguments[0]
    if isinstance(argument, Name) and node.function in ("set", "unset", "written"):
        if node.function == "written":
            return names.is_written(argument.name)
        present = names.is_written(argument.name) and names.value(argument.name) is not None
        return present if node.function == "set" else not present
    if node.function in ("version", "any_key"):
        texts = [str(a.value) for a in node.arguments if isinstance(a, Literal)]
        return names.in_range(*texts) if node.function == "version" else names.has_key(*texts)
    value = evaluate(argument, names)
    if isinstance(value, Unknown):
        return value
    words = _words(value)
    if node.function == "mentions":
        sought = str(evaluate(node.arguments[1], names)).lower()
        texts = [value] if isinstance(value, str) else [w for w in words if isinstance(w, str)]
        return any(sought in text.lower() for text in texts)
    return words if node.function == "words" else len(words)


def _words(value: Any) -> list[Any]:
    """Return the entries of a list, or the words of a text that lists them."""
    if value is None or isinstance(value, bool):
        return []
    if isinstance(value, str):
        return re.split(r"[\s,]+", value.strip(" ,\t[]")) if value.strip(" ,\t[]") else []
    return list(value) if isinstance(value, Sequence | Mapping) else [value]


def _operate(node: Operation, names: Names) -> Any:
    if node.operator in ("and", "or"):
        return _connect(node, names)
    values = [evaluate(operand, names) for operand in node.operands]
    if node.operator == "not":
        held = truth(values[0])
        return held if isinstance(held, Unknown) else not held
    if node.operator == "in":
        return _contains(values[1], values[0])
    unknown = [value for value in values if isinstance(value, Unknown)]
    if unknown:
        return _together(unknown)
    if node.operator in ("==", "!="):
        return equal(values[0], values[1]) == (node.operator == "==")
    return _calculate(node.operator, values)


def _connect(node: Operation, names: Names) -> bool | Unknown:
    """Kleene's ``and`` and ``or``: a decided operand decides, whatever is not known."""
    decides = node.operator == "or"
    unknown = []
    for operand in node.operands:
        held = truth(evaluate(operand, names))
        if isinstance(held, Unknown):
            unknown.append(held)
        elif held == decides:
            return decides
    return _together(unknown) if unknown else not decides


def _together(unknown: Sequence[Unknown]) -> Unknown:
    return Unknown(frozenset().union(*(one.needs for one in unknown)))


def _contains(container: Any, item: Any) -> bool | Unknown:
    found = [value for value in (container, item) if isinstance(value, Unknown)]
    if found:
        return _together(found)
    entries = _words(container)
    if any(equal(entry, item) for entry in entries if not isinstance(entry, Unknown)):
        return True
    hidden = [entry for entry in entries if isinstance(entry, Unknown)]
    return _together(hidden) if hidden else False


def equal(a: Any, b: Any) -> bool:
    """Return whether two values mean the same to a framework that reads text leniently."""
    if a is None or b is None:
        return a is b
    if isinstance(a, bool) or isinstance(b, bool):
        return _boolean(a) is not None and _boolean(a) == _boolean(b)
    x, y = number(a), number(b)
    if x is not None and y is not None:
        return x == y
    return bool(_plain(a) == _plain(b))


def _boolean(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False, "1": True, "0": False}.get(str(value).strip().lower())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        value = value["_target_"]
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    for prefix in ("torch.", "shardingstrategy.", "backwardprefetch.", "statedicttype."):
        word = word.removeprefix(prefix)
    return _DTYPES.get(word, word)


def number(value: Any) -> int | float | None:
    """Return a number, also one written as text; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        text = value.strip()
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return None


def _calculate(sign: str, values: Sequence[Any]) -> Any:
    """Compare or calculate; unset compares as false, text that is no number is not known."""
    if any(value is None for value in values):
        return False if sign in _ORDER else Unknown()
    numbers = [number(value) for value in values]
    if any(value is None for value in numbers):
        return Unknown()
    if sign == "negate":
        return -numbers[0]  # type: ignore[operator]
    try:
        return (_ORDER | _ARITHMETIC)[sign](*numbers)  # type: ignore[operator]
    except (ZeroDivisionError, OverflowError):
        return Unknown()
