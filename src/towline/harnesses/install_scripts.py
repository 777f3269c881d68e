"""The install scripts of npm packages, for the few presets whose program does not run without them.

npm itself never runs a script here. What a preset needs is run afterwards, package by package, in a sandbox: no network, no
file of this machine but /usr (read-only) and the install itself, no capability, a seccomp filter, and an environment with
nothing of the caller's. So a package that turns hostile gets no secret and changes nothing but its own install.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from towline.harnesses.base import INSTALL_ROOT, InstallError
from towline.harnesses.toolchain import run_command
from towline.sandboxes.bubblewrap import seccomp

_EVENTS = ("preinstall", "install", "postinstall")
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def run_install_scripts(folder: Path, name: str) -> list[str]:
    """Run the install scripts of every package in a folder; returns the packages that have one. Raises `InstallError`."""
    found = []
    for package, manifest in _packages(folder):
        scripts = manifest.get("scripts") or {}
        wanted = [(event, scripts[event]) for event in _EVENTS if isinstance(scripts.get(event), str)]
        if wanted:
            found.append(package)
        for event, script in wanted:
            inside = f"{INSTALL_ROOT}/{name}"
            with open(os.memfd_create("filter"), "wb", closefd=True) as rules:
                rules.write(seccomp.build())
                rules.flush()
                os.lseek(rules.fileno(), 0, os.SEEK_SET)
                command = sandboxed(folder, inside, f"{inside}/{package}", script, event, rules.fileno())
                run_command(command, folder, f"the {event} script of {package}", pass_fds=(rules.fileno(),))
    return found


def sandboxed(folder: Path, inside: str, workdir: str, script: str, event: str, rules: int) -> list[str]:
    """The command that runs a script in a sandbox, with the folder at `inside` as the only thing that it may change."""
    program = shutil.which("bwrap")
    if program is None:
        raise InstallError(
            "this harness needs install scripts, which run in a sandbox: install the package `bubblewrap` and try again"
        )
    command = [program, "--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0", "--cap-drop", "ALL"]
    command += [
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--seccomp",
        str(rules),
        "--ro-bind",
        "/usr",
        "/usr",
    ]
    for each in _SYSTEM:
        path = f"/{each}"
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--bind", str(folder), inside]
    variables = {
        "PATH": f"{inside}/node_modules/.bin:{inside}/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "npm_lifecycle_event": event,
        "npm_node_execpath": f"{inside}/bin/node",
    }
    for variable, value in variables.items():
        command += ["--setenv", variable, value]
    return [*command, "--chdir", workdir, "--", "sh", "-c", script]


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
