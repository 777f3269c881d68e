"""A gateway in a process of its own, to be killed with SIGKILL.

Run as a program (`python gateway_process.py TOKENIZER_FOLDER`) it loads the tokenizer once, which takes seconds, and then
forks a fresh process for every gateway that it is told to start, before anything of the gateway is imported: so a crash
point is set as anywhere else, by the environment. `Nursery` and `Process` are the test's side of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONTROL_KEY = "control-key-of-a-process"
_PATIENCE = 60


class Process:
    """One gateway process."""

    def __init__(self, pid: int, ready: Path, log: Path):
        self.pid = pid
        self._ready = ready
        self.log = log
        self.base_url = self.control_url = ""

    async def listening(self) -> bool:
        """Whether it came to listen; a crash point may be on the way."""
        until = time.monotonic() + _PATIENCE
        while not self._ready.exists():
            if not self.alive():
                return False
            assert time.monotonic() < until, "the gateway does not come to listen\n" + self.log.read_text()
            await asyncio.sleep(0.005)
        self.base_url, self.control_url = json.loads(self._ready.read_text())
        return True

    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def dead(self) -> None:
        until = time.monotonic() + _PATIENCE
        while self.alive():
            assert time.monotonic() < until, "the gateway did not die\n" + self.log.read_text()
            await asyncio.sleep(0.005)


class Nursery:
    """Starts gateway processes."""

    def __init__(self, tokenizer: Path, scratch: Path):
        self._scratch = scratch
        self._forker = subprocess.Popen(
            [sys.executable, __file__, str(tokenizer)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, data: Path, crash_at: str = "", **settings: Any) -> Process:
        name = secrets.token_hex(4)
        ready, log = self._scratch / f"{name}.ready", self._scratch / f"{name}.log"
        order = {"data": str(data), "crash_at": crash_at, "ready": str(ready), "log": str(log), "settings": settings}
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.write(json.dumps(order) + "\n")
        self._forker.stdin.flush()
        return Process(int(self._forker.stdout.readline()), ready, log)

    def close(self) -> None:
        """Ends every process that it started, too."""
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.close()
        try:
            self._forker.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._forker.kill()
            self._forker.wait(_PATIENCE)
            raise
        self._forker.stdout.close()


def _fork_gateways(tokenizer: Path) -> None:
    # Everything heavy, but nothing of the gateway.
    import aiohttp  # noqa: F401
    import pyarrow.ipc  # noqa: F401
    import starlette.applications  # noqa: F401
    import uvicorn  # noqa: F401
    import uvloop  # noqa: F401

    import towline.config
    import towline.dialects.registry
    import towline.engines.scripted
    import towline.tokens.continuation.planner  # noqa: F401
    from towline.tokens.loading import load_codec

    codec = load_codec(tokenizer)
    assert "towline.common.crashpoints" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not kept
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _die_with_parent()
            _run_gateway(codec, json.loads(line))
            os._exit(0)
        print(pid, flush=True)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _run_gateway(codec: Any, order: dict[str, Any]) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TOWLINE_CRASH_AT"] = order["crash_at"]

    import logging

    import uvloop

    from towline.config import GatewaySettings
    from towline.conversation import ToolCall
    from towline.engines.base import SampleRequest
    from towline.engines.scripted import Say, ScriptedEngine
    from towline.gateway.gateway import Gateway
    from towline.gateway.server import serve_gateway

    class Unrepeatable(ScriptedEngine):
        """No two samples are the same, in whatever process."""

        async def _say(self, request: SampleRequest) -> Say:
            assert request.request is not None
            if request.request.messages[-1].text == "break":
                raise RuntimeError("this was not foreseen")
            nonce = os.urandom(6).hex()
            calls = [ToolCall("", "bash", {"command": f"{nonce} {n}"}) for n in range(int(nonce, 16) % 3)]
            return Say("" if calls else f"said {nonce}", f"for {request.group}", calls, delay=os.urandom(1)[0] / 20_000)

    async def serve() -> None:
        settings = GatewaySettings(port=0, control_port=0, data=Path(order["data"]), **order["settings"])
        async with serve_gateway(Gateway(Unrepeatable(codec), codec, settings), CONTROL_KEY) as running:
            _tell(Path(order["ready"]), [running.base_url, running.control_url])
            await asyncio.Event().wait()

    logging.basicConfig(level=logging.DEBUG)
    uvloop.run(serve())


def _tell(ready: Path, urls: list[str]) -> None:
    draft = ready.with_suffix(".draft")
    draft.write_text(json.dumps(urls))
    draft.rename(ready)


if __name__ == "__main__":
    _fork_gateways(Path(sys.argv[1]))
