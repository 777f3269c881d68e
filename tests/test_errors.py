"""The exception tree in the docstring of `towline.errors` is the tree in the code."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import towline
from towline import errors

ROOT = Path(towline.__file__).parent


def documented() -> dict[str, str]:
    """The parent of every exception in the docstring."""
    found: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"^((?:    )+)([A-Z]\w+)(?:  +\S.*)?$", line):
            depth = len(match[1]) // 4 - 1
            path[depth:] = [match[2]]
            if depth:
                found[match[2]] = path[depth - 1]
    return found


def defined() -> dict[str, list[str]]:
    """The bases of every class in the source."""
    return {
        node.name: [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }


def test_every_public_exception_is_in_the_tree() -> None:
    classes = defined()

    def is_exception(name: str) -> bool:
        known = getattr(builtins, name, None)
        if isinstance(known, type):
            return issubclass(known, BaseException)
        return any(is_exception(base) for base in classes.get(name, []))

    public = {name for name in classes if is_exception(name) and not name.startswith("_")} - {"TowlineError"}
    tree = documented()
    assert public == set(tree)
    assert {name: parent for name, parent in tree.items() if parent not in classes[name]} == {}
