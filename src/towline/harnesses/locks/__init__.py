"""Lock files of harness installs: every package of a preset by version and hash, shipped with Towline.

A lock is what `towline harness lock` resolved once: npm's `package-lock.json` with the `integrity` of every package, or
pip's requirements with `--hash` for every file. An install takes exactly those packages from whichever registry this machine
is configured for: the lock names no registry, and a registry that serves anything else is refused by npm or pip.

    data/<name>.npm.xz       package-lock.json
    data/<name>.pypi.xz      requirements.txt
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from towline.harnesses.base import InstallError

_HASHED = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)")
_FOREIGN = re.compile(r"://|@ ?(?:file|git|https?)\b")
"""What no line of a lock may contain: a place other than the registry that pip and npm are configured for."""


def npm_lock(name: str, packages: Sequence[str]) -> str:
    """The lock of these npm packages as JSON. Raises `InstallError` if it is missing or unsafe."""
    text = _read(f"{name}.npm.xz")
    try:
        lock: dict[str, Any] = json.loads(text)
        wanted = lock["packages"][""]["dependencies"]
    except (ValueError, LookupError, TypeError) as error:
        raise InstallError(f"the lock of {name} cannot be read: {error}") from error
    if sorted(f"{package}@{version}" for package, version in wanted.items()) != sorted(packages):
        raise _outdated(name)
    check_npm_lock(name, lock)
    return text


def check_npm_lock(name: str, lock: dict[str, Any]) -> None:
    """Raise `InstallError` unless npm verifies every package of a lock, and takes it from no place that the lock names."""
    for where, package in lock["packages"].items():
        if not where:
            continue
        if package.get("link") or "resolved" in package or _FOREIGN.search(str(package.get("version", "://"))):
            raise InstallError(f"the lock of {name} names a place for {where}; run: towline harness lock {name}")
        if not str(package.get("integrity", "")).startswith("sha512-") and not package.get("inBundle"):
            raise InstallError(f"the lock of {name} has no hash for {where}; run: towline harness lock {name}")


def pypi_lock(name: str, packages: Sequence[str]) -> str:
    """The lock of these Python packages as requirements. Raises `InstallError` if it is missing or unsafe."""
    text = _read(f"{name}.pypi.xz")
    locked = {_normal(found[1]): found[2] for found in map(_HASHED.match, text.splitlines()) if found}
    for package in packages:
        wanted = _HASHED.fullmatch(package)
        if wanted is None or locked.get(_normal(wanted[1])) != wanted[2]:
            raise _outdated(name)
    check_pypi_lock(name, text)
    return text


def check_pypi_lock(name: str, text: str) -> None:
    """Raise `InstallError` unless every requirement of a lock is exact and has a hash, and none names a place."""
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if _FOREIGN.search(line) or line.startswith("-") or not _HASHED.match(line):
            raise InstallError(f"the lock of {name} names a place: {line[:80]!r}; run: towline harness lock {name}")
        if "--hash=sha256:" not in line:
            raise InstallError(f"the lock of {name} has no hash in {line[:80]!r}; run: towline harness lock {name}")


def split_lock(text: str, sources: Sequence[str]) -> tuple[str, str]:
    """The requirements of a lock that are wheels, and those of the packages that are built from source."""
    apart = {_normal(name) for name in sources}
    parts: tuple[list[str], list[str]] = ([], [])
    for line in text.replace("\\\n", " ").splitlines():
        found = _HASHED.match(line)
        parts[found is not None and _normal(found[1]) in apart].append(line)
    wheels, built = ("\n".join(part) + "\n" if part else "" for part in parts)
    return wheels, built


def lock_digest(name: str) -> str:
    """Identifies a lock, as a part of the install's identity; empty for an install without one."""
    if not name:
        return ""
    for kind in ("npm", "pypi"):
        file = data_folder() / f"{name}.{kind}.xz"
        if file.is_file():
            return hashlib.sha256(file.read_bytes()).hexdigest()
    raise InstallError(f"no lock of {name} ships with Towline; run: towline harness lock {name}")


def data_folder() -> Traversable:
    """Where the locks are: package data."""
    return resources.files(__name__) / "data"


def _read(file: str) -> str:
    try:
        return lzma.decompress((data_folder() / file).read_bytes()).decode()
    except FileNotFoundError:
        name = file.partition(".")[0]
        raise InstallError(f"no lock of {name} ships with Towline; run: towline harness lock {name}") from None
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise InstallError(f"the lock {file} cannot be read: {error}") from error


def _outdated(name: str) -> InstallError:
    return InstallError(f"the lock of {name} is for other packages than its preset; run: towline harness lock {name}")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
