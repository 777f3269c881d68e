"""Code of packages that must run for an install: install scripts of npm packages, and builds of Python packages.

npm and pip themselves run no code of a package here. What a preset needs is run apart, in a sandbox: no file of this machine
but /usr (read-only) and the install itself, no capability, a seccomp filter, an environment with nothing of the caller's,
and for install scripts no network. So a package that turns hostile gets no secret and changes nothing but its own install.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from towline.harnesses.base import INSTALL_ROOT, InstallError
from towline.harnesses.toolchain import PythonInfo, pip_settings, run_command
from towline.sandboxes.bubblewrap import seccomp

_EVENTS = ("preinstall", "install", "postinstall")
_RESOLVER = ("resolv.conf", "hosts", "nsswitch.conf", "ssl", "pki", "ca-certificates")
"""What a registry is found and checked with."""
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def run_install_scripts(folder: Path, name: str) -> list[str]:
    """Run the install scripts of every package in a folder; returns the packages that have one. Raises `InstallError`."""
    found = []
    inside = f"{INSTALL_ROOT}/{name}"
    for package, manifest in _packages(folder):
        scripts = manifest.get("scripts") or {}
        wanted = [(event, scripts[event]) for event in _EVENTS if isinstance(scripts.get(event), str)]
        if wanted:
            found.append(package)
        for event, script in wanted:
            variables = {
                "PATH": f"{inside}/node_modules/.bin:{inside}/bin:/usr/bin:/bin",
                "npm_lifecycle_event": event,
                "npm_node_execpath": f"{inside}/bin/node",
            }
            options = ["--bind", str(folder), inside, "--chdir", f"{inside}/{package}"]
            run_sandboxed(["sh", "-c", script], options, variables, folder, f"the {event} script of {package}")
    return found


def build_wheels(python: PythonInfo, lock: str, target: Path) -> list[Path]:
    """The wheels of packages that a registry has only as source, each checked against its hash.

    Building one runs its code, and that of the build tools that it asks for, which are not locked: both run in the sandbox,
    which has the host's network for it, and see no file of the host but the interpreter and the settings of pip.
    """
    target.mkdir()
    (target / "lock.txt").write_text(lock)
    settings = pip_settings(python.executable)
    shown = [str(python.stdlib.parent.parent), *(f"/etc/{name}" for name in _RESOLVER), *_paths(settings)]
    options = [part for path in dict.fromkeys(shown) for part in ("--ro-bind-try", path, path)]
    options += ["--bind", str(target), "/wheels", "--chdir", "/wheels", "--share-net"]
    command = [str(python.executable), "-m", "pip", "--disable-pip-version-check", "--no-input", "wheel", "-q"]
    command += ["--no-deps", "--require-hashes", "--no-cache-dir", "-w", "/wheels", "-r", "/wheels/lock.txt"]
    variables = {"PATH": "/usr/bin:/bin", **settings}
    run_sandboxed(command, options, variables, target, "building from source")
    return sorted(target.glob("*.whl"))


def run_sandboxed(
    command: Sequence[str], options: Sequence[str], variables: Mapping[str, str], folder: Path, what: str
) -> None:
    """Run a command of a package in a sandbox; `options` are bubblewrap's, for what it may see and change."""
    rules = os.memfd_create("filter")
    try:
        os.write(rules, seccomp.build())
        os.lseek(rules, 0, os.SEEK_SET)
        given = {"HOME": "/tmp", **variables}
        run_command([*sandbox_options(rules, options, given), *command], folder, what, pass_fds=(rules,))
    finally:
        os.close(rules)


def sandbox_options(rules: int, options: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """What a command is run with: namespaces of its own, no capability, a filter of system calls, and /usr to read."""
    program = shutil.which("bwrap")
    if program is None:
        raise InstallError(
            "installing this harness runs code of its packages, in a sandbox: install the package `bubblewrap`"
        )
    made = [program, "--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0", "--cap-drop", "ALL"]
    made += ["--die-with-parent", "--new-session", "--clearenv", "--seccomp", str(rules), "--ro-bind", "/usr", "/usr"]
    for each in _SYSTEM:
        path = f"/{each}"
        if os.path.islink(path):
            made += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            made += ["--ro-bind", path, path]
    made += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for variable, value in variables.items():
        made += ["--setenv", variable, value]
    return [*made, *options, "--"]


def _paths(settings: Mapping[str, str]) -> Iterator[str]:
    """Files and folders that the settings of pip name."""
    for value in settings.values():
        for word in value.split():
            path = word.removeprefix("file://")
            if path.startswith("/") and os.path.exists(path):
                yield path


def _packages(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every installed package by its folder, inner ones first, with its manifest."""
    manifests = sorted(folder.glob("node_modules/**/package.json"), key=lambda path: -len(path.parts))
    for file in manifests:
        above = file.parent.parent
        if above.name != "node_modules" and not (above.name.startswith("@") and above.parent.name == "node_modules"):
            continue
        try:
            manifest = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(manifest, dict):
            yield str(file.parent.relative_to(folder)), manifest
