"""Truth of a shell test whose words are known; None where it is not."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBERS = {"-eq", "-ne", "-lt", "-le", "-gt", "-ge"}
_STRINGS = {"=", "==", "!="}


def condition(words: Sequence[str]) -> bool | None:
    """Return the verdict of ``[ ... ]``, ``[[ ... ]]`` or ``test ...`` with ``&&``, ``||``, ``!``.

    A word that holds an unresolved variable makes the verdict unknown.
    """
    verdict: bool | None = None
    operator = ""
    for part, following in _split(words):
        value = _single(part)
        if not operator:
            verdict = value
        elif operator == "&&":
            verdict = _and(verdict, value)
        else:
            verdict = _or(verdict, value)
        operator = following
    return verdict


def _split(words: Sequence[str]) -> list[tuple[list[str], str]]:
    parts: list[tuple[list[str], str]] = []
    current: list[str] = []
    for word in words:
        if word in ("&&", "||", "-a", "-o"):
            parts.append((current, {"-a": "&&", "-o": "||"}.get(word, word)))
            current = []
        elif word not in ("[", "]", "[[", "]]", "test", "command"):
            current.append(word)
    return [*parts, (current, "")]


def _single(words: Sequence[str]) -> bool | None:
    if words[:1] == ["!"]:
        inner = _single(words[1:])
        return None if inner is None else not inner
    if any(re.search(r"\$[({A-Za-z0-9_]|`", word) for word in words):
        return None
    if len(words) == 1:
        return {"true": True, "false": False, ":": True}.get(words[0])
    if len(words) == 2 and words[0] in ("-n", "-z"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) == 3:
        return _compared(*words)
    return None


def _compared(left: str, operator: str, right: str) -> bool | None:
    if operator in _STRINGS:
        if operator != "=" and re.search(r"[*?\[]", right):
            return None  # a pattern, not a text
        return (left == right) == (operator != "!=")
    if operator not in _NUMBERS:
        return None
    if not all(re.fullmatch(r"-?[0-9]{1,18}", side) for side in (left, right)):
        return None
    a, b = int(left), int(right)
    verdicts = {"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b}
    verdicts |= {"-gt": a > b, "-ge": a >= b}
    return verdicts[operator]


def _and(a: bool | None, b: bool | None) -> bool | None:
    if a is False or b is False:
        return False
    return None if a is None or b is None else True


def _or(a: bool | None, b: bool | None) -> bool | None:
    if a or b:
        return True
    return None if a is None or b is None else False
