"""A small root file system for sandbox tests: busybox, a few users, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path


def busybox_root(folder: Path) -> Path:
    """A root with busybox and a symlink per applet; no Python, no Node, no libc."""
    program = shutil.which("busybox")
    assert program, "these tests need busybox: apt-get install busybox-static"
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    assert linked.returncode != 0, "these tests need a static busybox: apt-get install busybox-static"
    for name in ("bin", "etc", "tmp", "root", "home/agent", "usr/bin", "var", "dev", "proc", "sys", "run"):
        (folder / name).mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    shutil.copy(program, folder / "bin/busybox")
    (folder / "bin/busybox").chmod(0o755)
    for applet in subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if not os.path.lexists(folder / "bin" / applet):
            (folder / "bin" / applet).symlink_to("busybox")
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\nagent:x:1000:\n")
    (folder / "etc/old").write_text("old\n")
    return folder


def tar_of(folder: Path, file: Path) -> Path:
    with tarfile.open(file, "w") as tar:
        tar.add(folder, arcname=".")
    return file
