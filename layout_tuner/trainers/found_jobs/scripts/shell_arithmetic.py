"""Arithmetic of the shell over whole numbers that are known."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Final

MAX_LENGTH: Final = 1000
"""Most characters of an expression."""

_BITS: Final = 63
"""bash computes with signed numbers of 64 bits."""

_NOT_READ: Final = re.compile(r"[^\w\s+*/%()<>=!-]|//|\*\*|\+\+|--")

_OPERATORS: Final[dict[type[ast.AST], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class ArithmeticUnknownError(Exception):
    """The expression has a value that is not known, or a form that is not read."""


def evaluated(expression: str, variable: Callable[[str], int]) -> int:
    """The value of an expression whose `$` are expanded already.

    Args:
        expression: numbers, names, + - * / %, comparisons, brackets.
        variable: the number that a name stands for; ArithmeticUnknownError where it has none.

    Raises:
        ArithmeticUnknownError: see there.
    """
    if len(expression) > MAX_LENGTH or _NOT_READ.search(expression):
        raise ArithmeticUnknownError
    try:
        tree = ast.parse(expression.replace("/", "//").strip() or "0", mode="eval").body
        return _value(tree, variable)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise ArithmeticUnknownError from error


def _value(tree: ast.expr, variable: Callable[[str], int]) -> int:
    match tree:
        case ast.Constant(value=int() as number):
            found = int(number)
        case ast.Name(id=name):
            found = variable(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_value(operand, variable)
        case ast.BinOp(left=left, op=op, right=right):
            found = _binary(op, _value(left, variable), _value(right, variable))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            found = int(_OPERATORS[type(op)](_value(left, variable), _value(right, variable)))
        case _:
            raise ArithmeticUnknownError
    if not -(1 << _BITS) <= found < 1 << _BITS:
        raise ArithmeticUnknownError
    return found


def _binary(op: ast.operator, left: int, right: int) -> int:
    if type(op) in _OPERATORS:
        return _OPERATORS[type(op)](left, right)
    if isinstance(op, ast.FloorDiv):  # towards zero, as in C
        quotient = abs(left) // abs(right)
        return quotient if (left < 0) == (right < 0) else -quotient
    if isinstance(op, ast.Mod):
        remainder = abs(left) % abs(right)
        return -remainder if left < 0 else remainder
    raise ArithmeticUnknownError
