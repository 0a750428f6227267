"""The language of rule conditions: text to a small syntax tree. Nothing is ever executed.

    use_megatron_fsdp and ckpt_format != 'fsdp_dtensor'
    set(recompute_method) or 'moe' in recompute_modules
    (world_size / tensor_model_parallel_size) % 8 != 0

Names are dotted native keys; one with other characters stands in backticks. Strings stand in
quotes. Operators, from the loosest: ``or``, ``and``, ``not``, comparison and ``in``, ``+ -``,
``* / %``. Functions are listed in ``FUNCTIONS``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

FUNCTIONS: Mapping[str, tuple[int, ...]] = {
    "set": (1,),
    "unset": (1,),
    "written": (1,),
    "words": (1,),
    "count": (1,),
    "version": (2,),
    "any_key": (1,),
    "mentions": (2,),
}
"""Function -> how many arguments it takes; their meaning is in ``evaluate``."""

MAX_LENGTH = 2000
_MAX_DEPTH = 40
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
    r"|(?P<text>'[^']*'|\"[^\"]*\")"
    r"|(?P<quoted>`[^`]+`)"
    r"|(?P<name>[A-Za-z_]\w*(?:\.\w+)*)"
    r"|(?P<op>==|!=|<=|>=|[-<>+*/%()\[\],]))"
)
_CONSTANTS: Mapping[str, Any] = {"true": True, "false": False, "null": None}
_COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">="})
_WORDS = frozenset({"and", "or", "not", "in"})


@dataclass(frozen=True, slots=True)
class Literal:
    """A number, string, boolean or null."""

    value: Any


@dataclass(frozen=True, slots=True)
class Name:
    """A key, looked up when the condition is evaluated."""

    name: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list of expressions."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of ``FUNCTIONS``."""

    function: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator and its operands (one for ``not`` and negation)."""

    operator: str
    operands: tuple[Node, ...]


Node = Literal | Name | Items | Call | Operation


class ExpressionError(ValueError):
    """A condition that is not in the language."""


def parse(text: str, definitions: Mapping[str, Node] | None = None) -> Node:
    """Return the syntax tree of a condition; names in ``definitions`` stand for their trees.

    Raises ExpressionError, which says where.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    parser = _Parser(list(_tokens(text)), definitions or {})
    node = parser.disjunction(0)
    parser.expect("end")
    return node


def names_of(node: Node) -> Iterator[str]:
    """Yield the keys a condition looks up, in order of appearance, perhaps repeatedly."""
    if isinstance(node, Name):
        yield node.name
    elif isinstance(node, Call) and node.function in ("version", "any_key"):
        return
    elif not isinstance(node, Literal):
        children = {Items: "items", Call: "arguments", Operation: "operands"}[type(node)]
        for child in getattr(node, children):
            yield from names_of(child)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    text = text.rstrip()
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise ExpressionError(f"cannot read {text[position : position + 20]!r}")
        position = found.end()
        kind = str(found.lastgroup)
        value = found[kind]
        if (kind == "name" and value in _WORDS) or kind == "op":
            kind = value
        yield kind, value
    yield "end", ""


class _Parser:
    """Recursive descent; ``depth`` bounds the recursion."""

    def __init__(self, tokens: list[tuple[str, str]], definitions: Mapping[str, Node]) -> None:
        self._tokens = tokens
        self._position = 0
        self._definitions = definitions

    def _peek(self) -> str:
        return self._tokens[self._position][0]

    def _next(self) -> tuple[str, str]:
        token = self._tokens[self._position]
        self._position += 1
        return token

    def expect(self, kind: str) -> None:
        found, value = self._next()
        if found != kind:
            raise ExpressionError(f"expected {kind}, found {value or found!r}")

    def disjunction(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise ExpressionError("nested too deeply")
        operands = [self._conjunction(depth)]
        while self._peek() == "or":
            self._next()
            operands.append(self._conjunction(depth))
        return operands[0] if len(operands) == 1 else Operation("or", tuple(operands))

    def _conjunction(self, depth: int) -> Node:
        operands = [self._negation(depth)]
        while self._peek() == "and":
            self._next()
            operands.append(self._negation(depth))
        return operands[0] if len(operands) == 1 else Operation("and", tuple(operands))

    def _negation(self, depth: int) -> Node:
        if self._peek() == "not":
            if depth > _MAX_DEPTH:
                raise ExpressionError("nested too deeply")
            self._next()
            return Operation("not", (self._negation(depth + 1),))
        return self._comparison(depth)

    def _comparison(self, depth: int) -> Node:
        left = self._sum(depth)
        kind = self._peek()
        if kind in _COMPARISONS or kind == "in":
            self._next()
            return Operation(kind, (left, self._sum(depth)))
        if kind == "not":
            self._next()
            self.expect("in")
            return Operation("not", (Operation("in", (left, self._sum(depth))),))
        return left

    def _sum(self, depth: int) -> Node:
        node = self._product(depth)
        while self._peek() in ("+", "-"):
            operator = self._next()[0]
            node = Operation(operator, (node, self._product(depth)))
        return node

    def _product(self, depth: int) -> Node:
        node = self._atom(depth)
        while self._peek() in ("*", "/", "%"):
            operator = self._next()[0]
            node = Operation(operator, (node, self._atom(depth)))
        return node

    def _atom(self, depth: int) -> Node:
        kind, value = self._next()
        if kind == "number":
            return Literal(int(value) if value.isdigit() else float(value))
        if kind == "text":
            return Literal(value[1:-1])
        if kind == "quoted":
            return Name(value[1:-1])
        if kind == "-":
            if depth > _MAX_DEPTH:
                raise ExpressionError("nested too deeply")
            return Operation("negate", (self._atom(depth + 1),))
        if kind == "(":
            node = self.disjunction(depth + 1)
            self.expect(")")
            return node
        if kind == "[":
            return Items(self._list("]", depth + 1))
        if kind == "name":
            return self._named(value, depth)
        raise ExpressionError(f"unexpected {value or kind!r}")

    def _named(self, name: str, depth: int) -> Node:
        if self._peek() == "(":
            self._next()
            arguments = self._list(")", depth + 1)
            if len(arguments) not in FUNCTIONS.get(name, ()):
                raise ExpressionError(f"there is no function {name} of {len(arguments)} arguments")
            _check_arguments(name, arguments)
            return Call(name, arguments)
        if name in _CONSTANTS:
            return Literal(_CONSTANTS[name])
        return self._definitions.get(name, Name(name))

    def _list(self, end: str, depth: int) -> tuple[Node, ...]:
        items: list[Node] = []
        while self._peek() != end:
            if items:
                self.expect(",")
            items.append(self.disjunction(depth))
        self._next()
        return tuple(items)


def _check_arguments(function: str, arguments: tuple[Node, ...]) -> None:
    if function in ("set", "unset", "written") and not isinstance(arguments[0], Name):
        raise ExpressionError(f"{function}() takes a key")
    if function in ("version", "any_key") and not all(
        isinstance(argument, Literal) and isinstance(argument.value, str) for argument in arguments
    ):
        raise ExpressionError(f"{function}() takes quoted text")
