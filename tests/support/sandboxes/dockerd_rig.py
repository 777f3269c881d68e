"""A private dockerd for tests: its own folders and socket, no bridge and no firewall rules."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def dockerd(folder: Path) -> Iterator[str]:
    """The URL of a running engine."""
    program = shutil.which("dockerd")
    assert program, "these tests need dockerd: apt-get install docker.io"
    assert os.geteuid() == 0, "these tests start dockerd, which needs root: run them as root"
    url = f"unix://{folder}/docker.sock"
    command = [program, "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    command += ["-H", url, "--bridge=none", "--iptables=false", "--ip6tables=false"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DOCKER_")}
    with open(folder / "log", "wb") as log:
        engine = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not (folder / "docker.sock").exists():
            assert engine.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < until, (folder / "log").read_text()[-3000:]
            time.sleep(0.05)
        yield url
    finally:
        engine.send_signal(signal.SIGTERM)
        engine.wait(60)
        subprocess.run(["umount", f"{folder}/exec/netns/default"], capture_output=True, check=False)
