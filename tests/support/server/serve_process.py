"""A rollout service in its own process, for tests that kill it."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

from towline.demo import tokenizer

COMMAND = [sys.executable, "-m", "towline", "serve"]


class ServeProcess:
    """`towline serve` with the scripted engine and process sandboxes, always on the same port and data."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "model").mkdir(parents=True)
        tokenizer.write(folder / "model")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        fixed = ["--engine", "scripted", "--sandbox", "process", "--concurrency", "4", "--json"]
        places = ["--model", str(self.folder / "model"), "--data", str(self.folder / "data"), "--port", str(self.port)]
        with (self.folder / "errors.txt").open("ab") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, *places, *fixed], stdout=subprocess.PIPE, stderr=errors, env=os.environ | {"COLUMNS": "200"}
            )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 180)
        line = self.process.stdout.readline() if ready else b""
        assert line, (self.folder / "errors.txt").read_text()[-3000:]
        assert json.loads(line)["url"] == self.url

    def kill(self) -> None:
        """As `kill -9` does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
