"""Runs test files again as an ordinary user, for tests that root runs.

The interpreter, its packages and the repository may lie in folders that only root can enter, so they are shown at a
public place, in a mount namespace that ends with the run. With `subordinate`, that namespace's /etc also knows the user
and grants it a range of ids.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UID = 61_234
SECONDS = 560
"""Time limit of a test that runs others: longer than those may take."""
_NAME = "towline-test"
_REPOSITORY = Path(__file__).parents[2]


def run_tests(
    arguments: list[str], *, subordinate: bool = False, seconds: float = 500, shown: Mapping[str, Path] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest in the repository as an ordinary user; if this is one already, just run it. `shown` names further
    folders that are shown, each by the variable that tells its place."""
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    if os.geteuid() != 0:
        return _ended([sys.executable, *options], seconds, cwd=_REPOSITORY)
    for tool in ("unshare", "setpriv", "mount"):
        assert shutil.which(tool), f"these tests need {tool}: apt-get install util-linux"
    with tempfile.TemporaryDirectory(prefix="towline-user-") as name:
        place = Path(name)
        place.chmod(0o755)
        home = place / "home"
        for folder in ("python", "packages", "repository", "etc", "home"):
            (place / folder).mkdir()
        os.chown(home, UID, UID)
        seen = {
            sys.base_prefix: "python",
            sysconfig.get_paths()["purelib"]: "packages",
            str(_REPOSITORY): "repository",
        }
        for variable, folder in (shown or {}).items():
            (place / variable).mkdir()
            seen[str(folder)] = variable
        steps = [f"mount --bind {shlex.quote(source)} {place}/{target}" for source, target in seen.items()]
        if subordinate:
            accounts = Path("/etc/passwd").read_text()
            (place / "etc/passwd").write_text(f"{accounts}{_NAME}:x:{UID}:{UID}::{home}:/bin/sh\n")
            for table in ("subuid", "subgid"):
                (place / "etc" / table).write_text(f"{_NAME}:700000:65536\n")
            steps.append(f"mount -t overlay -o lowerdir={place}/etc:/etc overlay /etc")
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(home),
            "TMPDIR": str(home),
            "PYTHONPATH": f"{place}/repository/src:{place}/packages",
            "PYTHONDONTWRITEBYTECODE": "1",
            # An interpreter may be linked to a library of its own, by a path that the user cannot enter.
            "LD_LIBRARY_PATH": f"{place}/python/lib",
            **{variable: f"{place}/{variable}" for variable in shown or {}},
        }
        interpreter = f"{place}/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
        user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        command = [*user, interpreter, *options, f"--basetemp={home}/pytest"]
        steps += [f"cd {place}/repository", "exec " + shlex.join(command)]
        return _ended(["unshare", "--mount", "sh", "-ec", "\n".join(steps)], seconds, env=environment)


def _ended(command: list[str], seconds: float, **how: Any) -> subprocess.CompletedProcess[str]:
    """The command at its end; what it had said, if it does not come to one."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, **how)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode("utf-8", "replace")
        raise AssertionError(f"an ordinary user's tests did not end within {seconds:g} s: {said[-4000:]}") from None
