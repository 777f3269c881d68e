"""The actor on each Ray node: starts `towline node-host` there and holds its standard input.

One actor drives one host process, whatever the number of its sessions, and is called about once a second: nothing of a
session passes through Ray. The host exits when its standard input closes, so it never outlives its actor. An actor that is
not asked for its status for `orphan_seconds` exits: its server is not coming back.

Ray is not imported here: the class is made an actor by `ray.bridge`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from towline.common.files import lock_file, user_cache_folder

_LOCK = "host.lock"


class HostActor:
    """Starts a node host on its machine. Calls may come again, and several at once."""

    def __init__(self, orphan_seconds: float):
        self._orphan_seconds = orphan_seconds
        self._asked = time.monotonic()
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._address: dict[str, Any] = {}
        threading.Thread(target=self._exit_as_orphan, daemon=True).start()

    def start(self, given: str, folder: str, environment: dict[str, str]) -> dict[str, Any]:
        """Start the host, if none runs, and return its status when it listens.

        `given` are its `HostSettings` without token and data folder. `folder` is relative to the user's cache folder unless
        it is absolute; only one host at a time uses it.
        """
        with self._starting:
            if not self.status()["running"]:
                self._address = {}
                self._address = self._start(given, Path(folder), environment)
        return self.status()

    def status(self) -> dict[str, Any]:
        """`running`, and the address of the host; `code` if it has ended."""
        self._asked = time.monotonic()
        process = self._process
        code = None if process is None else process.poll()
        running = process is not None and code is None and bool(self._address)
        return {"running": running, "code": code, **self._address}

    def stop(self, seconds: float) -> None:
        """Let the host end its sandboxes for this long, then kill it."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM if seconds else signal.SIGKILL)
        try:
            process.wait(seconds or None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self, given: str, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
        data = user_cache_folder("hosts") / folder
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        token = secrets.token_urlsafe(32)
        fields = json.loads(given)
        fields["token"], fields["settings"]["gateway"]["data"] = token, str(data)
        # Secrets of the server's environment, such as the key of the engine; nothing of Ray's own.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with (data / _LOCK).open("wb") as lock:
            try:
                lock_file(lock.fileno())
            except BlockingIOError as error:
                raise RuntimeError(f"another node host uses {data}; set cluster.ray.data for one of them") from error
            # The process keeps the lock until it ends, and this one no longer.
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "towline", "node-host"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=inherited | environment,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(fields).encode() + b"\n")
            process.stdin.flush()
        line = process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended with code {process.wait()}"}
        if "error" in answer:
            process.kill()
            process.wait()
            raise RuntimeError(answer["error"])
        return {"url": answer["url"], "token": token, "pid": process.pid, "digest": digest(given)}

    def _exit_as_orphan(self) -> None:
        while True:
            time.sleep(min(10.0, self._orphan_seconds / 4))
            if time.monotonic() - self._asked > self._orphan_seconds and not self._starting.locked():
                self.stop(_STOP_SECONDS)
                os._exit(0)


_STOP_SECONDS = 30.0
"""How long an orphan may take to end its sandboxes."""


def digest(given: str) -> str:
    """Identifies the settings of a host: one with other settings is replaced, not adopted."""
    return hashlib.sha256(given.encode()).hexdigest()
