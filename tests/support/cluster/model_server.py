"""A stand-in for `vllm serve MODEL --host HOST --port PORT`, which asks for the key in `VLLM_API_KEY` as vLLM does."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.engines.vllm_stand_in import VllmStandIn


@web.middleware
async def _keyed(request: web.Request, handler: Any) -> Any:
    if (
        request.path.startswith("/v1")
        and request.headers.get("Authorization") != f"Bearer {os.environ['VLLM_API_KEY']}"
    ):
        return web.json_response({"error": "Unauthorized"}, status=401)
    return await handler(request)


async def _main(model: Path, host: str, port: int) -> None:
    app = VllmStandIn(model, context=2000).app()
    app.middlewares.append(_keyed)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    print(f"serving on {os.environ['SLURMD_NODENAME']}", file=sys.stderr, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    asyncio.run(_main(given.model, given.host, given.port))
