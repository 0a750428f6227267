"""The static subset of shell: assignments, arrays, defaults, ``export``, simple ``if``.

Nothing is executed. A variable that the script does not set keeps its source text (``${X}``) and
is reported with its place; so is every construct that is not followed (loops, functions, commands
in ``$(...)``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_doctor.config.loaders.shell_conditions import condition
from fsdp_doctor.config.loaders.shell_words import (
    Operator,
    Part,
    Token,
    Word,
    shell_tokens,
    word_of,
)
from fsdp_doctor.errors import InputError

MAX_EXPANDED = 1 << 20
"""Most characters that all expansions of a script may have together."""
_MAX_DEPTH = 8
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_ENDS = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac"}
_ENDS |= {"{": "}", "select": "done"}
_SEPARATORS = frozenset({";", "&&", "||", "|", "&", "\n", ";;"})
_TESTS = frozenset({"[", "[[", "test"})
_EXPORTS = frozenset({"export", "declare", "local", "readonly", "typeset"})


@dataclass(frozen=True, slots=True)
class Command:
    """A command with its words expanded."""

    words: tuple[str, ...]
    lines: tuple[int, ...]
    """Line of each word."""
    environment: dict[str, str]
    """Set for this command alone (``X=1 torchrun ...``)."""


@dataclass(slots=True)
class Script:
    """What can be known of a script without running it."""

    commands: list[Command] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Exported variables."""
    unresolved: list[str] = field(default_factory=list)


def evaluate_script(text: str, source: str) -> Script:
    """Return the commands of a script, each with the words it would be called with.

    Raises InputError where variables expand without bound.
    """
    evaluator = _Evaluator(source)
    evaluator.run(text, 1)
    return evaluator.script


class _Evaluator:
    def __init__(self, source: str) -> None:
        self.source = source
        self.script = Script()
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        self._expanded = 0
        self._depth = 0
        self._verdict: bool | None = True

    def run(self, text: str, line: int) -> None:
        self._depth += 1
        if self._depth <= _MAX_DEPTH:
            self._block(list(shell_tokens(without_heredocs(text), line)))
        self._depth -= 1

    def _block(self, tokens: Sequence[Token]) -> None:
        at = 0
        while at < len(tokens):
            token = tokens[at]
            if isinstance(token, Operator):
                at = self._after(tokens, at, token)
                continue
            keyword = token.bare
            if keyword in _ENDS:
                end = _matching(tokens, at)
                self._compound(keyword, tokens[at + 1 : end], token.line)
                at = end + 1
            elif _is_function(tokens, at):
                body = next((i for i in range(at, len(tokens)) if _bare(tokens[i]) == "{"), at)
                self._unknown(f"function {keyword or ''}".strip(), token.line)
                at = max(_matching(tokens, body), at) + 1
            else:
                at = self._simple(tokens, at)

    def _after(self, tokens: Sequence[Token], at: int, operator: Operator) -> int:
        """Step over an operator, and over the command behind ``&&`` or ``||`` that is not run."""
        wanted = {"&&": True, "||": False}.get(operator.text)
        if wanted is None or self._verdict is wanted:
            return at + 1
        if self._verdict is None:
            self._unknown("a command that depends on a test", operator.line)
        at += 1
        while at < len(tokens):
            token = tokens[at]
            if isinstance(token, Operator) and token.text in _SEPARATORS:
                break
            at += 1
        return at

    def _compound(self, keyword: str, body: Sequence[Token], line: int) -> None:
        if keyword == "{":
            self._block(body)
        elif keyword == "if":
            self._if(body, line)
        else:
            self._unknown(f"{keyword} ... {_ENDS[keyword]}", line)

    def _if(self, body: Sequence[Token], line: int) -> None:
        for test, branch in _branches(body):
            verdict = True if test is None else self._test(test)
            if verdict is None:
                self._unknown("if: not known which branch is taken", line)
                return
            if verdict:
                self._block(branch)
                return

    def _test(self, tokens: Sequence[Token]) -> bool | None:
        words: list[str] = []
        for token in tokens:
            if isinstance(token, Word):
                expanded = self._expand(token, report=False)
                words += expanded or ([""] if any(p.quoted for p in token.parts) else [])
            elif token.text in ("&&", "||", "<", ">"):
                words.append(token.text)
        return condition(words)

    def _simple(self, tokens: Sequence[Token], at: int) -> int:
        """Take one simple command; return where the next one starts."""
        environment: dict[str, str] = {}
        words: list[str] = []
        lines: list[int] = []
        while at < len(tokens):
            token = tokens[at]
            if isinstance(token, Operator):
                if token.text in (">", ">>", "<", "<<"):
                    at += 2  # a redirection and its target
                    continue
                if token.text in _SEPARATORS:
                    break
                at += 1
                continue
            if not words and _assigned(token):
                at = self._assign(tokens, at, environment)
                continue
            if words and words[0] in _EXPORTS and _assigned(token):
                at = self._assign(tokens, at, None, exported=words[0] == "export")
                continue
            expanded = self._expand(token)
            words += expanded
            lines += [token.line] * len(expanded)
            at += 1
        if words:
            self._command(words, lines, environment)
        else:
            self.variables |= environment
            self._keep_exported(environment)
        return at

    def _keep_exported(self, changed: dict[str, str]) -> None:
        exported = self.script.environment
        exported |= {name: value for name, value in changed.items() if name in exported}

    def _command(self, words: list[str], lines: list[int], environment: dict[str, str]) -> None:
        name = words[0].rsplit("/", 1)[-1]
        self._verdict = condition(words) if name in _TESTS else True
        if name in _TESTS:
            return
        if name == "export":
            for known in words[1:]:
                if known in self.variables:
                    self.script.environment[known] = self.variables[known]
            return
        if name == "unset":
            for gone in words[1:]:
                self.variables.pop(gone, None)
                self.arrays.pop(gone, None)
                self.script.environment.pop(gone, None)
            return
        if name == "eval":
            self.run(" ".join(words[1:]), lines[0])
            return
        inner = _shell_text(words)
        if inner is not None:
            self.run(words[inner], lines[inner])
            return
        self.script.commands.append(Command(tuple(words), tuple(lines), environment))

    def _assign(
        self,
        tokens: Sequence[Token],
        at: int,
        environment: dict[str, str] | None,
        *,
        exported: bool = False,
    ) -> int:
        word = tokens[at]
        assert isinstance(word, Word)
        match = _ASSIGNMENT.match(word.parts[0].text)
        assert match is not None
        name, append = match[1], bool(match[2])
        following = tokens[at + 1] if at + 1 < len(tokens) else None
        empty = len(word.parts) == 1 and match.end() == len(word.parts[0].text)
        if empty and isinstance(following, Operator) and following.text == "(":
            return self._assign_array(tokens, at + 2, name, append=append)
        rest = Part("text", word.parts[0].text[match.end() :], word.parts[0].quoted)
        value = self._joined(Word((rest, *word.parts[1:]), word.line))
        if append:
            value = self.variables.get(name, "") + value
        if environment is not None:
            environment[name] = value
        self.arrays.pop(name, None)
        if environment is None or exported:
            self.variables[name] = value
        if exported:
            self.script.environment[name] = value
        return at + 1

    def _assign_array(self, tokens: Sequence[Token], at: int, name: str, *, append: bool) -> int:
        items = list(self.arrays.get(name, [])) if append else []
        while at < len(tokens):
            token = tokens[at]
            at += 1
            if isinstance(token, Word):
                items += self._expand(token)
            elif token.text == ")":
                break
        self.arrays[name] = items
        return at

    def _joined(self, word: Word) -> str:
        """Expand the right side of an assignment, which is never split."""
        quoted = tuple(
            Part(part.kind, part.text, True, part.operator, part.word) for part in word.parts
        )
        return " ".join(self._expand(Word(quoted, word.line)))

    def _expand(self, word: Word, *, report: bool = True) -> list[str]:
        """Return the words that a word becomes; unquoted variables are split at blanks."""
        result: list[str] = []
        current: str | None = None
        for part in word.parts:
            pieces = self._pieces(part, word.line, report=report)
            if part.quoted and part.kind == "text":
                current = (current or "") + pieces[0]
                continue
            for position, piece in enumerate(pieces):
                if position and current is not None:
                    result.append(current)
                    current = None
                current = (current or "") + piece
        if current or (current is not None and all(part.kind != "array" for part in word.parts)):
            result.append(current)
        self._expanded += sum(map(len, result))
        if self._expanded > MAX_EXPANDED:
            raise InputError("variables expand too far", where=f"{self.source}:{word.line}")
        return result

    def _pieces(self, part: Part, line: int, *, report: bool) -> list[str]:
        if part.kind == "text":
            return [part.text]
        if part.kind == "unknown":
            return [self._kept(part.text, line, report=report)]
        if part.kind == "array":
            if part.text in self.arrays:
                items = self.arrays[part.text]
                return items if part.quoted else [w for item in items for w in item.split()]
            if part.text in "@*":
                return []  # further arguments of the script: none are known
        value = self._variable(part, line, report=report)
        return [value] if part.quoted else value.split()

    def _variable(self, part: Part, line: int, *, report: bool) -> str:
        value = self.variables.get(part.text)
        if value is None and part.text in self.arrays:
            value = next(iter(self.arrays[part.text]), "")
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
            return " ".join(self._expand(word_of(part.word, line, quoted=True)))
        finally:
            self._depth -= 1

    def _kept(self, text: str, line: int, *, report: bool) -> str:
        if report:
            self._unknown(text, line)
        return text

    def _unknown(self, text: str, line: int) -> None:
        entry = f"{self.source}:{line}: {text}"
        if entry not in self.script.unresolved:
            self.script.unresolved.append(entry)


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


def _bare(token: Token) -> str | None:
    return token.bare if isinstance(token, Word) else None


def _assigned(token: Word) -> bool:
    first = token.parts[0]
    return first.kind == "text" and not first.quoted and bool(_ASSIGNMENT.match(first.text))


def _matching(tokens: Sequence[Token], at: int) -> int:
    """Return where the compound command that starts at ``at`` ends."""
    stack: list[str] = []
    for position in range(at, len(tokens)):
        word = _bare(tokens[position])
        if word is None:
            continue
        if word in _ENDS and (position == at or _starts_command(tokens, position)):
            stack.append(_ENDS[word])
        elif stack and word == stack[-1]:
            stack.pop()
            if not stack:
                return position
    return len(tokens)


def _starts_command(tokens: Sequence[Token], at: int) -> bool:
    before = tokens[at - 1]
    return isinstance(before, Operator) or _bare(before) in ("then", "else", "do", "{", "!")


def _is_function(tokens: Sequence[Token], at: int) -> bool:
    if _bare(tokens[at]) == "function":
        return True
    following = [token.text for token in tokens[at + 1 : at + 3] if isinstance(token, Operator)]
    return following == ["(", ")"]


def _branches(body: Sequence[Token]) -> list[tuple[Sequence[Token] | None, Sequence[Token]]]:
    """Return test and commands of each branch of an ``if``; the test of ``else`` is None."""
    found: list[tuple[Sequence[Token] | None, Sequence[Token]]] = []
    depth, start, test = 0, 0, None
    for position, token in enumerate(body):
        word = _bare(token)
        if word in _ENDS and (position == 0 or _starts_command(body, position)):
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


def _shell_text(words: Sequence[str]) -> int | None:
    """Return the position of the script in ``... bash -c SCRIPT``, or None."""
    for position in range(len(words) - 2):
        shell = words[position].rsplit("/", 1)[-1]
        options = words[position + 1]
        if shell in ("bash", "sh", "zsh") and re.fullmatch(r"-[a-z]*c", options):
            return position + 2
    return None
