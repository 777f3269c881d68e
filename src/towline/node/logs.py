"""What a harness prints, kept in a file of bounded size: its beginning, and what matters more, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from pathlib import Path

from towline.sandboxes.base import Process

_TAIL = 4096


class Log:
    """Both streams of a process, interleaved as they come."""

    def __init__(self, path: Path, most: int):
        self.path = path
        self.most = most
        # Without a buffer: what was printed before a crash is there after it.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by `close`
        self._written = self._file.tell()
        self._late: deque[bytes] = deque()
        self._late_size = 0
        self._left_out = 0

    def write(self, data: bytes) -> None:
        half = self.most // 2
        room = max(0, half - self._written)
        if room:
            self._file.write(data[:room])
            self._written += len(data[:room])
            data = data[room:]
        if data:
            self._late.append(data)
            self._late_size += len(data)
            while self._late_size - len(self._late[0]) > half:
                dropped = self._late.popleft()
                self._late_size -= len(dropped)
                self._left_out += len(dropped)

    async def follow(self, process: Process) -> None:
        """Take what the process prints until it closes its streams."""
        await asyncio.gather(self._copy(process.stdout), self._copy(process.stderr))

    async def _copy(self, stream: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await stream.read(65_536):
                self.write(data)

    def close(self) -> None:
        if self._left_out:
            self._file.write(f"\n… {self._left_out} bytes left out …\n".encode())
        for data in self._late:
            self._file.write(data)
        self._late.clear()
        self._file.close()

    def tail(self) -> str:
        """The end of it, for an error message."""
        if not self._file.closed:
            self._file.flush()
        data = b"".join(self._late)[-_TAIL:]
        if len(data) < _TAIL:
            with open(self.path, "rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - (_TAIL - len(data))))
                data = file.read() + data if not self._file.closed else file.read()
        return data[-_TAIL:].decode("utf-8", "replace").strip()
