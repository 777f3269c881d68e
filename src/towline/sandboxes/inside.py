"""What the spawner's children do inside a sandbox: run a command, unpack files, pack files, list changes.

Paths are resolved by the kernel in the sandbox's own root and as a user of its own, so a link planted there leads
nowhere else. A child writes the reason why it failed to `telling`, as JSON, and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import tarfile
from typing import Any, NoReturn

from towline.errors import TowlineError
from towline.sandboxes import archives, overlay
from towline.sandboxes.confine import Guards, User, become, find_user

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def child(
    message: dict[str, Any],
    descriptors: list[int],
    telling: int,
    guards: Guards,
    plan: dict[str, Any],
    launch: int,
    trees: list[overlay.Tree],
    known: frozenset[str],
) -> NoReturn:
    """The child's whole life."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.setsid()
        work = message["do"]
        if work == "start":
            _start(message, descriptors, guards, plan, launch)
        elif work == "put":
            _put(message, descriptors[0], guards, plan)
        elif work == "get":
            _get(message, descriptors[0], guards)
        elif work == "diff":
            _diff(descriptors[0], guards, trees, known)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except (OSError, LookupError, ValueError, TowlineError) as error:
        os.write(telling, json.dumps({"error": str(error)[:4000], "kind": type(error).__name__}).encode())
    except BaseException as error:
        os.write(telling, json.dumps({"error": repr(error)[:4000], "kind": "internal"}).encode())
    finally:
        os._exit(code)


def _start(message: dict[str, Any], descriptors: list[int], guards: Guards, plan: dict[str, Any], launch: int) -> None:
    wanted = message["user"]
    user = find_user(plan["user"] if wanted is None else wanted, plan["mapped"])
    environment = {"PATH": _PATH, "HOME": user.home, "USER": user.name, "LOGNAME": user.name, "LANG": "C.UTF-8"}
    environment |= {"HOSTNAME": plan["hostname"], **dict(plan["env"]), **message["env"]}
    for standard, descriptor in enumerate(descriptors):
        if user.uid:  # whoever opens /dev/stdout by name must own the pipe
            os.fchown(descriptor, user.uid, user.gid)
        os.dup2(descriptor, standard)
    become(guards, user)
    os.chdir(message["cwd"] or plan["workdir"])
    command = message["command"]
    if "launch" in plan["unguarded"]:
        os.execvpe(command[0], command, environment)
    path = _resolve(command[0], environment.get("PATH", _PATH))
    os.execve(launch, [path, *command], environment)


def _resolve(name: str, path: str) -> str:
    """The program that a shell would take; says so and ends as a shell does if there is none."""
    candidates = [name] if "/" in name else [f"{folder or '.'}/{name}" for folder in path.split(":")]
    code = _NOT_FOUND
    for candidate in candidates:
        try:
            status = os.stat(candidate)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and os.access(candidate, os.X_OK):
            return candidate
        code = _NOT_EXECUTABLE
    reason = "command not found" if code == _NOT_FOUND else "not an executable file"
    os.write(2, f"{name}: {reason}\n".encode("utf-8", "surrogateescape"))
    sys.exit(code)


def _put(message: dict[str, Any], source: int, guards: Guards, plan: dict[str, Any]) -> None:
    user = find_user(plan["user"], plan["mapped"])
    become(guards, User())
    make_folders(message["target"], user)
    with os.fdopen(os.dup(source), "rb") as archive:
        owner = (user.uid, user.gid) if user.uid else None
        archives.unpack(archive, message["target"], most=message["most"], links="any", follow=True, owner=owner)


def _get(message: dict[str, Any], target: int, guards: Guards) -> None:
    become(guards, User())
    path = message["path"].rstrip("/") or "/"
    real = os.path.realpath(path)
    with os.fdopen(os.dup(target), "wb") as out, tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        archives.add_tree(tar, os.path.basename(path) or ".", real, message["most"])


def _diff(target: int, guards: Guards, trees: list[overlay.Tree], known: frozenset[str]) -> None:
    become(guards, User())
    found = [change for tree in trees for change in overlay.changes(tree, known)]
    with os.fdopen(os.dup(target), "w") as out:
        json.dump(found, out)


def make_folders(path: str, user: User) -> None:
    """Make a folder and those above it that are missing; the new ones are the user's."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path.rstrip("/")) or "/"
    for folder in reversed(missing):
        os.mkdir(folder, 0o755)
        if user.uid or user.gid:
            os.chown(folder, user.uid, user.gid)
