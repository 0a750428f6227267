"""``$((...))`` with whole numbers: ``+ - * / %``, parentheses, variables whose value is known."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+)|\$?\{?(?P<name>[A-Za-z_]\w*)\}?|(?P<sign>[-+*/%()]))"
)
_LONGEST = 200
_LARGEST = 10**18


def arithmetic(text: str, lookup: Callable[[str], str | None]) -> int | None:
    """Return the value of an expression, or None where it is not known or not of this kind."""
    if len(text) > _LONGEST:
        return None
    tokens = _tokens(text)
    if tokens is None:
        return None
    parser = _Parser(tokens, lookup)
    try:
        value = parser.sum()
    except (_NotKnownError, ZeroDivisionError, RecursionError):
        return None
    return value if parser.at == len(tokens) else None


def _tokens(text: str) -> list[str] | None:
    found, at = [], 0
    stripped = text.rstrip()
    while at < len(stripped):
        match = _TOKEN.match(stripped, at)
        if match is None or match.end() == at:
            return None
        found.append(match["number"] or match["name"] or match["sign"])
        at = match.end()
    return found


class _NotKnownError(Exception):
    """A variable without a whole number, or text that is no expression."""


class _Parser:
    def __init__(self, tokens: list[str], lookup: Callable[[str], str | None]) -> None:
        self.tokens = tokens
        self.lookup = lookup
        self.at = 0

    def sum(self) -> int:
        value = self._product()
        while self._next() in ("+", "-"):
            sign = self._take()
            other = self._product()
            value = _bounded(value + other if sign == "+" else value - other)
        return value

    def _product(self) -> int:
        value = self._atom()
        while self._next() in ("*", "/", "%"):
            sign = self._take()
            other = self._atom()
            if sign == "*":
                value = _bounded(value * other)
            else:
                quotient = abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1)
                value = quotient if sign == "/" else value - quotient * other
        return value

    def _atom(self) -> int:
        word = self._take()
        if word == "-":
            return -self._atom()
        if word == "(":
            value = self.sum()
            if self._take() != ")":
                raise _NotKnownError
            return value
        text = word if word.isdigit() else self.lookup(word)
        if text is None or not re.fullmatch(r"-?[0-9]{1,18}", text):
            raise _NotKnownError
        return int(text)

    def _next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self) -> str:
        token = self._next()
        self.at += 1
        if not token:
            raise _NotKnownError
        return token


def _bounded(value: int) -> int:
    if abs(value) > _LARGEST:
        raise _NotKnownError
    return value
