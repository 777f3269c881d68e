"""Weights that a trainer pushes into its own engine: every token keeps the version of the weights that sampled it, without a
pause of ours, and no replica is lost. The servers are stand-ins that follow the source of vLLM and SGLang."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from support.engines import sglang_stand_in, vllm_stand_in
from support.engines.sglang_stand_in import SglangStandIn
from support.engines.vllm_stand_in import VllmStandIn
from support.gateway.gateway_rig import eventually
from towline.engines.base import EngineUnreachable, Sample, SampleRequest
from towline.engines.embedded import DecoderConfig, create_decoder, load_decoder, save_decoder
from towline.engines.pool import EnginePool
from towline.engines.sglang import SglangEngine
from towline.engines.vllm import VllmEngine
from towline.engines.weight_labels import MIXED_CACHE, MIXED_VERSIONS, mixed_cache_tokens
from towline.errors import EngineError

PATIENCE = 30
PROMPT = np.arange(1, 41, dtype=np.int32)
BOUND = 1e-4


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    for seed in range(3):
        config = DecoderConfig(
            "qwen3", 96, **sizes, num_key_value_heads=1, head_dim=8, max_position_embeddings=2048, initializer_range=0.5
        )
        save_decoder(create_decoder(config, seed), folder / str(seed))
    return folder


@contextlib.asynccontextmanager
async def sglang(server: SglangStandIn) -> AsyncIterator[SglangEngine]:
    async with sglang_stand_in.served(server) as url:
        engine = SglangEngine(url, patience=PATIENCE)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()


@contextlib.asynccontextmanager
async def vllm(server: VllmStandIn) -> AsyncIterator[VllmEngine]:
    async with vllm_stand_in.served(server) as url:
        engine = VllmEngine(url, patience=PATIENCE)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()


def recomputed(folder: Path, sample: Sample) -> np.ndarray:
    """The logprob of each token under the weights of its own version."""
    row = torch.tensor([*PROMPT.tolist(), *sample.ids.tolist()])
    values = np.zeros(len(sample.ids), np.float32)
    for version in np.unique(sample.versions):
        with torch.inference_mode():
            logits = load_decoder(folder / str(version))(row[None, :-1])[0, len(PROMPT) - 1 :]
        own = logits.log_softmax(-1).gather(1, row[len(PROMPT) :, None])[:, 0].numpy()
        values[sample.versions == version] = own[sample.versions == version]
    return values


def turn(tokens: int = 24) -> SampleRequest:
    return SampleRequest(PROMPT, tokens, temperature=1.0, id="turn")


@pytest.mark.parametrize("incremental", [False, True])
async def test_each_token_has_the_version_that_sampled_it(weights: Path, incremental: bool) -> None:
    server = SglangStandIn(weights / "0", pace=0.02, incremental=incremental)
    async with sglang(server) as engine:
        running = asyncio.create_task(engine.sample(turn(64)))
        await eventually(lambda: any(server.sampled.get(rid, 0) >= 12 for rid in server.running))
        await server.push(weights / "1", "1")
        before = max(server.sampled.values())
        await eventually(lambda: max(server.sampled.values()) >= before + 12 or running.done())
        await server.push(weights / "2", "2")
        sample = await running
        assert sample.versions.tolist() == sorted(sample.versions.tolist())
        assert set(sample.versions.tolist()) == {0, 1, 2}
        assert np.abs(recomputed(weights, sample) - sample.logprobs).max() < BOUND
        # The stand-in computes keys and values again; a real server need not, and does not say.
        assert sample.mixed_cache == int((sample.versions > 0).sum())
        assert MIXED_CACHE in sample.flags
        assert engine.version == 2
        after = await engine.sample(turn())
        assert set(after.versions.tolist()) == {2}
        assert after.mixed_cache == 0
        assert "pause_generation" not in server.calls
        assert not server.unknown


async def test_an_older_server_without_spans_gives_the_older_version_and_says_so(weights: Path) -> None:
    server = SglangStandIn(weights / "0", pace=0.02, tells_spans=False)
    async with sglang(server) as engine:
        running = asyncio.create_task(engine.sample(turn(48)))
        await eventually(lambda: any(server.sampled.get(rid, 0) >= 12 for rid in server.running))
        await server.push(weights / "1", "1")
        sample = await running
        assert set(sample.versions.tolist()) == {0}
        assert MIXED_VERSIONS in sample.flags
        assert set((await engine.sample(turn())).versions.tolist()) == {1}


async def test_only_a_label_that_goes_back_is_a_restart(weights: Path) -> None:
    server = SglangStandIn(weights / "0", label="3")
    async with sglang(server) as engine:
        assert engine.version == 3
        await server.push(weights / "1", "5")
        assert set((await engine.sample(turn())).versions.tolist()) == {5}
        await server.push(weights / "0", "default")  # what a restarted server has
        with pytest.raises(EngineUnreachable, match="restarted"):
            await engine.sample(turn())
        await server.push(weights / "1", "4")
        with pytest.raises(EngineUnreachable, match="in place of '5'"):
            await engine.sample(turn())


async def test_an_unknown_label_is_a_restart_only_with_other_logprobs(weights: Path) -> None:
    server = SglangStandIn(weights / "0")
    async with sglang(server) as engine:
        server.label = "renamed"
        assert set((await engine.sample(turn())).versions.tolist()) == {0}
        await server.push(weights / "1", "other")
        for _ in range(2):
            with pytest.raises(EngineUnreachable, match="restarted, or its trainer"):
                await engine.sample(turn())


async def test_a_late_answer_of_older_weights_is_not_a_restart(weights: Path) -> None:
    server = SglangStandIn(weights / "0", pace=0.02)
    async with sglang(server) as engine:
        late = asyncio.create_task(engine.sample(turn(40)))
        await eventually(lambda: any(server.sampled.get(rid, 0) for rid in server.running))
        engine._follow("1", 1)
        assert set((await late).versions.tolist()) == {0}


async def test_announced_weights(weights: Path) -> None:
    server = SglangStandIn(weights / "0")
    async with sglang(server) as engine:
        with pytest.raises(EngineError, match="reports no version"):
            await engine.announce(None)
        await server.push(weights / "1", None)  # a trainer that does not label
        assert await engine.announce(1) == 1
        assert server.label == "1"
        assert set((await engine.sample(turn())).versions.tolist()) == {1}
        await server.push(weights / "2", "2")
        with pytest.raises(EngineError, match="later than the announced version 1"):
            await engine.announce(1)
        assert await engine.announce(None) == 2
        with pytest.raises(EngineError, match="later than"):
            await engine.announce(1)


async def test_a_paused_server_is_alive(weights: Path) -> None:
    server = SglangStandIn(weights / "0")
    async with sglang(server) as engine:
        await engine._post("/pause_generation", {"mode": "in_place"})
        assert await engine.healthy()
        waiting = asyncio.create_task(engine.sample(turn()))
        await eventually(lambda: bool(server.running))
        await engine._post("/continue_generation", {})
        assert len((await waiting).ids) == 24
        server.status = 500
        assert not await engine.healthy()


async def test_a_push_keeps_every_replica(weights: Path) -> None:
    servers = [SglangStandIn(weights / "0", pace=0.01) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(sglang_stand_in.served(server)) for server in servers]
        pool = EnginePool([SglangEngine(url, patience=PATIENCE) for url in urls], interval=0.05)
        await pool.start()
        stack.push_async_callback(pool.close)
        for version in (1, 2):
            turns = [asyncio.create_task(pool.sample(turn(40))) for _ in range(6)]
            await eventually(lambda: all(server.running for server in servers))
            for server in servers:  # one replica after the other
                await server.push(weights / str(version), str(version))
            samples = await asyncio.gather(*turns)
            for sample in samples:
                assert np.abs(recomputed(weights, sample) - sample.logprobs).max() < BOUND
                assert set(sample.versions.tolist()) <= {version - 1, version}
            assert await pool.announce(None) == pool.version == version
        assert all(replica.serving for replica in pool.replicas)
        assert [replica.counters.failures for replica in pool.replicas] == [0, 0]


async def test_a_replica_that_lost_pushed_weights_waits_for_the_next_push(weights: Path) -> None:
    servers = [SglangStandIn(weights / "0") for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(sglang_stand_in.served(server)) for server in servers]
        pool = EnginePool([SglangEngine(url, patience=PATIENCE) for url in urls], interval=0.05)
        await pool.start()
        stack.push_async_callback(pool.close)
        for server in servers:
            await server.push(weights / "1", "1")
        await pool.announce(1)
        servers[0].dead = True
        await eventually(lambda: not pool.replicas[0].serving)
        await servers[0].push(weights / "0", "default")
        servers[0].dead = False
        await eventually(lambda: "trainer pushed" in pool.replicas[0].problem)
        for server in servers:
            await server.push(weights / "2", "2")
        assert await pool.announce(2) == 2
        await eventually(lambda: pool.replicas[0].serving)
        # One that was only out of reach comes back with the weights it has.
        servers[1].dead = True
        await eventually(lambda: not pool.replicas[1].serving)
        servers[1].dead = False
        await eventually(lambda: pool.replicas[1].serving)


async def test_vllm_follows_labels_and_leaves_the_trainers_pause_alone(weights: Path) -> None:
    server = VllmStandIn(weights / "0", context=512)
    async with vllm(server) as engine:
        assert set((await engine.sample(turn())).versions.tolist()) == {0}
        server.decoder = load_decoder(weights / "1")
        server.head = server.decoder.head.detach().clone()
        server.label = "1"
        sample = await engine.sample(turn())
        assert set(sample.versions.tolist()) == {1}
        assert np.abs(recomputed(weights, sample) - sample.logprobs).max() < BOUND
        assert await engine.announce(None) == 1
        await engine._post("/pause")  # the trainer's
        assert await engine.healthy()
        assert engine.pauses.paused
        await engine.resume()
        assert server.paused
        with pytest.raises(EngineUnreachable, match="paused, by its trainer"):
            await engine.start()
        await engine._post("/resume")
        assert await engine.healthy()
        assert not engine.pauses.paused
        server.label = "default"
        with pytest.raises(EngineUnreachable, match="restarted"):
            await engine.sample(turn())


async def test_vllm_without_labels_takes_what_is_announced(weights: Path) -> None:
    server = VllmStandIn(weights / "0", context=512, dev_mode=False)
    async with vllm(server) as engine:
        server.decoder = load_decoder(weights / "1")
        server.head = server.decoder.head.detach().clone()
        assert not await engine.same_weights()
        assert await engine.announce(7) == 7
        assert set((await engine.sample(turn())).versions.tolist()) == {7}
        await engine._background.finish()
        assert await engine.same_weights()


def test_mixed_cache_counts_what_may_have_an_older_context() -> None:
    versions = np.array([1, 1, 2, 2, 2], np.int32)
    assert mixed_cache_tokens(versions, 1, 30) == 3
    assert mixed_cache_tokens(versions, 0, 30) == 5  # the prefix was cached for version 0
    assert mixed_cache_tokens(versions, 0, 0) == 3
    assert mixed_cache_tokens(versions[:2], 1, 30) == 0
    assert mixed_cache_tokens(versions[:0], 0, 30) == 0
