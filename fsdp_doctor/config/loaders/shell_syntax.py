"""Structure of a shell script's tokens: compound commands, branches, functions, here documents."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_doctor.config.loaders.shell_words import Operator, Token, Word

ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
ENDS = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac"}
ENDS |= {"{": "}", "select": "done"}
"""First word of a compound command -> its last."""


def without_heredocs(text: str) -> str:
    """Return the script with the bodies of here documents blanked, line numbers kept."""
    lines, end = [], None
    for line in text.split("\n"):
        if end is not None:
            end = None if line.strip() == end else end
            lines.append("")
            continue
        match = re.search(r"(?<!<)<<-?\s*[\"']?([A-Za-z_][A-Za-z0-9_]*)[\"']?", line)
        end = match[1] if match and not line.lstrip().startswith("#") else None
        lines.append(line)
    return "\n".join(lines)


def bare_word(token: Token) -> str | None:
    """Return an unquoted literal word, as keywords are, or None."""
    return token.bare if isinstance(token, Word) else None


def is_assignment(token: Word) -> bool:
    """Return whether a word is ``NAME=...`` or ``NAME+=...``."""
    first = token.parts[0]
    return first.kind == "text" and not first.quoted and bool(ASSIGNMENT.match(first.text))


def end_of(tokens: Sequence[Token], at: int) -> int:
    """Return where the compound command that starts at ``at`` ends."""
    stack: list[str] = []
    for position in range(at, len(tokens)):
        word = bare_word(tokens[position])
        if word is None:
            continue
        if word in ENDS and (position == at or _starts_command(tokens, position)):
            stack.append(ENDS[word])
        elif stack and word == stack[-1]:
            stack.pop()
            if not stack:
                return position
    return len(tokens)


def _starts_command(tokens: Sequence[Token], at: int) -> bool:
    before = tokens[at - 1]
    return isinstance(before, Operator) or bare_word(before) in ("then", "else", "do", "{", "!")


def is_function(tokens: Sequence[Token], at: int) -> bool:
    """Return whether a function is defined here."""
    name = bare_word(tokens[at])
    if name == "function":
        return True
    if name is None or name.endswith("="):
        return False  # an array without elements
    following = [token.text for token in tokens[at + 1 : at + 3] if isinstance(token, Operator)]
    return following == ["(", ")"]


def branches(body: Sequence[Token]) -> list[tuple[Sequence[Token] | None, Sequence[Token]]]:
    """Return test and commands of each branch of an ``if``; the test of ``else`` is None."""
    found: list[tuple[Sequence[Token] | None, Sequence[Token]]] = []
    depth, start, test = 0, 0, None
    for position, token in enumerate(body):
        word = bare_word(token)
        if word in ENDS and (position == 0 or _starts_command(body, position)):
            depth += 1
        elif word in ("fi", "done", "esac", "}") and depth:
            depth -= 1
        elif depth == 0 and word == "then":
            test, start = body[start:position], position + 1
        elif depth == 0 and word in ("elif", "else"):
            found.append((test, body[start:position]))
            test, start = None, position + 1
    found.append((test, body[start:]))
    return found


def inner_script(words: Sequence[str]) -> int | None:
    """Return the position of the script in ``... bash -c SCRIPT``, or None."""
    for position in range(len(words) - 2):
        shell = words[position].rsplit("/", 1)[-1]
        options = words[position + 1]
        if shell in ("bash", "sh", "zsh") and re.fullmatch(r"-[a-z]*c", options):
            return position + 2
    return None
