"""A pool behind the real sglang-router and vLLM's router, whose workers are stand-ins of SGLang: their own listings are read.

Their environment is `.venv-routers` (`requirements/trainers.sh routers`), or that of `TOWLINE_ROUTERS`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from support.engines.sglang_stand_in import SglangStandIn, served
from towline.common.sockets import listen
from towline.engines.base import SampleRequest
from towline.engines.embedded import DecoderConfig, create_decoder, save_decoder
from towline.engines.pool import EnginePool, Upstreams
from towline.engines.sglang import SglangEngine

ENVIRONMENT = Path(os.environ.get("TOWLINE_ROUTERS") or Path(__file__).resolve().parents[2] / ".venv-routers")
TURN = SampleRequest(np.arange(1, 20, dtype=np.int32), 8)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = DecoderConfig("qwen3", 96, **sizes, num_key_value_heads=1, head_dim=8, max_position_embeddings=2048)
    for seed in range(2):
        save_decoder(create_decoder(config, seed), folder / str(seed))
    return folder


def free_port() -> int:
    with listen("127.0.0.1", 0) as found:
        return int(found.getsockname()[1])


@contextlib.asynccontextmanager
async def router(module: str, urls: list[str], log: Path) -> AsyncIterator[str]:
    """The real router in front of these workers, once it lists all of them."""
    port = free_port()
    command = [str(ENVIRONMENT / "bin" / "python"), "-m", module, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *urls]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
        try:
            async with asyncio.timeout(300), aiohttp.ClientSession() as http:
                while True:
                    assert process.returncode is None, f"the router ended: see {log}"
                    with contextlib.suppress(aiohttp.ClientError):
                        async with http.get(f"{url}/workers") as response:
                            if len((await response.json())["workers"]) == len(urls):
                                break
                    await asyncio.sleep(0.5)
            yield url
        finally:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(20):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()


async def attached(module: str, weights: Path, tmp_path: Path) -> None:
    servers = [SglangStandIn(weights / "0") for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(server)) for server in servers]
        url = await stack.enter_async_context(router(module, urls, tmp_path / "router.log"))
        pool = EnginePool({}, listing=Upstreams([url], lambda one: SglangEngine(one, patience=60)), interval=0.2)
        stack.push_async_callback(pool.close)
        await pool.start()
        assert {replica.name for replica in pool.replicas} == {one.removeprefix("http://") for one in urls}
        assert all(replica.serving for replica in pool.replicas)
        assert pool.info.context == 512
        for server in servers:
            await server.push(weights / "1", "1")
        samples = await asyncio.gather(*(pool.sample(TURN) for _ in range(4)))
        assert {int(version) for sample in samples for version in sample.versions} == {1}
        assert await pool.announce(None) == 1


async def test_a_pool_attaches_through_sglang_router(weights: Path, tmp_path: Path) -> None:
    await attached("sglang_router.launch_router", weights, tmp_path)


async def test_a_pool_attaches_through_vllms_router(weights: Path, tmp_path: Path) -> None:
    await attached("vllm_router.launch_router", weights, tmp_path)
