"""The vLLM engine against a stand-in: both routes, what is probed and refused, aborts, updates, and how a server dies.

The stand-in is `vllm_stand_in.py`; `make test-engines` runs the same engine over the real program.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.engines.vllm_stand_in import PAD, WIDTH, VllmStandIn, served
from towline.common.images import PlacedImage
from towline.conversation import Finish, Media
from towline.engines import server_checks
from towline.engines.base import (
    AcceptsImages,
    CaptureLevel,
    EngineLoad,
    EngineUnreachable,
    PauseMode,
    ReportsHealth,
    ReportsLoad,
    SampleRequest,
)
from towline.engines.embedded import DecoderConfig, create_decoder, load_decoder, save_decoder
from towline.engines.stalls import StallDetector
from towline.engines.vllm import VllmEngine, wire
from towline.errors import BadRequest, EngineError

VOCABULARY = 96
PATIENCE = 30
PROMPT = np.arange(1, 41, dtype=np.int32)


def config(**fields: Any) -> DecoderConfig:
    sizes = dict(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    return DecoderConfig(
        "qwen3", VOCABULARY, **sizes, head_dim=8, max_position_embeddings=2048, initializer_range=0.5, **fields
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of weights of an untied model, `0` and `1`, and of a tied one, `tied-0` and `tied-1`."""
    folder = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        save_decoder(create_decoder(config(), seed), folder / str(seed))
        save_decoder(create_decoder(config(tie_word_embeddings=True), seed), folder / f"tied-{seed}")
    return folder


@contextlib.asynccontextmanager
async def started(server: VllmStandIn, **options: Any) -> AsyncIterator[VllmEngine]:
    async with served(server) as url:
        engine = VllmEngine(url, patience=PATIENCE, **options)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()


def forward(folder: Path, prompt: Any, ids: Any, temperature: float = 1.0) -> Any:
    row = torch.tensor([*prompt.tolist(), *ids.tolist()])
    with torch.inference_mode():
        logits = load_decoder(folder)(row[None, :-1])[0, len(prompt) - 1 :] / temperature
    return logits.log_softmax(-1).gather(1, row[len(prompt) :, None])[:, 0].numpy()


async def held_back(engine: VllmEngine, request: SampleRequest) -> asyncio.Task[Any]:
    """A turn that has reached the gate of a paused engine and waits there."""
    detector = request.stall_detector = StallDetector(PATIENCE)
    task = asyncio.create_task(engine.sample(request))
    await until(lambda: detector.is_suspended)
    assert not task.done()
    return task


async def until(true: Callable[[], bool]) -> None:
    for _ in range(PATIENCE * 100):
        if true():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("it does not come true")


async def arrived(engine: VllmEngine, tokens: int) -> None:
    """Wait until so many tokens have arrived."""
    await until(lambda: engine.stats.decoded_tokens >= tokens)


@pytest.mark.parametrize("scale_out", [True, False])
async def test_either_route_gives_ids_and_the_logprobs_that_they_were_sampled_with(
    weights: Path, scale_out: bool
) -> None:
    server = VllmStandIn(weights / "0", scale_out=scale_out)
    async with started(server) as engine:
        assert isinstance(engine, ReportsLoad)
        assert isinstance(engine, ReportsHealth)
        info = engine.info
        assert (info.capture, info.context, info.vocabulary) == (CaptureLevel.TOKENS, 256, VOCABULARY)
        assert info.details["route"] == ("/inference/v1/generate" if scale_out else "/v1/completions")
        assert info.details["server"] == "vllm 0.32.0"
        assert info.details["prefix_caching"] == "on"
        for temperature in (1.0, 0.7, 0.0):
            sample = await engine.sample(SampleRequest(PROMPT, 12, temperature=temperature, seed=5))
            assert sample.finish is Finish.LENGTH
            assert len(sample.ids) == 12
            assert sample.prompt_tokens == len(PROMPT)
            assert sample.versions.tolist() == [0] * 12
            assert np.abs(forward(weights / "0", PROMPT, sample.ids, temperature or 1.0) - sample.logprobs).max() < 1e-4
        assert sample.cached_tokens == 32
        again = await engine.sample(SampleRequest(PROMPT, 12, seed=5))
        same = await engine.sample(SampleRequest(PROMPT, 12, seed=5))
        assert again.ids.tolist() == same.ids.tolist()
        assert engine.stats.turns == 5


@pytest.mark.parametrize("scale_out", [True, False])
async def test_nothing_is_left_for_the_server_to_fill_in(weights: Path, scale_out: bool) -> None:
    """Its own defaults come from the model's generation settings, and would change what is sampled from."""
    server = VllmStandIn(weights / "0", scale_out=scale_out)
    async with started(server) as engine:
        await engine.sample(
            SampleRequest(PROMPT, 3, top_p=0.9, top_k=8, stop_ids=frozenset({90}), stop_strings=("zz",))
        )
    body = server.bodies[-1]
    params = body["sampling_params"] if scale_out else body
    wanted = {"temperature": 1.0, "top_p": 0.9, "top_k": 8, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    wanted |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [90], "stop": ["zz"]}
    assert wanted.items() <= params.items()
    assert body["token_ids" if scale_out else "prompt"] == PROMPT.tolist()


@pytest.mark.parametrize("scale_out", [True, False])
async def test_stop_ids_and_stop_strings_end_a_turn_with_their_token(weights: Path, scale_out: bool) -> None:
    async with started(VllmStandIn(weights / "0", scale_out=scale_out)) as engine:
        whole = await engine.sample(SampleRequest(PROMPT, 12, seed=5))
        ids = whole.ids.tolist()
        stop = next(id for place, id in enumerate(ids) if place >= 3 and id not in ids[:place])
        end = ids.index(stop) + 1
        stopped = await engine.sample(SampleRequest(PROMPT, 12, seed=5, stop_ids=frozenset({stop})))
        assert stopped.finish is Finish.STOP
        assert stopped.ids.tolist() == ids[:end]
        assert stopped.logprobs.tolist() == whole.logprobs.tolist()[:end]
        letters = "".join(chr(ord("a") + id % 26) for id in ids[:end])
        string = letters[-2:]
        end = letters.index(string) + 2
        told = await engine.sample(SampleRequest(PROMPT, 12, seed=5, stop_strings=("never", string)))
        assert (told.finish, told.stop_string) == (Finish.STOP_STRING, string)
        assert told.ids.tolist() == ids[:end]
        truncated = await engine.sample(SampleRequest(PROMPT, 2, top_p=0.5))
        assert truncated.flags == ("truncated_sampling",)


async def test_the_context_limits_a_turn_and_what_cannot_be_sampled_is_refused(weights: Path) -> None:
    async with started(VllmStandIn(weights / "0", context=64)) as engine:
        assert len((await engine.sample(SampleRequest(PROMPT, 500))).ids) == 24
        full = await engine.sample(SampleRequest(np.arange(64, dtype=np.int32), 5))
        assert (full.finish, len(full.ids)) == (Finish.LENGTH, 0)
        for prompt, reason in (
            (np.empty(0, np.int32), "empty"),
            (np.ones(65, np.int32), "the context 64"),
            (np.array([VOCABULARY], np.int32), "the vocabulary has 96"),
        ):
            with pytest.raises(EngineError, match=reason):
                await engine.sample(SampleRequest(prompt, 5))


@pytest.mark.parametrize("scale_out", [True, False])
async def test_forced_ids_are_scored_as_if_sampled(weights: Path, scale_out: bool) -> None:
    async with started(VllmStandIn(weights / "0", scale_out=scale_out)) as engine:
        forced = np.array([0, 3, 90, 0, 7, *range(30)], np.int32)
        sample = await engine.sample(SampleRequest(PROMPT, 100, temperature=0.7, forced=forced))
        assert sample.ids.tolist() == forced.tolist()
        assert (sample.finish, sample.prompt_tokens) == (Finish.LENGTH, len(PROMPT))
        assert np.abs(forward(weights / "0", PROMPT, forced, 0.7) - sample.logprobs).max() < 1e-4
        stopped = await engine.sample(SampleRequest(PROMPT, 100, forced=forced, stop_ids=frozenset({90})))
        assert (stopped.finish, stopped.ids.tolist()) == (Finish.STOP, [0, 3, 90])


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logits"])
async def test_logprobs_of_another_distribution_are_refused_with_what_to_do(weights: Path, mode: str) -> None:
    with pytest.raises(EngineError, match="start it with --logprobs-mode processed_logprobs"):
        async with started(VllmStandIn(weights / "0", logprobs_mode=mode)):
            pass


async def test_whether_prompts_are_cached_is_found_by_trying(weights: Path) -> None:
    for told, metrics, caching, expected in (
        (True, False, True, "on"),
        (True, False, False, "off"),
        (False, True, True, "on"),
        (False, True, False, "off"),
        (False, False, True, "unknown"),
    ):
        server = VllmStandIn(weights / "0", prompt_details=told, metrics=metrics, prefix_caching=caching)
        async with started(server) as engine:
            assert engine.info.details["prefix_caching"] == expected, (told, metrics, caching)


async def test_a_missing_model_and_a_paused_server_are_refused(weights: Path) -> None:
    with pytest.raises(EngineError, match="does not serve 'other'; it has: tiny"):
        async with started(VllmStandIn(weights / "0"), model="other"):
            pass
    with pytest.raises(EngineError, match="is paused, by its trainer or an interrupted weight update"):
        async with started(VllmStandIn(weights / "0", paused=True)):
            pass


@pytest.mark.parametrize("scale_out", [True, False])
async def test_an_abort_returns_what_arrived_and_the_server_hears_of_it(weights: Path, scale_out: bool) -> None:
    server = VllmStandIn(weights / "0", scale_out=scale_out, gate=asyncio.Event())
    server.gate.set()
    async with started(server) as engine:
        server.gate.clear()
        before = engine.stats.decoded_tokens
        turn = asyncio.create_task(engine.sample(SampleRequest(PROMPT, 50, id="one", seed=1)))
        await arrived(engine, before + 3)
        assert await engine.load() == EngineLoad(1, 0, 0.25)
        await engine.abort(["one", "nobody"])
        sample = await turn
        assert (sample.finish, len(sample.ids), len(sample.versions)) == (Finish.ABORT, 3, 3)
        cancelled = asyncio.create_task(engine.sample(SampleRequest(PROMPT, 50, id="two", seed=1)))
        await arrived(engine, before + 6)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await until(lambda: not server.running)
        assert server.left == 2


async def test_a_drain_waits_up_to_its_deadline_and_new_turns_wait_for_the_resume(weights: Path) -> None:
    server = VllmStandIn(weights / "0", gate=asyncio.Event())
    server.gate.set()
    async with started(server) as engine:
        server.gate.clear()
        turn = asyncio.create_task(engine.sample(SampleRequest(PROMPT, 10, id="one")))
        await arrived(engine, 3)
        pausing = asyncio.create_task(engine.pause(PauseMode.DRAIN))
        await until(lambda: engine.pauses.paused)
        late = await held_back(engine, SampleRequest(PROMPT, 2))
        assert not pausing.done()
        server.gate.set()
        await pausing
        assert (await turn).finish is Finish.LENGTH
        assert server.paused
        assert not late.done()
        await engine.resume(4)
        assert not server.paused
        assert server.label == "4"
        assert (await late).versions.tolist() == [4, 4]
        server.gate.clear()
        turn = asyncio.create_task(engine.sample(SampleRequest(PROMPT, 10)))
        await arrived(engine, 10 + 2 + 3)
        await engine.pause(PauseMode.DRAIN, deadline=0.01)
        assert (await turn).finish is Finish.ABORT


async def test_an_update_cuts_turns_and_each_token_has_its_version(weights: Path) -> None:
    server = VllmStandIn(weights / "0", gate=asyncio.Event())
    server.gate.set()
    async with started(server) as engine:
        server.gate.clear()
        server.calls.clear()
        turn = asyncio.create_task(engine.sample(SampleRequest(PROMPT, 10, id="one")))
        await arrived(engine, 3)
        updating = asyncio.create_task(engine.update_weights(weights / "1", 1))
        first = await turn
        server.gate.set()
        await updating
        assert (first.finish, first.versions.tolist()) == (Finish.ABORT, [0, 0, 0])
        await engine.ready()
        prompt = np.concatenate([PROMPT, first.ids])
        rest = await engine.sample(SampleRequest(prompt, 7, id="one"))
        assert rest.versions.tolist() == [1] * 7
        assert rest.cached_tokens == 0
        assert np.abs(forward(weights / "1", prompt, rest.ids) - rest.logprobs).max() < 1e-4
        assert engine.version == 1
        assert engine.info.details["weights_proven_by"] == "forward"
    steered = ["pause", "collective_rpc", "reset_prefix_cache", "update_weight_version", "resume"]
    assert server.calls == steered


async def test_a_paused_engine_stays_paused_over_an_update(weights: Path) -> None:
    server = VllmStandIn(weights / "0")
    async with started(server) as engine:
        await engine.pause(PauseMode.ABORT)
        await engine.update_weights(weights / "1", 3)
        assert server.paused
        late = await held_back(engine, SampleRequest(PROMPT, 2))
        await engine.resume()
        assert (await late).versions.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("model", "stale", "reason"),
    [
        ("", "all", "stale weights: .*as they were before it; restart the server from this folder"),
        ("", "head", "stale weights: .*not as before it either"),
        ("tied-", "all", "stale weights: .*as they were before it"),
        ("tied-", "head", r"stale head of tied embeddings: .*tie_word_embeddings.*lm_head\.weight of its own"),
    ],
)
async def test_an_update_that_leaves_old_weights_is_caught_by_name(
    weights: Path, model: str, stale: str, reason: str
) -> None:
    server = VllmStandIn(weights / f"{model}0", stale=stale)
    async with started(server) as engine:
        with pytest.raises(EngineError, match=reason):
            await engine.update_weights(weights / f"{model}1", 1)
        # Nobody knows what it would sample from: it stays paused until weights arrive.
        assert server.paused
        assert (engine.version, server.label) == (0, "unproven")
        waiting = await held_back(engine, SampleRequest(PROMPT, 2))
        server.stale = ""
        await engine.update_weights(weights / f"{model}1", 2)
        assert (await waiting).versions.tolist() == [2, 2]


async def test_a_stale_head_is_distinguished_once_the_last_folder_is_known(weights: Path) -> None:
    server = VllmStandIn(weights / "tied-0")
    async with started(server) as engine:
        await engine.update_weights(weights / "tied-1", 1)
        server.stale = "head"
        with pytest.raises(EngineError, match="stale head of tied embeddings"):
            await engine.update_weights(weights / "tied-0", 2)
        server.head.zero_()
        with pytest.raises(EngineError, match=r"stale weights: .*not as before it either"):
            await engine.update_weights(weights / "tied-0", 3)


@pytest.mark.parametrize(
    ("model", "device", "stale", "reason"),
    [
        ("", "cpu", "", None),
        ("tied-", "cuda", "", None),
        ("", "cpu", "all", "samples as before the update"),
        ("tied-", "cpu", "", "runs on a CPU and the embeddings .* are tied"),
    ],
)
async def test_without_torch_an_answer_must_have_changed_and_a_tied_head_on_a_cpu_is_refused(
    weights: Path, monkeypatch: pytest.MonkeyPatch, model: str, device: str, stale: str, reason: str | None
) -> None:
    monkeypatch.setattr(server_checks.util, "find_spec", lambda name: None)
    async with started(VllmStandIn(weights / f"{model}0", device=device, stale=stale)) as engine:
        if reason is None:
            await engine.update_weights(weights / f"{model}1", 1)
            assert engine.info.details["weights_proven_by"] == "changed"
            return
        with pytest.raises(EngineError, match=reason):
            await engine.update_weights(weights / f"{model}1", 1)


async def test_an_update_that_cannot_be_is_refused_with_what_to_do(weights: Path, tmp_path: Path) -> None:
    async with started(VllmStandIn(weights / "0", dev_mode=False)) as engine:
        assert engine.info.details["weight_updates"] == "no (VLLM_SERVER_DEV_MODE=1)"
        with pytest.raises(EngineError, match="start it with VLLM_SERVER_DEV_MODE=1"):
            await engine.update_weights(weights / "1", 1)
        await engine.resume(1)
        assert (await engine.sample(SampleRequest(PROMPT, 2))).versions.tolist() == [1, 1]
    async with started(VllmStandIn(weights / "0")) as engine:
        with pytest.raises(EngineError, match="holds no safetensors file"):
            await engine.update_weights(tmp_path, 1)
        assert (await engine.sample(SampleRequest(PROMPT, 2))).versions.tolist() == [0, 0]
    async with started(VllmStandIn(weights / "0", deaf=True)) as engine:
        with pytest.raises(EngineError, match="does not clear its prefix cache"):
            await engine.update_weights(weights / "1", 1)


async def test_a_server_that_has_a_version_keeps_it(weights: Path) -> None:
    async with started(VllmStandIn(weights / "0", label="17")) as engine:
        assert engine.version == 17
        assert (await engine.sample(SampleRequest(PROMPT, 2))).versions.tolist() == [17, 17]


async def test_a_server_that_was_started_again_is_gone_and_nothing_of_its_turn_is_kept(weights: Path) -> None:
    server = VllmStandIn(weights / "0")
    async with started(server) as engine:
        await engine.update_weights(weights / "1", 1)
        server.label = "default"
        with pytest.raises(
            EngineUnreachable, match="has the weights 'default' in place of '1': it was restarted"
        ) as gone:
            await engine.sample(SampleRequest(PROMPT, 4))
        assert gone.value.partial is None
        await engine.start()
        assert (await engine.sample(SampleRequest(PROMPT, 2))).versions.tolist() == [0, 0]


def test_of_several_ranks_the_fullest_cache_counts() -> None:
    told = [f'vllm:num_requests_running{{engine="{rank}"}} {3 - rank}.0' for rank in (0, 1)]
    told += [f'vllm:num_requests_waiting{{engine="{rank}"}} {rank}.0' for rank in (0, 1)]
    told += [f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {usage}' for rank, usage in ((0, 0.5), (1, 0.625))]
    assert wire.parse_load("\n".join(told)) == EngineLoad(5, 1, 0.625)


@pytest.mark.parametrize("scale_out", [True, False])
async def test_a_server_that_dies_in_a_turn_is_gone_and_what_arrived_is_kept(weights: Path, scale_out: bool) -> None:
    server = VllmStandIn(weights / "0", scale_out=scale_out)
    async with started(server) as engine:
        assert await engine.healthy()
        server.cut_after = 4
        with pytest.raises(EngineUnreachable) as gone:
            await engine.sample(SampleRequest(PROMPT, 10, seed=1))
        partial = gone.value.partial
        assert partial is not None
        assert (partial.finish, len(partial.ids)) == (Finish.ABORT, 4)
        assert np.abs(forward(weights / "0", PROMPT, partial.ids) - partial.logprobs).max() < 1e-4
        assert not await engine.healthy()
        with pytest.raises(EngineUnreachable) as refused:
            await engine.sample(SampleRequest(PROMPT, 10))
        assert refused.value.partial is None


async def test_a_failing_turn_is_an_error_and_a_failing_server_is_gone(weights: Path) -> None:
    server = VllmStandIn(weights / "0")
    async with started(server) as engine:
        engine._info = replace(engine.info, vocabulary=0)
        with pytest.raises(EngineError, match=r"answered 400: .*out of vocabulary") as refused:
            await engine.sample(SampleRequest(np.array([VOCABULARY], np.int32), 10))
        assert not isinstance(refused.value, EngineUnreachable)
        server.broken = True
        with pytest.raises(EngineUnreachable, match="answered 500"):
            await engine.sample(SampleRequest(PROMPT, 10))


async def test_an_image_is_its_placeholder_and_the_expanded_prompt_must_be_the_one_that_was_meant(
    weights: Path,
) -> None:
    image = replace(wire.PROBE_IMAGE, digest="d")
    async with started(VllmStandIn(weights / "0", sees=True)) as engine:
        assert isinstance(engine, AcceptsImages)
        (place, nothing) = await engine.render_media([image, Media("audio", "a", "data:audio/wav;base64,AAAA")])
        assert nothing is None
        assert place is not None
        assert place.ids is not None
        assert (place.ids.tolist(), place.before.tolist(), place.after.tolist()) == ([PAD] * WIDTH, [1], [2])
        with pytest.raises(BadRequest, match="cannot identify image file"):
            await engine.render_media([Media("image", "b", "data:image/png;base64,AAAA")])
        prompt = np.array([1, 7, *[PAD] * WIDTH, 8, 9], np.int32)
        placed = PlacedImage(image, 2, WIDTH, place.key, (PAD,))
        sample = await engine.sample(SampleRequest(prompt, 5, media=(placed,)))
        assert (sample.prompt_tokens, len(sample.ids)) == (len(prompt), 5)
        assert np.abs(forward(weights / "0", prompt, sample.ids) - sample.logprobs).max() < 1e-4
        wider = np.array([1, 7, *[PAD] * (WIDTH + 1), 8, 9], np.int32)
        with pytest.raises(EngineError, match="not the 9 that were intended"):
            await engine.sample(SampleRequest(wider, 5, media=(replace(placed, length=WIDTH + 1),)))
    blind = VllmStandIn(weights / "0")
    async with started(blind) as engine:
        assert await engine.render_media([image]) == [None]


async def test_unreachable_unstarted_and_closed_engines_say_so() -> None:
    engine = VllmEngine("http://127.0.0.1:9/v1/")
    assert engine.url == "http://127.0.0.1:9"
    with pytest.raises(EngineError, match="not started"):
        await engine.sample(SampleRequest(PROMPT, 1))
    with pytest.raises(EngineUnreachable):
        await engine.start()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.start()
