"""Routers: their workers are the replicas, they come and go with the listing, and an engine that is not up yet is waited for.

The routers here are stand-ins with answers recorded from sglang-router 0.3.2 and vllm-router 0.1.16;
`tests/adapters/test_routers.py` runs the real ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from support.engines.sglang_stand_in import SglangStandIn, served
from support.gateway.gateway_rig import eventually
from towline.common.sockets import listen
from towline.engines.base import SampleRequest
from towline.engines.embedded import DecoderConfig, create_decoder, save_decoder
from towline.engines.pool import EnginePool, Upstreams
from towline.engines.pool.upstreams import read_workers
from towline.engines.sglang import SglangEngine
from towline.errors import EngineError

TURN = SampleRequest(np.arange(1, 20, dtype=np.int32), 8)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "0"
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = DecoderConfig("qwen3", 96, **sizes, num_key_value_heads=1, head_dim=8, max_position_embeddings=2048)
    save_decoder(create_decoder(config, 0), folder)
    return folder


class RouterStandIn:
    def __init__(self, *urls: str):
        self.urls = list(urls)

    async def workers(self, _: web.Request) -> web.Response:
        listed = [
            {"id": str(n), "url": url, "model_id": "tiny", "worker_type": "regular", "is_healthy": True, "load": 0}
            for n, url in enumerate(self.urls)
        ]
        return web.json_response({"workers": listed, "total": len(listed), "stats": {"regular_count": len(listed)}})

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/workers", self.workers)
        runner = web.AppRunner(app)
        await runner.setup()
        socket = listen("127.0.0.1", 0)
        await web.SockSite(runner, socket).start()
        try:
            yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        finally:
            await runner.cleanup()


def pool_of(urls: list[str], **options: Any) -> EnginePool:
    upstreams = Upstreams(urls, lambda url: SglangEngine(url, patience=30), interval=0.05)
    return EnginePool({}, listing=upstreams, interval=0.05, **options)


async def test_the_workers_of_a_router_are_the_replicas(weights: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        servers = [SglangStandIn(weights) for _ in range(3)]
        urls = [await stack.enter_async_context(served(server)) for server in servers]
        router = RouterStandIn(*urls[:2])
        pool = pool_of([await stack.enter_async_context(router.served())])
        stack.push_async_callback(pool.close)
        await pool.start()
        assert [replica.name for replica in pool.replicas] == [url.removeprefix("http://") for url in urls[:2]]
        assert pool.info.context == 512  # a worker's
        assert len((await pool.sample(TURN)).ids) == 8
        router.urls.append(urls[2])
        await eventually(lambda: len(pool.replicas) == 3 and pool.replicas[2].serving)
        servers[0].dead = True
        router.urls.remove(urls[0])
        await eventually(lambda: len(pool.replicas) == 2)
        assert len((await pool.sample(TURN)).ids) == 8


async def test_an_engine_that_is_not_up_is_waited_for(weights: Path, caplog: pytest.LogCaptureFixture) -> None:
    with listen("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    pool = pool_of([f"http://127.0.0.1:{port}"], start_seconds=60.0)
    with caplog.at_level(logging.WARNING):
        starting = asyncio.create_task(pool.start())
        await eventually(lambda: any("waiting up to 60 s for the engine" in r.message for r in caplog.records))
        async with served(SglangStandIn(weights), port):
            await starting
            assert len((await pool.sample(TURN)).ids) == 8
            await pool.close()
    assert any("the engine is up" in record.message for record in caplog.records)


async def test_without_a_deadline_it_is_an_error_at_once() -> None:
    with listen("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    pool = pool_of([f"http://127.0.0.1:{port}"])
    with pytest.raises(EngineError, match="no replica can be reached"):
        await pool.start()
    await pool.close()


def test_listings() -> None:
    assert read_workers({"urls": ["http://a:1", "http://a:1@1", "http://b:2"]}, "r") == ["http://a:1", "http://b:2"]
    assert read_workers({"workers": []}, "r") == read_workers({"object": "list"}, "r") == read_workers([], "r") == []
    with pytest.raises(EngineError, match="has prefill workers"):
        read_workers({"workers": [{"url": "http://a:1", "worker_type": "prefill"}]}, "r")
    with pytest.raises(EngineError, match="no HTTP address"):
        read_workers({"workers": [{"url": "grpc://a:1"}]}, "r")
