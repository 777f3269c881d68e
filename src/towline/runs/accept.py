"""Accept expressions: which sessions to keep, as in `reward >= 1 and turns <= 30 and end_reason == "exited"`.

The syntax is Python's, with comparisons, `and`, `or`, `not`, `in`, arithmetic and parentheses over the names of `NAMES`. It
is parsed into a tree and never executed. Names and types are checked at parse time, so that mistakes surface before
anything runs. An expression that needs a value which a session lacks rejects the session: a session without a score is
never taken for one with reward 0.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from towline.errors import TowlineError

NUMBER, TEXT, BOOLEAN, ANY = "number", "text", "boolean", "anything"
NAMES: Mapping[str, str] = {
    "reward": NUMBER,
    "reward_status": TEXT,
    "components": "group of numbers",
    "state": TEXT,
    "end_reason": TEXT,
    "exit_code": NUMBER,
    "turns": NUMBER,
    "chains": NUMBER,
    "trained_tokens": NUMBER,
    "row_tokens": NUMBER,
    "sampled_tokens": NUMBER,
    "malformed_calls": NUMBER,
    "truncated": BOOLEAN,
    "seconds": NUMBER,
    "task_id": TEXT,
    "harness": TEXT,
    "sample": NUMBER,
    "attempt": NUMBER,
    "metadata": "group of anything",
}
"""Every name and its type. Groups are accessed by member: `components.tests`, `metadata.difficulty`."""

_LONGEST, _DEEPEST = 2000, 50
"""Maximum number of characters, and of levels of nesting."""
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, choices: value in choices,
    ast.NotIn: lambda value, choices: value not in choices,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class AcceptError(TowlineError):
    """An invalid expression; the message names the part and the reason."""


class _Missing(Exception):
    """The session lacks a value that the expression needs."""


@dataclass(frozen=True)
class Accept:
    """A checked expression."""

    text: str
    tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Accept:
        if len(text) > _LONGEST:
            raise AcceptError(f"the expression has {len(text)} characters; at most {_LONGEST} are allowed")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deeply"
            raise AcceptError(f"cannot parse {text[:100]!r}: {reason}") from error
        _check_depth(tree)
        kind = _kind(tree)
        if kind not in (BOOLEAN, ANY):
            raise AcceptError(f"{text!r} is a {kind}; compare it with something, as in 'reward >= 1'")
        return cls(text.strip(), tree)

    def __call__(self, values: Mapping[str, Any]) -> bool:
        """Whether a session with these values is accepted; `None` counts as missing."""
        try:
            return bool(_value(self.tree, values))
        except (_Missing, ZeroDivisionError, OverflowError):
            return False
        except TypeError as error:
            raise AcceptError(f"{self.text!r}: {error}") from error


def _check_depth(tree: ast.AST) -> None:
    level: list[ast.AST] = [tree]
    for _ in range(_DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise AcceptError(f"the expression is nested deeper than {_DEEPEST} levels; simplify it")


def _kind(node: ast.expr) -> str:
    """The type of a node; raises `AcceptError` for syntax that is not allowed."""
    match node:
        case ast.BoolOp(values=parts):
            for part in parts:
                _expect(part, BOOLEAN)
            return BOOLEAN
        case ast.UnaryOp(op=ast.Not(), operand=part):
            _expect(part, BOOLEAN)
            return BOOLEAN
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=part):
            _expect(part, NUMBER)
            return NUMBER
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            _expect(left, NUMBER)
            _expect(right, NUMBER)
            return NUMBER
        case ast.Compare(left=left, ops=ops, comparators=others):
            _comparison(left, ops, others)
            return BOOLEAN
        case ast.Constant(value=bool()):
            return BOOLEAN
        case ast.Constant(value=int() | float() as number):
            if not math.isfinite(number):
                raise AcceptError(f"{_text(node)} is too large")
            return NUMBER
        case ast.Constant(value=str()):
            return TEXT
        case ast.Name() | ast.Attribute():
            return _named(node)
    raise AcceptError(f"{_text(node)!r} is not allowed; use comparisons, and, or, not, in, + - * /")


def _comparison(left: ast.expr, ops: list[ast.cmpop], others: list[ast.expr]) -> None:
    for op, right in zip(ops, others, strict=True):
        if type(op) not in _COMPARISONS:
            raise AcceptError("'is' is not allowed; use ==")
        kind = _kind(left)
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple) or not right.elts:
                raise AcceptError(f"{_text(right)!r}: 'in' needs a list, as in end_reason in ['exited', 'limit']")
            for choice in right.elts:
                _expect(choice, kind)
            return
        _expect(right, kind)
        if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and BOOLEAN in (kind, _kind(right)):
            raise AcceptError(f"{_text(left)!r} is a boolean and cannot be ordered")
        left = right


def _expect(node: ast.expr, wanted: str) -> None:
    found = _kind(node)
    if found != wanted and ANY not in (found, wanted):
        raise AcceptError(f"{_text(node)!r} is a {found}, but a {wanted} is needed")


def _named(node: ast.Name | ast.Attribute) -> str:
    group, name = (node.value, node.attr) if isinstance(node, ast.Attribute) else (None, node.id)
    if group is None:
        kind = NAMES.get(name)
        if kind is None:
            raise AcceptError(f"unknown name {name!r}; choose among {', '.join(NAMES)}")
        if kind.startswith("group"):
            raise AcceptError(f"{name!r} is a group of values; name a member, as in {name}.something")
        return kind
    kind = NAMES.get(group.id, "") if isinstance(group, ast.Name) else ""
    if not kind.startswith("group"):
        raise AcceptError(f"{_text(node)!r}: only components and metadata have members")
    return kind.removeprefix("group of ").removesuffix("s") if kind.endswith("numbers") else ANY


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, values) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_value(part, values) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _value(part, values)
        case ast.UnaryOp(op=ast.USub(), operand=part):
            return -_value(part, values)
        case ast.UnaryOp(operand=part):
            return _value(part, values)
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_value(left, values), _value(right, values))
        case ast.Compare(left=left, ops=ops, comparators=others):
            return _compared(_value(left, values), ops, others, values)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element, values) for element in elements]
        case ast.Name(id=name):
            return _present(values.get(name))
        case ast.Attribute(value=ast.Name(id=group), attr=name):
            return _present((values.get(group) or {}).get(name))
        case ast.Constant(value=value):
            return value
    raise AssertionError(f"{ast.dump(node)} passed the check")


def _compared(left: Any, ops: list[ast.cmpop], others: list[ast.expr], values: Mapping[str, Any]) -> bool:
    for op, node in zip(ops, others, strict=True):
        right = _value(node, values)
        if not _COMPARISONS[type(op)](left, right):
            return False
        left = right
    return True


def _present(value: Any) -> Any:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise _Missing
    return value


def _text(node: ast.AST) -> str:
    return ast.unparse(node)
