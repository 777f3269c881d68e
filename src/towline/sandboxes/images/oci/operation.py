"""One command over the image store, from its start to the death of its last process."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from typing import IO, Any

from towline.sandboxes.base import SandboxError

OnLine = Callable[[str], None]
_TAIL_LINES = 40
_LINE_CHARS = 2000
_EXIT_SECONDS = 10.0


class BuildahError(SandboxError):
    """An operation on the image store failed; `lines` are the last lines it wrote."""

    def __init__(self, message: str, lines: Sequence[str] = ()):
        super().__init__(message)
        self.lines = list(lines)


class StoreOperation:
    """One command in the store: its process, its output, and the pipe that keeps it alive."""

    def __init__(self, what: str, on_line: OnLine | None = None):
        self.what = what
        self.process: asyncio.subprocess.Process | None = None
        self.life = -1
        self.output = -1
        self.lines: list[str] = []
        self._on_line = on_line
        self._reading: list[asyncio.Future[Any]] = []

    async def finish(
        self,
        seconds: float,
        watching: asyncio.Future[str] | None = None,
        take_output: Callable[[IO[bytes]], object] | None = None,
    ) -> str:
        """Wait for the command, and return its standard output, or give it to `take_output` in a thread.

        `watching` ends the command with a reason.
        """
        assert self.process is not None
        if take_output is None:
            assert self.process.stdout is not None
            taking: asyncio.Future[object] = asyncio.ensure_future(self.process.stdout.read())
        else:
            stdout, self.output = os.fdopen(self.output, "rb"), -1
            taking = asyncio.ensure_future(asyncio.to_thread(_take, stdout, take_output))
        reading = asyncio.ensure_future(self._read_lines())
        self._reading = [taking, reading]
        work = asyncio.ensure_future(self._exit_code(taking, reading))
        self._reading.append(work)
        await asyncio.wait((work, *filter(None, [watching])), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if watching is not None and watching.done():
            raise BuildahError(f"{self.what}: {watching.result()}", self.lines)
        raise BuildahError(f"{self.what}: not finished after {seconds:g} seconds", self.lines)

    async def _exit_code(self, taking: asyncio.Future[Any], reading: asyncio.Future[None]) -> str:
        assert self.process is not None
        try:
            output = await asyncio.shield(taking)
        except SandboxError as error:
            # Its reader gave up: so does the command. What the command itself says is the better reason.
            await asyncio.wait((reading,), timeout=_EXIT_SECONDS)
            if reason := _last_error(self.lines, only=True):
                raise BuildahError(f"{self.what}: {reason}", self.lines) from error
            raise
        await asyncio.shield(reading)
        code = await self.process.wait()
        if code:
            raise BuildahError(f"{self.what}: {_last_error(self.lines) or f'exit code {code}'}", self.lines)
        return output.decode("utf-8", "replace") if isinstance(output, bytes) else ""

    async def _read_lines(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        rest = b""
        while chunk := await self.process.stderr.read(65_536):
            *complete, rest = (rest + chunk).split(b"\n")
            self._keep(complete)
        self._keep([rest])

    def _keep(self, lines: Sequence[bytes]) -> None:
        for raw in lines:
            if line := raw.decode("utf-8", "replace").rstrip():
                self.lines.append(line[:_LINE_CHARS])
                del self.lines[:-_TAIL_LINES]
                if self._on_line is not None:
                    self._on_line(line)

    async def end(self) -> None:
        """End every process of the operation, and wait until that is done."""
        for name in ("life", "output"):
            if (descriptor := getattr(self, name)) >= 0:
                setattr(self, name, -1)
                os.close(descriptor)
        cancelled = False
        waits = [*self._reading]
        if self.process is not None:
            waits.append(asyncio.ensure_future(self.process.wait()))
        ending = asyncio.gather(*waits, return_exceptions=True)
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError


def _take(stdout: IO[bytes], take_output: Callable[[IO[bytes]], object]) -> object:
    with stdout:
        return take_output(stdout)


def _last_error(lines: Sequence[str], *, only: bool = False) -> str:
    """The last line that is an error, without its label; else the last line, unless `only` errors count."""
    found = next(
        (line for line in reversed(lines) if line.startswith(("Error:", "error ", "namespace:", "bwrap:"))), ""
    )
    return re.sub(r"^(?:Error|error|namespace|bwrap): ?", "", found or ("" if only or not lines else lines[-1]))
