"""Which keys a condition holds without: their absence is part of what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_doctor.config.rules.expression import Call, Literal, Name, Node, Operation, names_of

_EMPTY = (None, False, 0)


def absent_names(node: Node, *, negated: bool = False) -> Iterator[str]:
    """Yield the names whose absence can make the condition true, perhaps repeatedly.

    ``x > 1 or set(y)`` needs x or y; ``not x``, ``unset(x)`` and ``x != 1`` hold without x.
    """
    if isinstance(node, Name):
        if negated:
            yield node.name
    elif isinstance(node, Call):
        if (node.function == "unset") != negated:
            yield from names_of(node)
    elif isinstance(node, Operation):
        yield from _of_operation(node, negated=negated)


def _of_operation(node: Operation, *, negated: bool) -> Iterator[str]:
    if node.operator == "not":
        yield from absent_names(node.operands[0], negated=not negated)
    elif node.operator in ("and", "or"):
        for operand in node.operands:
            yield from absent_names(operand, negated=negated)
    else:
        empty = any(isinstance(o, Literal) and o.value in _EMPTY for o in node.operands)
        holds_without = node.operator == "!=" or (node.operator == "==" and empty)
        if holds_without != negated:
            yield from names_of(node)
