"""The shape of the source tree: one name per thing, no cycles, small folders and files, a README per package.

`tests/test_imports.py` checks which package may import which. Its table has no cycle and covers imports inside functions
and under `TYPE_CHECKING`, so no two packages depend on each other, however an import is written. Here, between modules,
only imports that run when a module is loaded count: inside one package an annotation may name a type of its caller.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from test_imports import ALLOWED, PACKAGE, ROOT, imports, modules, part_of

REPOSITORY = Path(__file__).parents[1]
FOLDER_ENTRIES = 20
"""Most files and folders in one folder, `__init__`, `__main__`, `README.md` and `py.typed` not counted."""
PACKAGES = 24
"""The same for the package itself: its packages and top modules."""
TEST_FOLDERS = 34
"""The same for `tests/`: a folder per package, and what belongs to none."""
FILE_LINES = 450
README_LINES = 60
NOT_COUNTED = {"__init__.py", "__main__.py", "__pycache__", "README.md", "py.typed"}
OTHER_TESTS = {"adapters", "e2e", "faults", "security", "support", "surface"}
"""Folders of `tests/` that belong to no single package."""


def parsed(root: Path) -> Iterator[tuple[str, Path, ast.Module]]:
    for name, path in modules(root).items():
        yield name, path, ast.parse(path.read_text("utf-8"), str(path))


def duplicate_classes(root: Path) -> list[str]:
    """Public class names that more than one module defines."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, _, tree in parsed(root):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return [f"class {name}: {', '.join(where)}" for name, where in sorted(found.items()) if len(where) > 1]


def import_graph(root: Path) -> dict[str, set[str]]:
    """What each module imports when it is loaded, by explicit imports. A module loads its own packages anyway."""
    tree = modules(root)
    graph: dict[str, set[str]] = {}
    for name, path in tree.items():
        graph[name] = set()
        for made in imports(name, path):
            target = made.target.removeprefix(f"{PACKAGE}.") if made.target.startswith(f"{PACKAGE}.") else None
            if made.lazy or target is None:
                continue
            while target and target not in tree:
                target = target.rpartition(".")[0]
            if target and target != name:
                graph[name].add(target)
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """Import cycles, one per tangle: each is removed in turn until the rest has an order."""
    left = {name: set(targets) for name, targets in graph.items()}
    found = []
    while True:
        try:
            TopologicalSorter(left).prepare()
            return found
        except CycleError as error:
            cycle: list[str] = error.args[1]
            found.append(" → ".join(reversed(cycle)))
            left[cycle[1]].discard(cycle[0])


def unused_arrows(root: Path) -> list[str]:
    """Entries of the table of `tests/test_imports.py` that no module needs."""
    used: dict[str, set[str]] = defaultdict(set)
    tree = modules(root)
    for name, path in tree.items():
        for made in imports(name, path):
            first, _, rest = made.target.partition(".")
            if first == PACKAGE and rest:
                used[part_of(name)].add(part_of(rest).split(".")[0])
    return [
        f"`{part or PACKAGE}` does not import `{target}`: remove it from the table of tests/test_imports.py"
        for part, targets in ALLOWED.items()
        for target in sorted(targets - used[part])
    ]


def holds_files(path: Path) -> bool:
    """Whether it is a file, or a folder with more than the caches of modules that are gone."""
    return path.is_file() or any(one.is_file() and "__pycache__" not in one.parts for one in path.rglob("*"))


def large_folders(root: Path, top: int) -> list[str]:
    """Folders with more than `FOLDER_ENTRIES` entries; `root` itself may have `top`."""
    found = []
    for folder in [root, *sorted(path for path in root.rglob("*") if path.is_dir())]:
        if {"__pycache__", "node_modules"} & set(folder.parts) or "recorded" in folder.parts:
            continue
        count = sum(path.name not in NOT_COUNTED and holds_files(path) for path in folder.iterdir())
        most = top if folder == root else FOLDER_ENTRIES
        if count > most:
            found.append(f"{folder.relative_to(root.parent)} has {count} entries; at most {most}")
    return found


def large_files(root: Path) -> list[str]:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in sorted(root.rglob("*.py"))}
    return [
        f"{path.relative_to(root.parent)} has {length} lines; at most {FILE_LINES}"
        for path, length in lengths.items()
        if length > FILE_LINES
    ]


def packages(root: Path) -> list[Path]:
    return [path for path in sorted(root.iterdir()) if (path / "__init__.py").is_file()]


def missing_readmes(root: Path) -> list[str]:
    found = []
    for folder in packages(root):
        readme = folder / "README.md"
        if not readme.is_file():
            found.append(f"{folder.name} has no README.md")
        elif (length := len(readme.read_text("utf-8").splitlines())) > README_LINES:
            found.append(f"{folder.name}/README.md has {length} lines; at most {README_LINES}")
    return found


def undocumented_members(root: Path) -> list[str]:
    """Enum members without a docstring below them."""
    found = []
    for _, path, tree in parsed(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(_last(base) in _ENUMS for base in node.bases):
                for place, member in enumerate(node.body):
                    if isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name):
                        name = member.targets[0].id
                        below = node.body[place + 1] if place + 1 < len(node.body) else None
                        documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                        if not documented and not name.startswith("_"):
                            found.append(f"{path.relative_to(root.parent)}:{member.lineno} {node.name}.{name}")
    return found


_ENUMS = {"Enum", "StrEnum", "IntEnum", "Flag", "IntFlag"}


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def stray_tests(tests: Path, root: Path) -> list[str]:
    """Folders of tests that no package of the source has."""
    known = {folder.name for folder in packages(root)} | OTHER_TESTS
    return [
        f"tests/{folder.name} mirrors no package of src/{PACKAGE}"
        for folder in sorted(tests.iterdir())
        if folder.is_dir() and folder.name not in known and holds_files(folder) and not folder.name.startswith(".")
    ]


def dead_paths(repository: Path) -> list[str]:
    """Paths in backticks that do not exist, in docs/architecture.md and in the READMEs of packages.

    A path is relative to the file's folder, to the package, to the source or to the repository. A bare name may be
    that of any file or folder in the package or in its tests.
    """
    source = repository / "src" / PACKAGE
    texts = [repository / "docs" / "architecture.md", *sorted(source.rglob("README.md"))]
    found = []
    for text in (path for path in texts if path.is_file()):
        top = source.joinpath(*text.relative_to(source).parts[:1]) if text.is_relative_to(source) else source
        roots = (text.parent, top, source, source.parent, repository)
        inside = [path for folder in (top, repository / "tests" / top.name) for path in folder.rglob("*")]
        names = {f"{path.name}/" if path.is_dir() else path.name for path in inside}
        for number, line in enumerate(text.read_text("utf-8").splitlines(), 1):
            for path in re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", line):
                is_path = path.endswith(("/", ".py", ".md", ".toml")) and not path.startswith((".", "my_"))
                if is_path and path not in names | _OF_USERS and not any((root / path).exists() for root in roots):
                    found.append(f"{text.relative_to(repository)}:{number} names `{path}`, which does not exist")
    return found


_OF_USERS = {"towline.toml", "task.toml"}
"""Files that users write."""

RULES: dict[str, Callable[[], list[str]]] = {
    "no public class name twice": lambda: duplicate_classes(ROOT),
    "no import cycle": lambda: cycles(import_graph(ROOT)),
    "no unused arrow": lambda: unused_arrows(ROOT),
    "small folders": lambda: large_folders(ROOT, PACKAGES) + large_folders(REPOSITORY / "tests", TEST_FOLDERS),
    "small files": lambda: large_files(ROOT),
    "a meaning per enum member": lambda: undocumented_members(ROOT),
    "no dead path in the documentation": lambda: dead_paths(REPOSITORY),
    "a README per package": lambda: missing_readmes(ROOT),
    "tests mirror the source": lambda: stray_tests(REPOSITORY / "tests", ROOT),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_has_its_shape(rule: str) -> None:
    found = RULES[rule]()
    assert not found, "\n".join(found)


def test_every_violation_is_found(tmp_path: Path) -> None:
    root = tmp_path / PACKAGE
    files = {
        "__init__.py": "",
        "README.md": "",
        "errors.py": "class Wrong(Exception): ...\nclass _Own: ...",
        "engines/__init__.py": "from towline.engines.pool import Pool",
        "engines/pool.py": "class Pool: ...\nclass _Own: ...\ndef f():\n    from towline import engines",
        "sandboxes/__init__.py": "",
        "sandboxes/README.md": "line\n" * 61,
        "sandboxes/pool.py": "import towline.sandboxes.base\nclass Pool: ...",
        "sandboxes/base.py": "from towline.sandboxes.more import x\nfrom towline.errors import Wrong",
        "sandboxes/more.py": "from .pool import Pool\n" + "x = 1\n" * 450,
        "schema/__init__.py": 'class State(StrEnum):\n    A = "a"\n    """Told."""\n    B = "b"\n    _C = "c"\n',
        **{f"schema/m{number}.py": "" for number in range(21)},
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for folder in ("engines", "poems", "surface"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / "test_it.py").touch()
    assert duplicate_classes(root) == ["class Pool: engines.pool, sandboxes.pool"]
    (cycle,) = cycles(import_graph(root))
    assert set(re.split(" → ", cycle)) == {"sandboxes.base", "sandboxes.more", "sandboxes.pool"}
    assert "`engines` does not import `errors`" in "\n".join(unused_arrows(root))
    assert not [line for line in unused_arrows(root) if "`sandboxes` does not import `errors`" in line]
    assert large_folders(root, PACKAGES) == ["towline/schema has 21 entries; at most 20"]
    assert large_folders(root, 3)[0] == "towline has 4 entries; at most 3"
    assert large_files(root) == ["towline/sandboxes/more.py has 451 lines; at most 450"]
    assert missing_readmes(root) == [
        "engines has no README.md",
        "sandboxes/README.md has 61 lines; at most 60",
        "schema has no README.md",
    ]
    assert undocumented_members(root) == ["towline/schema/__init__.py:4 State.B"]
    (tmp_path / "src").mkdir()
    root.rename(tmp_path / "src" / PACKAGE)
    (tmp_path / "src" / PACKAGE / "sandboxes" / "README.md").write_text(
        "`pool.py` `gone.py` `engines/` `a/b` `towline.toml`"
    )
    assert dead_paths(tmp_path) == ["src/towline/sandboxes/README.md:1 names `gone.py`, which does not exist"]
    root = tmp_path / "src" / PACKAGE
    assert stray_tests(tmp_path / "tests", root) == ["tests/poems mirrors no package of src/towline"]


@pytest.mark.parametrize("framework", ["trl", "verl"])
def test_a_frameworks_environment_has_everything_that_towline_imports(framework: str) -> None:
    """These lists are installed without resolving dependencies."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = {_distribution(line) for line in project["dependencies"]}
    listed = {
        _distribution(line)
        for line in (REPOSITORY / "requirements" / "trainers" / f"{framework}.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    assert needed - listed == set()


def _distribution(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()
