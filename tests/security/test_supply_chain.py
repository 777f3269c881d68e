"""Attacks through the packages that harness installs are made of: another package, another place, code at install time."""

from __future__ import annotations

import asyncio
import hashlib
import json
import lzma
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from support.security.attack import attack, without
from support.security.canaries import canary
from towline.harnesses import locks
from towline.harnesses.base import InstallError, Npm
from towline.harnesses.install_scripts import run_install_scripts
from towline.harnesses.locks.renew import TOOLS
from towline.harnesses.registry import all_harnesses
from towline.harnesses.toolchain import npm, pip_locked

GOOD = "sha512-" + "A" * 86 + "=="


def nothing(*_: Any) -> None:
    """A check that is gone."""


def lock_of(folder: Path, name: str, text: str) -> Any:
    """A block in which the shipped locks are those of a folder, with this one."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(lzma.compress(text.encode()))
    return without(("towline.harnesses.locks.data_folder", lambda: folder))()


@attack("read: installs without hashes", guard=without(("towline.harnesses.locks.check_npm_lock", nothing)))
@pytest.mark.parametrize(
    "package",
    [
        {"version": "1.0.0"},
        {"version": "1.0.0", "integrity": "sha1-AAAA"},
        {"version": "1.0.0", "integrity": GOOD, "resolved": "https://evil.example/x.tgz"},
        {"version": "git+ssh://git@evil.example/x.git", "integrity": GOOD},
        {"version": "https://evil.example/x.tgz", "integrity": GOOD},
        {"version": "1.0.0", "integrity": GOOD, "link": True},
        {"integrity": GOOD},
    ],
    ids=["no hash", "weak hash", "place", "git", "url", "link", "no version"],
)
def test_an_npm_lock_that_lets_another_package_in(tmp_path: Path, package: dict[str, Any]) -> bool:
    packages = {"": {"dependencies": {"a": "1.0.0"}}, "node_modules/a": package}
    with lock_of(tmp_path / "locks", "evil.npm.xz", json.dumps({"lockfileVersion": 3, "packages": packages})):
        try:
            return bool(locks.npm_lock("evil", ["a@1.0.0"]))
        except InstallError:
            return False


@attack("read: installs without hashes", guard=without(("towline.harnesses.locks.check_pypi_lock", nothing)))
@pytest.mark.parametrize(
    "line",
    [
        "b==1.0",
        "b @ https://evil.example/b.whl --hash=sha256:aa",
        "b @ git+https://evil.example/b",
        "--index-url https://evil.example/simple",
        "--extra-index-url=https://evil.example/simple",
        "-e ./b",
        "b>=1.0 --hash=sha256:aa",
        "-r other.txt",
    ],
)
def test_a_python_lock_that_lets_another_package_in(tmp_path: Path, line: str) -> bool:
    with lock_of(tmp_path / "locks", "evil.pypi.xz", f"a==1.0 --hash=sha256:aa\n{line}\n"):
        try:
            return bool(locks.pypi_lock("evil", ["a==1.0"]))
        except InstallError:
            return False


@attack(
    "read: installs without hashes", guard=without(("towline.harnesses.locks._outdated", lambda name: KeyError(name)))
)
@pytest.mark.parametrize("kind", ["npm", "pypi"])
def test_a_lock_of_other_packages(tmp_path: Path, kind: str) -> bool:
    """A preset that names another version than its lock would install what nobody has checked."""
    npm_text = json.dumps({"packages": {"": {"dependencies": {"a": "1.0.0"}}}})
    text = npm_text if kind == "npm" else "a==1.0 --hash=sha256:aa\n"
    with lock_of(tmp_path / "locks", f"evil.{kind}.xz", text):
        try:
            locks.npm_lock("evil", ["a@2.0.0"]) if kind == "npm" else locks.pypi_lock("evil", ["a==2.0"])
        except InstallError:
            return False
        except KeyError:
            return True
    return True


def _wheel(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "greeter-1.0-py3-none-any.whl"
    facts = "greeter-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("greeter.py", text)
        archive.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n")
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{facts}/RECORD", "")
    return wheel


@attack("read: installs without hashes", guard=without(("towline.harnesses.locks.check_pypi_lock", nothing)))
def test_a_registry_that_serves_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unguarded: bool) -> bool:
    """The same name and version, other code: pip compares its hash with the lock's."""
    honest = hashlib.sha256(_wheel(tmp_path / "honest", "good = True\n").read_bytes()).hexdigest()
    simple = tmp_path / "index" / "greeter"
    _wheel(simple, "evil = True\n")
    (simple / "index.html").write_text('<a href="greeter-1.0-py3-none-any.whl">greeter-1.0-py3-none-any.whl</a>')
    for variable in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    monkeypatch.setattr("towline.harnesses.toolchain.time.sleep", lambda seconds: None)
    if unguarded:
        monkeypatch.setattr("towline.harnesses.toolchain.HASHED", ("--no-deps",))
    line = "greeter==1.0" + ("" if unguarded else f" --hash=sha256:{honest}")
    target = tmp_path / "target"
    with lock_of(tmp_path / "locks", "greeter.pypi.xz", line + "\n"):
        try:
            pip_locked(Path(sys.executable), locks.pypi_lock("greeter", ["greeter==1.0"]), target, tmp_path)
        except InstallError:
            return False
    return (target / "greeter.py").read_text() == "evil = True\n"


# Code at install time


@attack("read: installs run scripts on the host", guard=without())
@pytest.mark.parametrize("way", ["write", "read", "environment", "network", "home"])
async def test_an_install_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, unguarded: bool) -> bool:
    """What a hostile postinstall of a preset that needs scripts can do: nothing outside of its install."""
    secret = tmp_path / "secret"
    secret.write_text("canary")
    monkeypatch.setenv("TOWLINE_TEST_SECRET", "canary")
    monkeypatch.setenv("HOME", str(tmp_path))
    package = tmp_path / "install" / "node_modules" / "evil"
    package.mkdir(parents=True)
    async with canary() as target:
        connect = f"import socket; socket.create_connection(('127.0.0.1', {target.port}), 3); open('got', 'w').write('canary')"
        script = {
            "write": f"echo canary > {tmp_path}/planted",
            "read": f"cat {secret} > got",
            "environment": "env > got",
            "network": f'python3 -c "{connect}"',
            "home": "cat ~/secret > got",
        }[way]
        (package / "package.json").write_text(json.dumps({"scripts": {"postinstall": f"{script}; true"}}))
        removed = without(
            (
                "towline.harnesses.install_scripts.sandbox_options",
                lambda rules, options, variables: ["env", "-C", str(package)],
            ),
            ("towline.harnesses.toolchain.bare_environment", lambda: dict(os.environ)),
        )
        if unguarded:
            with removed():
                await asyncio.to_thread(run_install_scripts, tmp_path / "install", "evil")
        else:
            await asyncio.to_thread(run_install_scripts, tmp_path / "install", "evil")
    got = package / "got"
    return (tmp_path / "planted").exists() or (got.exists() and "canary" in got.read_text())


@attack(
    "read: installs see the caller's environment",
    guard=without(("towline.harnesses.toolchain.bare_environment", lambda: dict(os.environ))),
)
@pytest.mark.parametrize(
    "variable", ["OPENAI_API_KEY", "TOWLINE_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "NODE_OPTIONS", "PYTHONPATH"]
)
def test_the_callers_secrets_in_a_package_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> bool:
    shim = tmp_path / "bin" / "npm"
    shim.parent.mkdir()
    shim.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    monkeypatch.setenv(variable, "canary-secret")
    npm(["ci"], tmp_path)
    return "canary-secret" in (tmp_path / "seen").read_text()


def test_every_preset_ships_a_lock_with_hashes_and_no_place() -> None:
    recipes = {harness.name: harness.install for harness in all_harnesses().values() if harness.install} | TOOLS
    for name, recipe in recipes.items():
        lock = recipe.lock or name
        text = (locks.npm_lock if isinstance(recipe, Npm) else locks.pypi_lock)(lock, recipe.packages)
        assert "://" not in text, name
        assert locks.lock_digest(lock)
