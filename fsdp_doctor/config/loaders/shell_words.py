"""Words of a shell script, without running it: quotes, variables, comments, continued lines.

Only what launch scripts need is told apart: literal text, ``$X``, ``${X:-y}``, ``${A[@]}``, and
everything else that starts with ``$`` or a backtick, which is not known without running it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

PartKind = Literal["text", "variable", "array", "unknown"]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
_BRACED = re.compile(
    r"\{(?P<name>[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*])(?P<array>\[[@*]\])?"
    r"(?:(?P<operator>:?[-=+?])(?P<word>.*))?\}",
    re.DOTALL,
)
_OPERATORS = (";;", "&&", "||", ";", "|", "&", "(", ")", "\n")
_REDIRECTION = re.compile(r"[0-9]?(?:>>|>|<<<|<<|<)(?P<copy>&[0-9-])?|&>>?")
_BLANKS = " \t\r"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word."""

    kind: PartKind
    text: str
    """Literal text, a variable's name, or source text of what is not known."""
    quoted: bool = False
    operator: str = ""
    """``:-``, ``-``, ``:=``, ``:+``, ``+``, ``:?`` of ``${X:-y}``."""
    word: str = ""
    """What stands after the operator."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, not expanded yet."""

    parts: tuple[Part, ...]
    line: int

    @property
    def literal(self) -> str | None:
        """The text where all of it is literal, else None."""
        if all(part.kind == "text" for part in self.parts):
            return "".join(part.text for part in self.parts)
        return None

    @property
    def bare(self) -> str | None:
        """The text where all of it is literal and unquoted, as keywords are."""
        return None if any(part.quoted for part in self.parts) else self.literal


@dataclass(frozen=True, slots=True)
class Operator:
    """``;``, ``&&``, a line's end and the like; ``>`` takes the next word as its target."""

    text: str
    line: int


Token = Word | Operator


def shell_tokens(text: str, first_line: int = 1) -> Iterator[Token]:
    """Yield the words and operators of a script; unfinished quotes end with the text."""
    return _Lexer(text, first_line).tokens()


def word_of(text: str, line: int, *, quoted: bool) -> Word:
    """Return ``text`` as one word in which only ``$`` and quotes are special."""
    lexer = _Lexer(text, line)
    return Word(tuple(lexer.parts_to_end(quoted=quoted)), line)


class _Lexer:
    def __init__(self, text: str, line: int) -> None:
        self.text = text
        self.line = line
        self.at = 0

    def tokens(self) -> Iterator[Token]:
        while self.at < len(self.text):
            if self._skip_blanks_and_comments():
                continue
            operator = self._operator()
            if operator is not None:
                yield Operator(operator, self.line)
                self.line += operator == "\n"
                continue
            line = self.line
            parts = self._word()
            if parts:
                yield Word(tuple(parts), line)

    def parts_to_end(self, *, quoted: bool) -> list[Part]:
        parts: list[Part] = []
        while self.at < len(self.text):
            self._step(parts, quoted=quoted)
        return _joined(parts)

    def _skip_blanks_and_comments(self) -> bool:
        char = self.text[self.at]
        if char in _BLANKS:
            self.at += 1
            return True
        if self.text.startswith("\\\n", self.at):
            self.at += 2
            self.line += 1
            return True
        if char == "#":
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
            return True
        return False

    def _operator(self) -> str | None:
        redirection = _REDIRECTION.match(self.text, self.at)
        if redirection is not None:
            self.at = redirection.end()
            return ">&" if redirection["copy"] else ">"
        for operator in _OPERATORS:
            if self.text.startswith(operator, self.at):
                self.at += len(operator)
                return operator
        return None

    def _word(self) -> list[Part]:
        parts: list[Part] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _BLANKS or char in ";&|()<>\n":
                break
            self._step(parts, quoted=False)
        return _joined(parts)

    def _step(self, parts: list[Part], *, quoted: bool) -> None:
        char = self.text[self.at]
        if char == "'" and not quoted:
            self._single_quoted(parts)
        elif char == '"':
            self._double_quoted(parts)
        elif char == "\\":
            self._escape(parts, quoted=quoted)
        elif char == "$":
            parts.append(self._dollar(quoted=quoted))
        elif char == "`":
            parts.append(Part("unknown", self._until("`"), quoted))
        else:
            self._plain(parts, quoted=quoted)

    def _plain(self, parts: list[Part], *, quoted: bool) -> None:
        """Take one character as it is."""
        char = self.text[self.at]
        self.line += char == "\n"
        parts.append(Part("text", char, quoted))
        self.at += 1

    def _single_quoted(self, parts: list[Part]) -> None:
        end = self.text.find("'", self.at + 1)
        end = len(self.text) if end < 0 else end
        text = self.text[self.at + 1 : end]
        self.line += text.count("\n")
        parts.append(Part("text", text, quoted=True))
        self.at = end + 1

    def _double_quoted(self, parts: list[Part]) -> None:
        self.at += 1
        parts.append(Part("text", "", quoted=True))
        while self.at < len(self.text) and self.text[self.at] != '"':
            self._step_quoted(parts)
        self.at += 1

    def _step_quoted(self, parts: list[Part]) -> None:
        char = self.text[self.at]
        if char == "'":
            self._plain(parts, quoted=True)
        else:
            self._step(parts, quoted=True)

    def _escape(self, parts: list[Part], *, quoted: bool) -> None:
        following = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        if following == "\n":
            self.line += 1
        elif quoted and following not in '$`"\\':
            parts.append(Part("text", "\\" + following, quoted=True))
        else:
            parts.append(Part("text", following, quoted=True))

    def _dollar(self, *, quoted: bool) -> Part:
        rest = self.text[self.at + 1 : self.at + 2]
        if rest == "(":
            return Part("unknown", self._balanced("(", ")"), quoted)
        if rest == "{":
            return _braced(self._balanced("{", "}"), quoted=quoted)
        name = _NAME.match(self.text, self.at + 1)
        if name is None:
            self.at += 1
            return Part("text", "$", quoted)
        self.at = name.end()
        kind: PartKind = "array" if name[0] in "@*" else "variable"
        return Part(kind, name[0], quoted)

    def _balanced(self, opening: str, closing: str) -> str:
        """Return ``$(...)`` or ``${...}`` with what is nested in it, and step behind it."""
        start, depth = self.at, 0
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            self.at += 1
            depth += (char == opening) - (char == closing)
            if depth == 0:
                break
        found = self.text[start : self.at]
        self.line += found.count("\n")
        return found

    def _until(self, closing: str) -> str:
        start = self.at
        end = self.text.find(closing, start + 1)
        self.at = len(self.text) if end < 0 else end + 1
        found = self.text[start : self.at]
        self.line += found.count("\n")
        return found


def _braced(source: str, *, quoted: bool) -> Part:
    match = _BRACED.fullmatch(source[1:])
    if match is None:
        return Part("unknown", source, quoted)
    kind: PartKind = "array" if match["array"] or match["name"] in "@*" else "variable"
    return Part(kind, match["name"], quoted, match["operator"] or "", match["word"] or "")


def _joined(parts: list[Part]) -> list[Part]:
    """Return the parts with neighbouring text of one kind put together."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if last and last.kind == part.kind == "text" and last.quoted == part.quoted:
            result[-1] = Part("text", last.text + part.text, part.quoted)
        else:
            result.append(part)
    return result
