"""Expansion of shell words from variables and arrays whose values are known."""

from __future__ import annotations

from fsdp_doctor.config.loaders.shell_arithmetic import arithmetic
from fsdp_doctor.config.loaders.shell_words import Part, Word, word_of
from fsdp_doctor.errors import InputError

MAX_EXPANDED = 1 << 20
"""Most characters that all expansions of a script may have together."""
_MAX_DEPTH = 8
_MAX_NOTES = 200
Placed = tuple[str, int]
"""A word and the line that it was written on."""


class Expander:
    """Variables and arrays of a script, and what is not known of it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, list[Placed]] = {}
        self.unresolved: list[str] = []
        self._expanded = 0
        self._depth = 0

    def joined(self, word: Word) -> str:
        """Expand the right side of an assignment, which is never split."""
        quoted = tuple(
            Part(part.kind, part.text, True, part.operator, part.word) for part in word.parts
        )
        return " ".join(text for text, _ in self.expand(Word(quoted, word.line)))

    def expand(self, word: Word, *, report: bool = True) -> list[Placed]:
        """Return the words that a word becomes; unquoted variables are split at blanks."""
        result: list[Placed] = []
        current: Placed | None = None
        for part in word.parts:
            pieces = self._pieces(part, word.line, report=report)
            for position, (text, line) in enumerate(pieces):
                if position and current is not None:
                    result.append(current)
                    current = None
                current = (
                    (text, line)
                    if not (current and current[0])
                    else (
                        current[0] + text,
                        current[1],
                    )
                )
        arrays = any(part.kind == "array" for part in word.parts)
        if current is not None and (current[0] or not arrays):
            result.append(current)
        self._expanded += sum(len(text) + 1 for text, _ in result)
        if self._expanded > MAX_EXPANDED:
            raise InputError("variables expand too far", where=f"{self.source}:{word.line}")
        return result

    def _pieces(self, part: Part, line: int, *, report: bool) -> list[Placed]:
        if part.kind == "text":
            return [(part.text, line)]
        if part.kind == "unknown":
            number = self._arithmetic(part.text)
            if number is not None:
                return [(str(number), line)]
            return [(self._kept(part.text, line, report=report), line)]
        if part.kind == "array":
            if part.text in self.arrays:
                items = self.arrays[part.text]
                if part.quoted:
                    return items
                return [(text, at) for item, at in items for text in item.split()]
            if part.text in "@*":
                return []  # further arguments of the script: none are known
        value = self._variable(part, line, report=report)
        return [(value, line)] if part.quoted else [(text, line) for text in value.split()]

    def _arithmetic(self, text: str) -> int | None:
        if not (text.startswith("$((") and text.endswith("))")):
            return None
        return arithmetic(text[3:-2], self.variables.get)

    def _variable(self, part: Part, line: int, *, report: bool) -> str:
        value = self.variables.get(part.text)
        if value is None and part.text in self.arrays:
            value = next((text for text, _ in self.arrays[part.text]), "")
        missing = value is None or (part.operator.startswith(":") and value == "")
        kind = part.operator.removeprefix(":")
        if kind == "+":
            return "" if missing else self._default(part, line)
        if missing and kind in ("-", "="):
            value = self._default(part, line)
            if kind == "=":
                self.variables[part.text] = value
        if value is None:
            return self._kept(f"${{{part.text}}}", line, report=report)
        return value

    def _default(self, part: Part, line: int) -> str:
        self._depth += 1
        try:
            if self._depth > _MAX_DEPTH:
                return self._kept(part.word, line, report=True)
            inner = self.expand(word_of(part.word, line, quoted=True))
            return " ".join(text for text, _ in inner)
        finally:
            self._depth -= 1

    def _kept(self, text: str, line: int, *, report: bool) -> str:
        if report:
            self.unknown(text, line)
        return text

    def unknown(self, text: str, line: int) -> None:
        """Note what cannot be known, with its place."""
        entry = f"{self.source}:{line}: {text[:200]}"
        if len(self.unresolved) < _MAX_NOTES and entry not in self.unresolved:
            self.unresolved.append(entry)
