"""A PostgreSQL server for the tests: created, started and removed here, reached through a Unix socket."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_PATIENCE = 120


class Postgres:
    def __init__(self, folder: Path, programs: Path, user: str | None):
        self.folder = folder
        self._programs = programs
        self._user = user
        """Whom it runs as, if that is not who runs the tests: it refuses to be root."""
        self._numbers = itertools.count()
        self._server: subprocess.Popen[bytes] | None = None

    def create(self) -> None:
        self._run("initdb", "-D", str(self.folder / "data"), "-U", "towline", "--auth=trust", "-E", "UTF8", "--no-sync")

    def start(self) -> None:
        # Servers are killed in these tests, the machine is not: what the kernel has is safe, and nothing waits for a disk.
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "fsync": "off",
            "max_connections": "100",
        }
        command = [str(self._programs / "postgres"), "-D", str(self.folder / "data")]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log, **self._as_user())
        until = time.monotonic() + _PATIENCE
        asking = [self._programs / "pg_isready", "-q", "-h", self.folder]
        while subprocess.run(asking, check=False, timeout=_PATIENCE).returncode:
            assert self._server.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < until, (self.folder / "log").read_text()
            time.sleep(0.02)

    @property
    def pid(self) -> int | None:
        """The process of the server, while it runs."""
        return None if self._server is None else self._server.pid

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            server.send_signal(how)
            try:
                server.wait(_PATIENCE)
            finally:
                server.kill()

    def database(self) -> str:
        """The URL of a fresh, empty database."""
        name = f"test{next(self._numbers)}"
        self._run("createdb", "-h", str(self.folder), "-U", "towline", name)
        return f"postgresql://towline@/{name}?host={self.folder}"

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE,
            **self._as_user(),
        )
        assert done.returncode == 0, done.stderr

    def _as_user(self) -> dict[str, object]:
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
        if self._user is None:
            return {"env": environment, "cwd": self.folder}
        found = pwd.getpwnam(self._user)
        return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": [], "env": environment, "cwd": self.folder}


def _programs() -> Path:
    found = shutil.which("initdb")
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)
    if found is None and not places:
        pytest.fail("PostgreSQL is not installed: apt-get install postgresql", pytrace=False)
    return Path(os.path.realpath(found or places[0])).parent


@contextlib.contextmanager
def running_postgres() -> Iterator[Postgres]:
    user = None
    if os.getuid() == 0:
        names = {entry.pw_name for entry in pwd.getpwall()}
        user = next(name for name in ("postgres", "nobody") if name in names)
    with tempfile.TemporaryDirectory(prefix="towline-pg-") as made:
        folder = Path(made)
        if user is not None:
            shutil.chown(folder, user)
        folder.chmod(0o755)
        server = Postgres(folder, _programs(), user)
        server.create()
        try:
            server.start()
            yield server
        finally:
            # Nothing of it is kept: there is nothing to write down first.
            server.stop(signal.SIGQUIT)
