"""Runs test files again as an ordinary user.

The interpreter, its packages and the repository may be in folders that only root can enter, so they are bind-mounted at a
public place, in a mount namespace that ends with the run. With `subordinate`, that namespace's /etc also has the user and
grants it a range of ids.
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
"""Timeout of a test that runs others: longer than those may take."""
_NAME = "towline-test"
_REPOSITORY = Path(__file__).parents[3]


def run_tests(
    arguments: list[str], *, subordinate: bool = False, seconds: float = 500, shown: Mapping[str, Path] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest in the repository as an ordinary user; if this is one already, just run it.

    `shown` are more folders to bind-mount, by the environment variable that holds their path.
    """
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    if os.geteuid() != 0:
        return _run([sys.executable, *options], seconds, cwd=_REPOSITORY)
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
            # An interpreter may be linked to its own library, by a path that the user cannot enter.
            "LD_LIBRARY_PATH": f"{place}/python/lib",
            **{variable: f"{place}/{variable}" for variable in shown or {}},
        }
        interpreter = f"{place}/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
        user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        command = [*user, interpreter, *options, f"--basetemp={home}/pytest"]
        steps += [f"cd {place}/repository", "exec " + shlex.join(command)]
        return _run(["unshare", "--mount", "sh", "-ec", "\n".join(steps)], seconds, env=environment)


def _run(command: list[str], seconds: float, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; on timeout, fail with its output so far."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, **how)
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode("utf-8", "replace")
        raise AssertionError(
            f"the tests of an ordinary user did not finish within {seconds:g} s: {output[-4000:]}"
        ) from None
