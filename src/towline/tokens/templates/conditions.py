"""The conditions of a chat template: the strings that it looks for in messages, and the counts that it compares.

A template may look anywhere in the history before it writes the end of a prompt: for `/no_think` in any message, for a
leading `<think>`, for the number of messages. `find_conditions` reads from its Jinja source the strings and numbers that
can decide something: in conditions, comparisons, filters and method calls, directly or through variables. It may find
more than matters, never less than the source spells out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import jinja2
from jinja2 import nodes

_MAX_COUNT = 64
"""Larger numbers are not taken for message counts."""
_STRUCTURE_FIELDS = frozenset(("role", "type"))
"""Fields whose values are structure, not message text."""
_TEXT_FIELDS = frozenset(("content", "text", "reasoning", "reasoning_content", "thinking", "name", "arguments"))
"""Fields that hold message text."""
_KEYS = frozenset(
    ("role", "content", "text", "type", "name", "id", "function", "arguments", "parameters", "properties", "required",
     "description", "items", "enum", "image", "video", "audio", "image_url", "video_url", "parts", "blocks", "tool_calls",
     "tool_call_id", "tool_responses", "reasoning", "reasoning_content", "thinking")
)  # fmt: skip
"""Keys of messages, calls and declarations: looked up in a mapping, not in a text."""
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_TESTING = frozenset(("startswith", "endswith", "__contains__"))
_SPLITTING = frozenset(
    ("split", "rsplit", "partition", "rpartition", "find", "rfind", "index", "rindex", "count", "replace",
     "removeprefix", "removesuffix")
)  # fmt: skip
"""String methods whose result depends on what the text contains."""
_MIN_LENGTH = 3
"""Shorter strings are in most texts: they only count at the start or end of a text, if the template looks there."""


@dataclass(frozen=True, slots=True)
class TemplateConditions:
    """What a template's output may depend on."""

    inside: frozenset[str] = frozenset()
    """Strings that the template looks for anywhere in a text."""
    edges: frozenset[str] = frozenset()
    """Strings that the template looks for at the start or end of a text."""
    whole: frozenset[str] = frozenset()
    """Strings that the template compares whole texts with."""
    thresholds: int = 2
    """Counts above this one are all the same to the template."""
    moduli: frozenset[int] = frozenset()
    """Divisors whose remainders the template looks at."""

    def pattern(self) -> re.Pattern[str] | None:
        """Matches any of these strings in a text, ignoring case; `None` if there are none."""
        parts = [re.escape(text.strip()) for text in self.inside]
        edges = [re.escape(text.strip()) for text in self.edges]
        wholes = [re.escape(text.strip()) for text in self.whole]
        if edges:
            either = "|".join(sorted(edges))
            parts.append(rf"\A\s*(?:{either})|(?:{either})\s*\Z")
        if wholes:
            parts.append(rf"\A\s*(?:{'|'.join(sorted(wholes))})\s*\Z")
        return re.compile("|".join(sorted(parts)), re.IGNORECASE) if parts else None


def find_conditions(environment: jinja2.Environment, sources: Iterable[str]) -> TemplateConditions:
    """The conditions of these templates combined."""
    found = [_ConditionFinder(environment.parse(source)) for source in sources]
    inside = frozenset[str]().union(*(each.inside for each in found))
    return TemplateConditions(
        inside,
        frozenset[str]().union(*(each.edges for each in found)),
        frozenset[str]().union(*(each.whole for each in found)) - inside,
        max((2, *(number + 1 for each in found for number in each.numbers))),
        frozenset[int]().union(*(each.moduli for each in found)),
    )


class _ConditionFinder:
    """One pass over a template's syntax tree."""

    def __init__(self, tree: nodes.Template):
        self.inside: set[str] = set()
        self.edges: set[str] = set()
        self.whole: set[str] = set()
        self.numbers: set[int] = set()
        self.moduli: set[int] = set()
        self._mappings = _mappings(tree)
        self._bound = _bound(tree)
        self._items = {id(loop.iter) for loop in tree.find_all(nodes.For)}
        for node in tree.find_all(nodes.Compare):
            self._compare(node)
        for call in tree.find_all(nodes.Call):
            method = call.node.attr if isinstance(call.node, nodes.Getattr) else ""
            if method in _TESTING:
                self._add_part(*call.args)
            elif method in _SPLITTING:
                self.inside |= {text for value in call.args for text in self._strings(value) if not _short(text)}
        for kind in (nodes.Filter, nodes.Test):
            for applied in tree.find_all(kind):
                self._add_whole(*applied.args)
        for item in tree.find_all(nodes.Getitem):
            if self._lists_messages(item.node):
                self.numbers |= {abs(n) for n in self._numbers(item.arg) if abs(n) < _MAX_COUNT}
        for mod in tree.find_all(nodes.Mod):
            self.moduli |= {n for n in self._numbers(mod.right) if 1 < n <= _MAX_COUNT}

    def _compare(self, node: nodes.Compare) -> None:
        left = node.expr
        for operand in node.ops:
            right = operand.expr
            if operand.op in ("in", "notin"):
                self._contained(left, right)
            else:
                self._compared(left, right)
                self._compared(right, left)
            left = right

    def _compared(self, one: nodes.Expr, other: nodes.Expr) -> None:
        """`one` is compared with `other`: a text, part of a text, a count or a field of a message."""
        if self._counts(other):
            self.numbers |= {n for n in self._numbers(one) if 0 <= n < _MAX_COUNT}
        if isinstance(other, nodes.Compare | nodes.And | nodes.Or | nodes.Not) or _is_structure(other):
            return
        if isinstance(other, nodes.Name | nodes.Const | nodes.Getattr) or _field(other) is not None:
            self._add_whole(one)
        else:
            self._add_part(one)

    def _counts(self, expression: nodes.Expr) -> bool:
        """Whether an expression may count messages: a loop index, a counter, a length of messages."""
        for name in _names(expression):
            bound = self._bound.get(name, ())
            if name == "loop" or any(isinstance(value, nodes.Call) and _is_namespace(value) for value in bound):
                return True
        lengths = [expression] if isinstance(expression, nodes.Filter) else []
        lengths += expression.find_all(nodes.Filter)
        counted = [part.node for part in lengths if part.name in ("length", "count") and part.node is not None]
        return any(self._lists_messages(part) for part in counted)

    def _lists_messages(self, expression: nodes.Expr) -> bool:
        """Whether an expression is the list of messages, or part of it."""
        waiting: list[nodes.Node] = [expression]
        followed: set[str] = set()
        while waiting:
            part = waiting.pop()
            if isinstance(part, nodes.Name) and part.name not in followed:
                if part.name == "messages":
                    return True
                followed.add(part.name)
                waiting += [value for value in self._bound.get(part.name, ()) if id(value) not in self._items]
            elif isinstance(part, nodes.Filter | nodes.Getitem) and part.node is not None and _field(part) is None:
                waiting.append(part.node)
            elif isinstance(part, nodes.Add | nodes.CondExpr):
                waiting += part.iter_child_nodes()
        return False

    def _contained(self, left: nodes.Expr, right: nodes.Expr) -> None:
        """`left in right`: a string in a text, a text among strings, or a key in a mapping."""
        if not _is_structure(left):
            self._add_whole(right)
        strings = set(self._strings(left))
        if isinstance(right, nodes.Name) and right.name in self._mappings:
            strings = {text for text in strings if not _KEY.match(text)}
        elif _field(right) is None:
            strings -= _KEYS
        elif _field(right) not in _TEXT_FIELDS:
            return
        is_text = self._is_message_text(right)
        self.inside |= {text for text in strings if is_text or not _short(text)}

    def _is_message_text(self, expression: nodes.Expr) -> bool:
        """Whether an expression provably comes from message text."""
        waiting: list[nodes.Node] = [expression]
        followed: set[str] = set()
        while waiting:
            part = waiting.pop()
            if isinstance(part, nodes.Expr) and _field(part) in _TEXT_FIELDS - {"name"}:
                return True
            if isinstance(part, nodes.Name) and part.name not in followed:
                followed.add(part.name)
                waiting += self._bound.get(part.name, ())
            waiting += part.iter_child_nodes()
        return False

    def _add_part(self, *expressions: nodes.Expr) -> None:
        """A text is tested for a string at its start or end, or part of it is compared with one."""
        for expression in expressions:
            for text in self._strings(expression):
                (self.edges if _short(text) else self.inside).add(text)

    def _add_whole(self, *expressions: nodes.Expr) -> None:
        for expression in expressions:
            self.whole |= set(self._strings(expression))

    def _strings(self, expression: nodes.Expr) -> Iterator[str]:
        for value in self._constants(expression):
            if isinstance(value, str) and value.strip():
                yield value

    def _numbers(self, expression: nodes.Node) -> Iterator[int]:
        for value in self._constants(expression):
            if isinstance(value, int) and not isinstance(value, bool):
                yield value

    def _constants(self, expression: nodes.Node) -> Iterator[object]:
        """Every constant in an expression, and in the values of its variables."""
        waiting: list[nodes.Node] = [expression]
        followed: set[str] = set()
        while waiting:
            part = waiting.pop()
            with suppress(nodes.Impossible):
                yield part.as_const() if isinstance(part, nodes.Expr) else None
            if isinstance(part, nodes.Const):
                continue
            if isinstance(part, nodes.Name | nodes.NSRef) and part.name not in followed:
                followed.add(part.name)
                waiting += self._bound.get(part.name, ())
            if isinstance(part, nodes.Getitem) and isinstance(part.arg, nodes.Const):
                # A key says where to look, not what to look for.
                waiting.append(part.node)
            else:
                waiting += part.iter_child_nodes()


def _bound(tree: nodes.Template) -> dict[str, list[nodes.Node]]:
    """All values that each variable is set to."""
    bound: dict[str, list[nodes.Node]] = {}

    def bind(target: nodes.Node, value: nodes.Node) -> None:
        if isinstance(target, nodes.Name | nodes.NSRef):
            bound.setdefault(target.name, []).append(value)
        for part in target.iter_child_nodes():
            bind(part, value)

    for assign in tree.find_all(nodes.Assign):
        bind(assign.target, assign.node)
    for block in tree.find_all(nodes.AssignBlock):
        for output in block.body:
            bind(block.target, output)
    for loop in tree.find_all(nodes.For):
        bind(loop.target, loop.iter)
    for macro in tree.find_all(nodes.Macro):
        for name, default in zip(reversed(macro.args), reversed(macro.defaults), strict=False):
            bind(name, default)
    return bound


def _mappings(tree: nodes.Template) -> set[str]:
    """Variables whose fields are read: a string that is looked for in one is a key."""
    found: set[str] = set()
    methods = {id(call.node) for call in tree.find_all(nodes.Call)}
    for part in tree.find_all(nodes.Getattr):
        if isinstance(part.node, nodes.Name) and id(part) not in methods:
            found.add(part.node.name)
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.node, nodes.Name) and isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, str):
            found.add(item.node.name)
    return found


def _field(node: nodes.Expr) -> str | None:
    if isinstance(node, nodes.Getattr):
        return node.attr
    key: nodes.Expr | None = node.arg if isinstance(node, nodes.Getitem) else None
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get" and node.args:
        key = node.args[0]
    return key.value if isinstance(key, nodes.Const) and isinstance(key.value, str) else None


def _is_structure(node: nodes.Expr) -> bool:
    """Whether a value is a role or a type, in any case."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr != "get":
        node = node.node.node
    return _field(node) in _STRUCTURE_FIELDS


def _names(expression: nodes.Expr) -> Iterator[str]:
    if isinstance(expression, nodes.Name):
        yield expression.name
    for name in expression.find_all(nodes.Name):
        yield name.name


def _is_namespace(call: nodes.Call) -> bool:
    return isinstance(call.node, nodes.Name) and call.node.name == "namespace"


def _short(text: str) -> bool:
    return len(text.strip()) < _MIN_LENGTH
