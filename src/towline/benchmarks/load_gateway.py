"""The process that the load benchmark measures.

`python -m towline.benchmarks.load_gateway MODEL_FOLDER DATA TURNS [forgetful]`; with `forgetful` no encoded line is
remembered. It serves until its standard input is closed, so that it never outlives whoever started it.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import sys
from pathlib import Path

import orjson
import uvloop

from towline.benchmarks.agent import replies
from towline.benchmarks.instant import InstantEngine
from towline.config import GatewaySettings
from towline.gateway.gateway import Gateway
from towline.gateway.heap import serving_for_long
from towline.gateway.server import Running, serving
from towline.tokens.loading import load_codec


async def _serve(folder: Path, data: Path, turns: int, *, forgetful: bool) -> None:
    codec = load_codec(folder)
    if forgetful:
        codec.tokenizer.remember(0)
    engine = InstantEngine(replies(codec, turns), codec.tokenizer.size)
    gateway = Gateway(engine, codec, GatewaySettings(port=0, control_port=0, data=data), model="bench")
    async with serving(gateway, secrets.token_urlsafe(16)) as running:
        with serving_for_long():
            await _until_closed(running)


async def _until_closed(running: Running) -> None:
    """Say where the gateway is, and wait for the end of standard input."""
    _give_back_memory()
    where = {"control_url": running.control_url, "control_key": running.control_key}
    print(orjson.dumps(where).decode(), flush=True)
    closed = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(closed), sys.stdin)
    await closed.read()


def _give_back_memory() -> None:
    """What loading left over, so that memory kept by turns is seen as growth and does not hide in free pages."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def main() -> None:
    folder, data, turns, *rest = sys.argv[1:]
    uvloop.run(_serve(Path(folder), Path(data), int(turns), forgetful="forgetful" in rest))


if __name__ == "__main__":
    main()
