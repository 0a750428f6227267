"""The static subset of shell: assignments, arrays, defaults, ``export``, simple ``if``.

Nothing is executed. A variable that the script does not set keeps its source text (``${X}``) and
is reported with its place; so is every construct that is not followed (loops, functions, commands
in ``$(...)``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_doctor.config.loaders.shell_conditions import condition
from fsdp_doctor.config.loaders.shell_expand import Expander
from fsdp_doctor.config.loaders.shell_syntax import (
    ASSIGNMENT,
    ENDS,
    bare_word,
    branches,
    end_of,
    inner_script,
    is_assignment,
    is_function,
    without_heredocs,
)
from fsdp_doctor.config.loaders.shell_words import (
    Operator,
    Part,
    Token,
    Word,
    shell_tokens,
)
from fsdp_doctor.errors import InputError

MAX_SCRIPT = 256 << 10
"""Longest script that is read, in characters."""
_MAX_DEPTH = 8
_MAX_NESTING = 32
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

    Raises InputError where the text is too large or variables expand without bound.
    """
    if len(text) > MAX_SCRIPT:
        raise InputError(f"larger than {MAX_SCRIPT >> 10} KiB: not a launch script", where=source)
    evaluator = _Evaluator(source)
    evaluator.run(text, 1)
    return evaluator.script


class _Evaluator:
    def __init__(self, source: str) -> None:
        self.script = Script()
        self._values = Expander(source)
        self.script.unresolved = self._values.unresolved
        self._depth = 0
        self._nesting = 0
        self._verdict: bool | None = True

    def run(self, text: str, line: int) -> None:
        self._depth += 1
        if self._depth <= _MAX_DEPTH:
            self._block(list(shell_tokens(without_heredocs(text), line)))
        self._depth -= 1

    def _block(self, tokens: Sequence[Token]) -> None:
        self._nesting += 1
        if self._nesting <= _MAX_NESTING:
            self._commands(tokens)
        elif tokens:
            self._values.unknown("nested too deeply", tokens[0].line)
        self._nesting -= 1

    def _commands(self, tokens: Sequence[Token]) -> None:
        at = 0
        while at < len(tokens):
            token = tokens[at]
            if isinstance(token, Operator):
                at = self._after(tokens, at, token)
                continue
            keyword = token.bare
            if keyword in ENDS:
                end = end_of(tokens, at)
                self._compound(keyword, tokens[at + 1 : end], token.line)
                at = end + 1
            elif is_function(tokens, at):
                body = next((i for i in range(at, len(tokens)) if bare_word(tokens[i]) == "{"), at)
                self._values.unknown(f"function {keyword or ''}".strip(), token.line)
                at = max(end_of(tokens, body), at) + 1
            else:
                at = self._simple(tokens, at)

    def _after(self, tokens: Sequence[Token], at: int, operator: Operator) -> int:
        """Step over an operator, and over the command behind ``&&`` or ``||`` that is not run."""
        wanted = {"&&": True, "||": False}.get(operator.text)
        if wanted is None or self._verdict is wanted:
            return at + 1
        if self._verdict is None:
            self._values.unknown("a command that depends on a test", operator.line)
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
            self._values.unknown(f"{keyword} ... {ENDS[keyword]}", line)

    def _if(self, body: Sequence[Token], line: int) -> None:
        for test, branch in branches(body):
            verdict = True if test is None else self._test(test)
            if verdict is None:
                self._values.unknown("if: not known which branch is taken", line)
                return
            if verdict:
                self._block(branch)
                return

    def _test(self, tokens: Sequence[Token]) -> bool | None:
        words: list[str] = []
        for token in tokens:
            if isinstance(token, Word):
                expanded = [text for text, _ in self._values.expand(token, report=False)]
                words += expanded or ([""] if any(p.quoted for p in token.parts) else [])
            elif token.text in ("&&", "||", ">"):
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
                if token.text == ">":
                    at += 2  # a redirection and its target
                    continue
                if token.text in _SEPARATORS:
                    break
                at += 1
                continue
            if not words and is_assignment(token):
                at = self._assign(tokens, at, environment)
                continue
            if words and words[0] in _EXPORTS and is_assignment(token):
                at = self._assign(tokens, at, None, exported=words[0] == "export")
                continue
            for text, line in self._values.expand(token):
                words.append(text)
                lines.append(line)
            at += 1
        if words:
            self._command(words, lines, environment)
        else:
            self._values.variables |= environment
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
                if known in self._values.variables:
                    self.script.environment[known] = self._values.variables[known]
            return
        if name == "unset":
            for gone in words[1:]:
                self._values.variables.pop(gone, None)
                self._values.arrays.pop(gone, None)
                self.script.environment.pop(gone, None)
            return
        if name == "eval":
            self.run(" ".join(words[1:]), lines[0])
            return
        inner = inner_script(words)
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
        match = ASSIGNMENT.match(word.parts[0].text)
        assert match is not None
        name, append = match[1], bool(match[2])
        following = tokens[at + 1] if at + 1 < len(tokens) else None
        empty = len(word.parts) == 1 and match.end() == len(word.parts[0].text)
        if empty and isinstance(following, Operator) and following.text == "(":
            return self._assign_array(tokens, at + 2, name, append=append)
        rest = Part("text", word.parts[0].text[match.end() :], word.parts[0].quoted)
        value = self._values.joined(Word((rest, *word.parts[1:]), word.line))
        if append:
            value = self._values.variables.get(name, "") + value
        if environment is not None:
            environment[name] = value
        self._values.arrays.pop(name, None)
        if environment is None or exported:
            self._values.variables[name] = value
        if exported:
            self.script.environment[name] = value
        return at + 1

    def _assign_array(self, tokens: Sequence[Token], at: int, name: str, *, append: bool) -> int:
        items = list(self._values.arrays.get(name, [])) if append else []
        while at < len(tokens):
            token = tokens[at]
            at += 1
            if isinstance(token, Word):
                items += self._values.expand(token)
            elif token.text == ")":
                break
        self._values.arrays[name] = items
        return at
