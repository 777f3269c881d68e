"""The `swebench` package, if it is installed: where it is, and which log parsers it has. It is never imported here.

Its top imports what takes seconds and gigabytes; its grading runs in a child process (`towline.evaluators.swe`).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path


def folder() -> Path | None:
    """The package's folder; `None` if it is not installed."""
    found = importlib.util.find_spec("swebench")
    places = list(found.submodule_search_locations or []) if found is not None else []
    return Path(places[0]) if places else None


@functools.cache
def parsers() -> frozenset[str]:
    """The names of its log parsers; empty if it is not installed, or an older version without a registry."""
    place = folder()
    file = place / "harness" / "log_parsers" / "__init__.py" if place is not None else None
    if file is None or not file.is_file():
        return frozenset()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        named = isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "PARSER_REGISTRY" for target in node.targets
        )
        if named and isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            return frozenset(key for key in keys if isinstance(key, str))
    return frozenset()
