"""A root file system of this machine's own Debian packages and what they depend on, made without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_LEFT_OUT = ("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/", "/usr/share/info/", "/usr/share/lintian/")
_FIELDS = "${Package}\t${Depends}, ${Pre-Depends}\t${Provides}\n"


def make_debian_root(folder: Path, packages: Sequence[str]) -> Path:
    """The files of the installed packages, with the same links and modes; users, and folders to write to."""
    folder.mkdir(parents=True)
    # `/bin`, `/lib` and so on are links into `/usr`.
    for link in (path for path in Path("/").iterdir() if path.is_symlink()):
        (folder / link.name).symlink_to(link.readlink())
    for name in (
        "usr/bin",
        "usr/lib",
        "usr/lib64",
        "usr/sbin",
        "etc/alternatives",
        "tmp",
        "root",
        "proc",
        "dev",
        "sys",
        "run",
        "var/tmp",
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "tmp").chmod(0o1777)
    listed = subprocess.run(
        ["dpkg-query", "-L", *sorted(closure(packages))], capture_output=True, text=True, check=True
    )
    links = [str(path) for path in Path("/etc/alternatives").iterdir()]
    links += [str(path) for path in Path("/usr/bin").iterdir() if path.is_symlink()]
    for name in dict.fromkeys([*listed.stdout.splitlines(), *links]):
        source = Path(name)
        # Through the links, so that a package's `/bin/sh` lands in `/usr/bin`.
        target = folder / str(source.parent.resolve() / source.name).lstrip("/")
        if not name.startswith("/") or name.startswith(_LEFT_OUT) or target.exists() or target.is_symlink():
            continue
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\n")
    return folder


def closure(packages: Sequence[str]) -> set[str]:
    """The packages and all that they depend on, as far as they are installed; `AssertionError` if one itself is not."""
    shown = subprocess.run(["dpkg-query", "-W", "-f", _FIELDS], capture_output=True, text=True, check=True).stdout
    depends: dict[str, str] = {}
    provided: dict[str, str] = {}
    for line in shown.splitlines():
        name, needs, provides = line.split("\t")
        depends[name] = needs
        for other in provides.split(","):
            provided.setdefault(other.strip().partition(" ")[0], name)
    missing = [name for name in packages if name not in depends]
    assert not missing, f"these tests need the packages {' '.join(missing)}: apt-get install {' '.join(missing)}"
    found: set[str] = set()
    left = list(packages)
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for need in depends[name].split(","):
            choices = (re.sub(r"[ (:].*", "", one.strip()) for one in need.split("|"))
            known = (one if one in depends else provided.get(one, "") for one in choices)
            left += [one for one in known if one][:1]
    return found
