"""The engine over the real vLLM: what it samples, scores, stops, aborts and refuses, by either route."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from support.engines.torch_rows import BOUND
from support.engines.vllm_server import CONTEXT, STEERABLE, served
from towline import assets
from towline.audit.evidence import logprobs
from towline.conversation import Finish
from towline.engines.base import SampleRequest
from towline.engines.embedded import load_decoder
from towline.engines.vllm import VllmEngine
from towline.errors import EngineError
from towline.tokens.tokenizer import Tokenizer

PROMPT = np.random.default_rng(7).integers(0, 150_000, 300).astype(np.int32)


def scored(folder: Path, ids: np.ndarray) -> np.ndarray:
    row = np.concatenate([PROMPT, ids])
    return logprobs(load_decoder(folder), row, np.arange(len(PROMPT), len(row)), np.ones(len(row), np.float32))


async def check_sampling(engine: VllmEngine, folder: Path, *, cached: bool) -> None:
    """What holds on either route."""
    whole = await engine.sample(SampleRequest(PROMPT, 24, seed=5))
    assert (whole.finish, whole.prompt_tokens, len(whole.ids)) == (Finish.LENGTH, len(PROMPT), 24)
    assert np.abs(scored(folder, whole.ids) - whole.logprobs).max() < BOUND
    again = await engine.sample(SampleRequest(PROMPT, 24, seed=5, stop_ids=frozenset({int(whole.ids[9])})))
    assert (again.finish, again.ids.tolist()) == (Finish.STOP, whole.ids[:10].tolist())
    assert (again.cached_tokens > 0) is cached
    greedy = await engine.sample(SampleRequest(PROMPT, 8, temperature=0.0))
    assert np.abs(scored(folder, greedy.ids) - greedy.logprobs).max() < BOUND
    forced = await engine.sample(SampleRequest(PROMPT, 24, forced=whole.ids))
    assert forced.ids.tolist() == whole.ids.tolist()
    assert np.abs(forced.logprobs - whole.logprobs).max() < BOUND
    tokenizer = Tokenizer.load(assets.tokenizer("qwen3"))
    text = tokenizer.decode(whole.ids[3:5].tolist())
    string = text[len(text) // 2 :]
    stopped = await engine.sample(SampleRequest(PROMPT, 24, seed=5, stop_strings=("\0never", string)))
    assert (stopped.finish, stopped.stop_string) == (Finish.STOP_STRING, string)
    assert stopped.ids.tolist() == whole.ids[: len(stopped.ids)].tolist()
    assert string in tokenizer.decode(stopped.ids.tolist())
    assert string not in tokenizer.decode(stopped.ids[:-1].tolist())


async def test_the_route_for_ids_samples_and_scores_as_torch_does(engine: VllmEngine, sets: list[Path]) -> None:
    details = engine.info.details
    assert details["route"] == "/inference/v1/generate"
    assert details["prefix_caching"] == "on"
    assert (engine.info.context, engine.info.vocabulary) == (CONTEXT, 151_669)
    await check_sampling(engine, sets[0], cached=True)


async def test_an_abort_and_a_cancelled_call_end_the_turn_on_the_server(engine: VllmEngine) -> None:
    async def running(count: int) -> None:
        for _ in range(600):
            if (await engine.load()).running == count:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"the server does not come to {count} running turns")

    turn = asyncio.create_task(engine.sample(SampleRequest(PROMPT, 20_000, id="one")))
    other = asyncio.create_task(engine.sample(SampleRequest(PROMPT, 20_000, id="two")))
    await running(2)
    await engine.abort(["one"])
    sample = await turn
    assert sample.finish is Finish.ABORT
    assert len(sample.ids) == len(sample.logprobs) < 20_000
    await running(1)
    other.cancel()
    await running(0)


async def test_a_server_with_few_switches_is_used_by_the_other_route_and_its_stale_head_is_caught(
    tied: list[Path], tmp_path: Path
) -> None:
    """Tied embeddings on a CPU: the reload is answered with success, and the head stays the old one."""
    processed = STEERABLE[:2]
    async with served(tied[0], tmp_path / "vllm.log", *processed) as server:
        engine = VllmEngine(server.url)
        await engine.start()
        assert engine.info.details["route"] == "/v1/completions"
        assert engine.info.details["prefix_caching"] == "on"
        await check_sampling(engine, tied[0], cached=False)
        with pytest.raises(EngineError, match=r"stale head of tied embeddings: .*lm_head\.weight of its own"):
            await engine.update_weights(tied[1], 1)
        assert engine.version == 0
        async with aiohttp.ClientSession() as http, http.get(f"{server.url}/is_paused") as response:
            assert (await response.json())["is_paused"]
        # The weights that it has kept all along are right again for all of it.
        await engine.update_weights(tied[0], 2)
        sample = await engine.sample(SampleRequest(PROMPT, 4))
        assert sample.versions.tolist() == [2] * 4
        assert np.abs(scored(tied[0], sample.ids) - sample.logprobs).max() < BOUND
        await engine.close()


async def test_a_server_as_it_comes_is_refused(sets: list[Path], tmp_path: Path) -> None:
    async with served(sets[0], tmp_path / "vllm.log", dev_mode=False) as server:
        engine = VllmEngine(server.url)
        with pytest.raises(EngineError, match="start it with --logprobs-mode processed_logprobs"):
            await engine.start()
        await engine.close()
