"""A root file system with a shell, a few tools and the C library, and neither Python nor Node: made from this machine's."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from towline.harnesses.toolchain import linked_libraries

TOOLS = ("sh", "bash", "cat", "ls", "rm", "find", "tee", "sleep", "echo", "tar", "mkdir", "env")
CPLUSPLUS = ("libstdc++.so.6", "libgcc_s.so.1")
"""What Node links besides the C library; every Debian, Ubuntu and Fedora image has them."""


def make_bare_root(folder: Path, node: Path, *, without: Sequence[str] = ()) -> Path:
    """The root, with the libraries that `node` links but for those left out."""
    for name in ("bin", "tmp", "etc", "proc", "dev", "work", "home", "opt", "root", "run", "var", "usr"):
        (folder / name).mkdir(parents=True)
    programs = [Path(shutil.which(tool) or f"/bin/{tool}").resolve() for tool in TOOLS]
    for tool, program in zip(TOOLS, programs, strict=True):
        shutil.copy2(program, folder / "bin" / tool)
    libraries = {name: path for program in (*programs, node) for name, path in linked_libraries(program)}
    loader = next(
        path for path in (Path("/lib64/ld-linux-x86-64.so.2"), Path("/lib/ld-linux-aarch64.so.1")) if path.exists()
    )
    for path in (*(path for name, path in libraries.items() if name not in without), loader):
        target = folder / str(path).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path.resolve(), target)
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return folder
