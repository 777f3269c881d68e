"""The SGLang engine against a stand-in of its documented protocol: what is sent and read, aborts, updates, and its death."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.engines.sglang_stand_in import SglangStandIn, served
from support.gateway.gateway_rig import eventually
from towline.conversation import Finish
from towline.engines.base import (
    CaptureLevel,
    Engine,
    EngineLoad,
    EngineUnreachable,
    PauseMode,
    ReportsHealth,
    ReportsLoad,
    Sample,
    SampleRequest,
)
from towline.engines.embedded import DecoderConfig, create_decoder, load_decoder, save_decoder
from towline.engines.sglang import SglangEngine
from towline.errors import EngineError
from towline.gateway import sampling

PATIENCE = 30
PROMPT = np.arange(1, 41, dtype=np.int32)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of weights of one model, `0` and `1`."""
    folder = tmp_path_factory.mktemp("weights")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    for seed in (0, 1):
        config = DecoderConfig(
            "qwen3", 96, **sizes, num_key_value_heads=1, head_dim=8, max_position_embeddings=2048, initializer_range=0.5
        )
        save_decoder(create_decoder(config, seed), folder / str(seed))
    return folder


@contextlib.asynccontextmanager
async def started(server: SglangStandIn, **options: Any) -> AsyncIterator[SglangEngine]:
    async with served(server) as url:
        engine = SglangEngine(url, patience=PATIENCE, **options)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()


def forward(folder: Path, prompt: Any, sample: Sample, temperature: float = 1.0) -> Any:
    row = torch.tensor([*prompt.tolist(), *sample.ids.tolist()])
    with torch.inference_mode():
        logits = load_decoder(folder)(row[None, :-1])[0, len(prompt) - 1 :] / temperature
    return logits.log_softmax(-1).gather(1, row[len(prompt) :, None])[:, 0].numpy()


async def test_what_the_server_is_is_found_by_asking_it(weights: Path) -> None:
    async with started(SglangStandIn(weights / "0", radix=False), model="tiny") as engine:
        assert isinstance(engine, Engine)
        assert isinstance(engine, ReportsLoad)
        assert isinstance(engine, ReportsHealth)
        info = engine.info
        assert (info.name, info.capture, info.context, info.vocabulary) == ("sglang", CaptureLevel.TOKENS, 512, 96)
        assert info.details["server"] == "sglang 0.5.9"
        assert info.details["prefix_caching"] == "off"
        assert info.details["route"] == "/generate"
        assert engine.version == 0
        assert await engine.healthy()


@pytest.mark.parametrize("older", [True, False])
async def test_older_and_newer_routes_report_the_same(weights: Path, older: bool) -> None:
    server = SglangStandIn(weights / "0", older=older, pace=0.05)
    async with started(server) as engine:
        assert await engine.load() == EngineLoad(0, 0, 0.0)
        work = asyncio.create_task(engine.sample(SampleRequest(PROMPT, 400)))
        await eventually(lambda: bool(server.running))
        assert await engine.load() == EngineLoad(1, 0, 1 / 64)
        work.cancel()


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_ids_go_in_and_come_out_with_the_logprobs_of_what_was_sampled_from(
    weights: Path, incremental: bool, temperature: float
) -> None:
    server = SglangStandIn(weights / "0", incremental=incremental)
    async with started(server) as engine:
        sample = await engine.sample(SampleRequest(PROMPT, 50, temperature, stop_ids=frozenset({95})))
        body = server.bodies[-1]
        assert body["input_ids"] == PROMPT.tolist()
        assert body.get("stream", False) is incremental
        assert "text" not in body
        assert sample.prompt_tokens == len(PROMPT)
        assert sample.versions.tolist() == [0] * len(sample.ids)
        np.testing.assert_allclose(
            sample.logprobs, forward(weights / "0", PROMPT, sample, temperature or 1.0), atol=1e-4
        )
        again = await engine.sample(SampleRequest(np.concatenate([PROMPT, sample.ids]), 5))
        # All that is known but the last token, which is sampled from.
        assert again.cached_tokens == len(PROMPT) + len(sample.ids) - 1


async def test_every_parameter_of_the_distribution_is_sent(weights: Path) -> None:
    server = SglangStandIn(weights / "0")
    async with started(server) as engine:
        await engine.sample(SampleRequest(PROMPT, 3, 0.9, stop_ids=frozenset({7, 5}), stop_strings=("zz",)))
        assert server.bodies[-1]["sampling_params"] == {
            "max_new_tokens": 3,
            "temperature": 0.9,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "stop_token_ids": [5, 7],
            "stop": ["zz"],
        }
        sample = await engine.sample(SampleRequest(PROMPT, 3, top_k=4))
        assert sample.flags == ("truncated_sampling",)


async def test_the_finish_reason_is_reported(weights: Path) -> None:
    async with started(SglangStandIn(weights / "0")) as engine:
        length = await engine.sample(SampleRequest(PROMPT, 12))
        assert (len(length.ids), length.finish) == (12, Finish.LENGTH)
        stopped = await engine.sample(SampleRequest(PROMPT, 400, stop_ids=frozenset(range(0, 96, 3))))
        assert stopped.finish is Finish.STOP
        assert int(stopped.ids[-1]) % 3 == 0
        assert all(int(id) % 3 for id in stopped.ids[:-1])
        by_text = await engine.sample(SampleRequest(PROMPT, 400, stop_strings=("c", "d")))
        assert by_text.finish is Finish.STOP_STRING
        assert by_text.stop_string in ("c", "d")
        assert int(by_text.ids[-1]) % 26 in (2, 3), "the token that completed it is kept"


async def test_the_rest_of_the_context_is_the_most_that_is_sampled(weights: Path) -> None:
    async with started(SglangStandIn(weights / "0", context=128)) as engine:
        sample = await engine.sample(SampleRequest(PROMPT, 10_000))
        assert (len(sample.ids), sample.finish) == (128 - len(PROMPT), Finish.LENGTH)
        with pytest.raises(EngineError, match="the prompt has 200 tokens, the context 128"):
            await engine.sample(SampleRequest(np.ones(200, np.int32), 10))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_forced_ids_are_scored_as_if_sampled(weights: Path, temperature: float) -> None:
    async with started(SglangStandIn(weights / "0")) as engine:
        forced = np.array([3, 50, 9, 77, 2, 95, 11], np.int32)
        request = SampleRequest(PROMPT, 100, temperature, forced=forced, stop_ids=frozenset({95}))
        sample = await engine.sample(request)
        assert sample.ids.tolist() == [3, 50, 9, 77, 2, 95]
        assert sample.finish is Finish.STOP
        np.testing.assert_allclose(sample.logprobs, forward(weights / "0", PROMPT, sample, temperature), atol=1e-4)


async def test_logprobs_from_before_the_temperature_are_refused(weights: Path) -> None:
    with pytest.raises(EngineError, match="start it without SGLANG_RETURN_ORIGINAL_LOGPROB"):
        async with started(SglangStandIn(weights / "0", original_logprobs=True)):
            pass


async def test_another_model_than_the_requested_one_is_refused(weights: Path) -> None:
    with pytest.raises(EngineError, match="not some-other"):
        async with started(SglangStandIn(weights / "0"), model="some-other"):
            pass


async def test_the_key_is_sent(weights: Path) -> None:
    async with started(SglangStandIn(weights / "0", api_key="of-the-tests"), api_key="of-the-tests") as engine:
        assert len((await engine.sample(SampleRequest(PROMPT, 3))).ids) == 3
    with pytest.raises(EngineError, match="401"):
        async with started(SglangStandIn(weights / "0", api_key="of-the-tests")):
            pass


@pytest.mark.parametrize("incremental", [True, False])
async def test_an_aborted_turn_returns_what_it_has_and_resumes_from_there(weights: Path, incremental: bool) -> None:
    server = SglangStandIn(weights / "0", pace=0.02, incremental=incremental)
    async with started(server) as engine:
        work = asyncio.create_task(engine.sample(SampleRequest(PROMPT, 400, id="long")))
        await eventually(lambda: any(server.sampled.get(rid, 0) > 3 for rid in server.running))
        await engine.abort(["long", "unknown"])
        sample = await work
        assert sample.finish is Finish.ABORT
        assert 0 < len(sample.ids) < 400
        np.testing.assert_allclose(sample.logprobs, forward(weights / "0", PROMPT, sample), atol=1e-4)
        assert not server.running
        assert "abort_request" in server.calls


async def test_a_cancelled_turn_is_aborted_at_the_server(weights: Path) -> None:
    server = SglangStandIn(weights / "0", pace=0.02)
    async with started(server) as engine:
        work = asyncio.create_task(engine.sample(SampleRequest(PROMPT, 400)))
        await eventually(lambda: bool(server.running))
        work.cancel()
        await eventually(lambda: not server.running)
        assert server.calls == ["abort_request"]


async def test_a_turn_that_does_not_hear_the_abort_is_cut_off(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("towline.engines.sglang._ABORT_TIMEOUT", 0.3)
    server = SglangStandIn(weights / "0", pace=0.02, deaf=True)
    async with started(server) as engine:
        work = asyncio.create_task(engine.sample(SampleRequest(PROMPT, 400, id="long")))
        await eventually(lambda: bool(server.running))
        await engine.abort(["long"])
        assert (await work).finish is Finish.ABORT
        assert server.calls.count("abort_request") >= 2


@pytest.mark.parametrize("incremental", [True, False])
async def test_weights_are_replaced_under_a_running_turn_and_every_token_has_its_version(
    weights: Path, incremental: bool
) -> None:
    server = SglangStandIn(weights / "0", pace=0.02, incremental=incremental)
    async with started(server) as engine:
        work = asyncio.create_task(sampling.sample_turn(engine, SampleRequest(PROMPT, 100, id="t")))
        await eventually(lambda: any(server.sampled.get(rid, 0) > 3 for rid in server.running))
        await engine.update_weights(weights / "1", 7)
        assert (engine.version, server.label) == (7, "7")
        assert [call for call in server.calls if call != "abort_request"] == [
            "pause_generation",
            "update_weights_from_disk",
            "continue_generation",
        ]
        assert engine.info.details["weights_proven_by"] == "forward"
        sample = await work
        versions = sample.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 7}
        split = versions.index(7)
        expected = np.concatenate(
            [forward(weights / "0", PROMPT, sample)[:split], forward(weights / "1", PROMPT, sample)[split:]]
        )
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


async def test_an_update_that_the_server_only_says_it_made_is_caught(weights: Path) -> None:
    async with started(SglangStandIn(weights / "0", forgets_update=True)) as engine:
        with pytest.raises(EngineError, match="stale weights"):
            await engine.update_weights(weights / "1", 1)
        assert engine.version == 0


async def test_weights_that_cannot_be_loaded_are_reported_and_the_server_continues(
    weights: Path, tmp_path: Path
) -> None:
    server = SglangStandIn(weights / "0")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "part.safetensors").write_bytes(b"")
    async with started(server) as engine:
        with pytest.raises(EngineError, match="holds no safetensors file"):
            await engine.update_weights(tmp_path / "none", 1)
        assert (await engine.sample(SampleRequest(PROMPT, 1))).versions.tolist() == [0], "nothing was touched"
        with pytest.raises(EngineError, match="Failed to get weights iterator"):
            await engine.update_weights(tmp_path, 1)
        assert server.calls[-1] == "continue_generation"
        await engine.update_weights(weights / "1", 2)
        assert (await engine.sample(SampleRequest(PROMPT, 3))).versions.tolist() == [2, 2, 2]


async def test_weights_that_came_by_another_way_are_labelled_with_their_version(weights: Path) -> None:
    server = SglangStandIn(weights / "0")
    async with started(server) as engine:
        before = [(await engine.sample(SampleRequest(PROMPT, 3))).cached_tokens for _ in range(2)]
        await engine.pause(PauseMode.ABORT)
        await engine.resume(4)
        assert server.label == "4"
        sample = await engine.sample(SampleRequest(PROMPT, 3))
        assert sample.versions.tolist() == [4, 4, 4]
        # Whoever replaced them, and whether or not the cache was flushed: nothing computed before is used again.
        assert (before[0], before[1] > 0, sample.cached_tokens) == (0, True, 0)
        assert (await engine.sample(SampleRequest(PROMPT, 3))).cached_tokens > 0


async def test_a_server_that_starts_at_a_version_says_so(weights: Path) -> None:
    async with started(SglangStandIn(weights / "0", label="12")) as engine:
        assert engine.version == 12


async def test_a_server_that_was_started_again_is_gone_since_its_weights_are_others(weights: Path) -> None:
    server = SglangStandIn(weights / "0")
    async with started(server) as engine:
        await engine.update_weights(weights / "1", 3)
        server.label = "default"
        with pytest.raises(EngineUnreachable, match="has the weights 'default' in place of '3': it was restarted"):
            await engine.sample(SampleRequest(PROMPT, 3))
        await engine.start()
        assert engine.version == 0


async def test_a_server_without_labels_is_served_under_the_version_it_was_given(weights: Path) -> None:
    async with started(SglangStandIn(weights / "0", tells_label=False)) as engine:
        await engine.update_weights(weights / "1", 3)
        assert (await engine.sample(SampleRequest(PROMPT, 3))).versions.tolist() == [3, 3, 3]


@pytest.mark.parametrize("incremental", [True, False])
async def test_a_server_that_dies_under_a_turn_is_gone_with_what_had_been_streamed(
    weights: Path, incremental: bool
) -> None:
    server = SglangStandIn(weights / "0", incremental=incremental)
    async with started(server) as engine:
        server.cut_after = 10
        with pytest.raises(EngineUnreachable) as caught:
            await engine.sample(SampleRequest(PROMPT, 100))
        partial = caught.value.partial
        if incremental:
            assert partial is not None
            assert len(partial.ids) >= 8
            np.testing.assert_allclose(partial.logprobs, forward(weights / "0", PROMPT, partial), atol=1e-4)
        else:
            assert partial is None
        assert not await engine.healthy()


async def test_a_server_that_cannot_be_reached_is_gone_and_one_that_refuses_is_not(weights: Path) -> None:
    engine = SglangEngine("http://127.0.0.1:9", patience=PATIENCE)
    with pytest.raises(EngineUnreachable):
        await engine.start()
    await engine.close()
    server = SglangStandIn(weights / "0")
    async with started(server) as engine:
        server.status = 500
        with pytest.raises(EngineUnreachable, match="the scheduler is gone"):
            await engine.sample(SampleRequest(PROMPT, 3))
        server.status = 200
        with pytest.raises(EngineError, match="the vocabulary has 96 ids") as caught:
            await engine.sample(SampleRequest(np.array([500], np.int32), 3))
        assert not isinstance(caught.value, EngineUnreachable)
