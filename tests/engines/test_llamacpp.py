"""llama.cpp: what it samples is what it says it sampled, from the distribution it says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from support.engines import gguf_rig
from towline.conversation import Finish
from towline.engines.base import CaptureLevel, EngineLoad, PauseMode, ReportsHealth, ReportsLoad, Sample, SampleRequest
from towline.engines.embedded.model import Decoder
from towline.engines.llamacpp import GgufFile, LlamaCppEngine, model_folder
from towline.engines.llamacpp.server import ServerSlots
from towline.engines.stalls import StallDetector
from towline.errors import ConfigError, EngineError
from towline.tokens.loading import load_codec

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = gguf_rig.ids(gguf_rig.IM_START, range(70, 90), gguf_rig.IM_END, 5, gguf_rig.IM_START, range(30, 40))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError("the condition never came true")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return gguf_rig.small(len(gguf_rig.BYTES["tokens"]))


@pytest.fixture(scope="module")
def file(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_rig.write(tmp_path_factory.mktemp("gguf") / "small.gguf", decoder, gguf_rig.BYTES)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(file: Path) -> AsyncIterator[LlamaCppEngine]:
    codec = load_codec(model_folder(GgufFile.read(file)))
    made = LlamaCppEngine(file, decode=codec.tokenizer.decode, slots=2, seed=1)
    await made.start()
    yield made
    await made.close()


def asking(tokens: int = 24, prompt: Any = PROMPT, **fields: Any) -> SampleRequest:
    return SampleRequest(prompt=np.asarray(prompt, np.int32), max_tokens=tokens, **fields)


def inside_characters(sample: Sample) -> int:
    """How many sampled tokens begin a character that they do not end."""
    tokens = gguf_rig.BYTES["tokens"]
    starts = {char for char in tokens[3:259] if char in "ÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖ×ØÙÚÛÜÝÞßàáâãäåæçèéêëìíîïðñòóôõö÷"}
    return sum(tokens[id] in starts for id in sample.ids)


async def test_an_engine_says_what_it_is(engine: LlamaCppEngine, file: Path) -> None:
    info = engine.info
    assert (info.name, info.capture, info.context) == ("llamacpp", CaptureLevel.TOKENS, 512)
    assert info.vocabulary == len(gguf_rig.BYTES["tokens"])
    assert info.details["prefix_caching"] == "on"
    assert info.details["route"] == "/completion"
    assert isinstance(engine, ReportsLoad)
    assert isinstance(engine, ReportsHealth)
    assert await engine.healthy()


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.3},
        {"temperature": 0.8, "top_k": 40},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.9, "top_k": 60, "top_p": 0.8},
        {"temperature": 0.0},
    ],
    ids=str,
)
async def test_logprobs_are_those_of_a_forward_pass(
    how: dict[str, Any], engine: LlamaCppEngine, decoder: Decoder
) -> None:
    request = asking(120, seed=3, **how)
    sample = await engine.sample(request)
    assert len(sample.ids) == len(sample.logprobs) == len(sample.versions) == 120
    assert gguf_rig.differences(decoder, request, sample).max() < 1e-3
    assert ("truncated_sampling" in sample.flags) == ("top_k" in how or "top_p" in how)
    if how == {"temperature": 1.0}:
        assert inside_characters(sample) > 10, "tokens whose text ends inside a character are among them"
        assert gguf_rig.differences(decoder, request, sample, temperature=0.7).mean() > 0.1


async def test_samples_are_of_the_distribution(engine: LlamaCppEngine, decoder: Decoder) -> None:
    """Also over tokens whose text ends inside a character: they are neither avoided nor preferred."""
    import torch

    with torch.no_grad():
        expected = decoder(torch.from_numpy(PROMPT.astype(np.int64))[None])[0, -1].softmax(-1).numpy()
    count = 300
    samples = await asyncio.gather(*(engine.sample(asking(1, seed=seed)) for seed in range(count)))
    drawn = np.bincount([int(sample.ids[0]) for sample in samples], minlength=len(expected))
    likely = expected * count >= 5
    assert likely.sum() >= 5
    spread = np.sqrt(count * expected * (1 - expected))
    assert np.all(np.abs(drawn - count * expected)[likely] < 4.5 * spread[likely])


async def test_the_same_seed_gives_the_same_tokens(engine: LlamaCppEngine) -> None:
    first, again, other = [await engine.sample(asking(40, seed=seed)) for seed in (5, 5, 6)]
    assert first.ids.tolist() == again.ids.tolist()
    assert first.ids.tolist() != other.ids.tolist()
    free, freely = [await engine.sample(asking(40)) for _ in range(2)]
    assert free.ids.tolist() != freely.ids.tolist()


async def test_a_prefix_is_computed_once_and_stays_while_others_talk(engine: LlamaCppEngine) -> None:
    one, other = (gguf_rig.ids(gguf_rig.IM_START, range(start, start + 60)) for start in (40, 120))
    first = await engine.sample(asking(10, one, seed=1))
    assert first.prompt_tokens == 61
    beside = await engine.sample(asking(10, other, seed=1))
    continued = gguf_rig.ids(one.tolist(), first.ids.tolist(), 9, 10, 11)
    second = await engine.sample(asking(10, continued, seed=1))
    assert second.prompt_tokens == len(continued)
    # All but the last token that was sampled: nobody has looked past it yet.
    assert second.cached_tokens >= len(one) + len(first.ids) - 1
    third = await engine.sample(asking(10, gguf_rig.ids(other.tolist(), beside.ids.tolist(), 9), seed=1))
    assert third.cached_tokens >= len(other) + len(beside.ids) - 1


async def test_a_turn_ends_at_its_stop_ids_and_stop_strings(engine: LlamaCppEngine) -> None:
    free = await engine.sample(asking(60, seed=9))
    assert free.finish is Finish.LENGTH
    # An ordinary token, which llama.cpp itself would not stop at.
    stop = next(int(id) for at, id in enumerate(free.ids) if at > 20 and id not in free.ids[:at])
    stopped = await engine.sample(asking(60, seed=9, stop_ids=frozenset({stop})))
    place = free.ids.tolist().index(stop)
    assert stopped.finish is Finish.STOP
    assert stopped.ids.tolist() == free.ids.tolist()[: place + 1]
    # An end that llama.cpp knows, and that is not asked for, is gone on from.
    ends = {0, gguf_rig.IM_END}
    for seed in range(40):
        sample = await engine.sample(asking(100, seed=seed, temperature=2.0))
        if ends & set(sample.ids[:-1].tolist()):
            break
    else:
        pytest.fail("no end was sampled")
    assert (sample.finish, len(sample.ids)) == (Finish.LENGTH, 100)
    asked = await engine.sample(asking(100, seed=seed, temperature=2.0, stop_ids=frozenset(ends)))
    assert asked.finish is Finish.STOP
    assert int(asked.ids[-1]) in ends


async def test_a_stop_string_keeps_the_token_that_completes_it(engine: LlamaCppEngine) -> None:
    assert engine._decode is not None
    free = await engine.sample(asking(60, seed=2))
    words = [engine._decode(free.ids[at : at + 2].tolist()) for at in range(10, 58)]
    string = next(word for word in words if word.isascii() and word.isprintable() and len(word) == 2)
    stopped = await engine.sample(asking(60, seed=2, stop_strings=(string,)))
    assert (stopped.finish, stopped.stop_string) == (Finish.STOP_STRING, string)
    assert stopped.ids.tolist() == free.ids.tolist()[: len(stopped.ids)]
    text = engine._decode(stopped.ids.tolist())
    assert string in text
    assert string not in engine._decode(stopped.ids[:-1].tolist())


async def test_what_does_not_fit_ends_or_is_refused(engine: LlamaCppEngine) -> None:
    long = np.resize(PROMPT, 505)
    sample = await engine.sample(asking(100, long))
    assert (sample.finish, len(sample.ids)) == (Finish.LENGTH, 7)
    full = await engine.sample(asking(100, np.resize(PROMPT, 512)))
    assert (full.finish, len(full.ids)) == (Finish.LENGTH, 0)
    refused = {
        "the context 512": asking(1, np.resize(PROMPT, 513)),
        "the prompt is empty": asking(1, []),
        "vocabulary": asking(1, [9999]),
        "cannot score forced ids": asking(1, forced=gguf_rig.ids(5)),
    }
    for words, request in refused.items():
        with pytest.raises(EngineError, match=words):
            await engine.sample(request)


async def test_more_turns_than_slots_wait_and_all_are_right(engine: LlamaCppEngine, decoder: Decoder) -> None:
    requests = [asking(20, gguf_rig.ids(gguf_rig.IM_START, range(10 + n, 40 + n)), seed=n) for n in range(7)]
    flying = [asyncio.create_task(engine.sample(request)) for request in requests]
    await until(lambda: engine._slots.running + engine._slots.waiting == 7)
    assert await engine.load() == EngineLoad(2, 5)
    for request, sample in zip(requests, await asyncio.gather(*flying), strict=True):
        assert gguf_rig.differences(decoder, request, sample).max() < 1e-3
    assert (await engine.load()).running == 0


async def test_pause_abort_and_cancel(engine: LlamaCppEngine, decoder: Decoder) -> None:
    async def begun(request: SampleRequest) -> asyncio.Task[Sample]:
        task = asyncio.create_task(engine.sample(request))
        while not any(turn.request is request and turn.ids for turn in engine._active):
            assert not task.done()
            await asyncio.sleep(0.001)
        return task

    request = asking(450, seed=4, id="one")
    task = await begun(request)
    await engine.abort(["another"])
    await engine.abort(["one"])
    sample = await task
    assert sample.finish is Finish.ABORT
    assert 0 < len(sample.ids) < 450
    assert gguf_rig.differences(decoder, request, sample).max() < 1e-3

    task = await begun(request)
    await engine.pause(PauseMode.ABORT)
    assert (await task).finish is Finish.ABORT
    late = asking(5)
    detector = late.stall_detector = StallDetector(60.0)
    waiting = asyncio.create_task(engine.sample(late))
    await until(lambda: detector.is_suspended)
    assert not waiting.done()
    await engine.resume(3)
    await engine.ready()
    assert (await waiting).versions.tolist() == [3] * 5

    task = await begun(asking(60, seed=4))
    await engine.pause(PauseMode.DRAIN)
    assert (await task).finish is Finish.LENGTH
    await engine.resume(0)

    task = await begun(request)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await engine.sample(asking(5))).finish is Finish.LENGTH
    assert (await engine.load()).running == 0


async def test_weights_are_replaced_by_another_file_of_the_model(file: Path, decoder: Decoder, tmp_path: Path) -> None:
    other = gguf_rig.small(len(gguf_rig.BYTES["tokens"]), seed=7)
    folders = {name: tmp_path / name for name in ("other", "strange", "two")}
    for folder in folders.values():
        folder.mkdir()
    gguf_rig.write(folders["other"] / "model.gguf", other, gguf_rig.BYTES)
    named = {**gguf_rig.BYTES, "tokens": [*gguf_rig.BYTES["tokens"][:-1], "Ġthis"]}
    gguf_rig.write(folders["strange"] / "model.gguf", other, named)
    (folders["two"] / "a.gguf").touch()
    (folders["two"] / "b.gguf").touch()
    engine = LlamaCppEngine(file, slots=1, context=256)
    await engine.start()
    try:
        request = asking(40, seed=1)
        before = await engine.sample(request)
        await engine.update_weights(folders["other"], 5)
        after = await engine.sample(request)
        assert after.versions.tolist() == [5] * 40
        assert after.cached_tokens == 0, "no cache crosses an update"
        assert gguf_rig.differences(decoder, request, before).max() < 1e-3
        assert gguf_rig.differences(other, request, after).max() < 1e-3
        assert gguf_rig.differences(decoder, request, after).max() > 0.1
        with pytest.raises(EngineError, match="another model"):
            await engine.update_weights(folders["strange"], 6)
        with pytest.raises(ConfigError, match="2 GGUF files"):
            await engine.update_weights(folders["two"], 6)
        assert (await engine.sample(asking(3))).versions.tolist() == [5] * 3, "it goes on with the weights it has"
    finally:
        await engine.close()


async def test_the_server_refuses_requests_without_its_key(engine: LlamaCppEngine) -> None:
    import aiohttp

    assert engine.url.startswith("http://127.0.0.1:")
    async with aiohttp.ClientSession() as http, http.post(f"{engine.url}/completion", json={"prompt": [1]}) as answer:
        assert answer.status == 401


async def test_unreadable_files_are_refused_with_the_reason(tmp_path: Path, decoder: Decoder) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        LlamaCppEngine(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        LlamaCppEngine(tmp_path / "text.gguf")
    whole = gguf_rig.write(tmp_path / "whole.gguf", decoder, gguf_rig.BYTES)
    (tmp_path / "half.gguf").write_bytes(whole.read_bytes()[:20000])
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        LlamaCppEngine(tmp_path / "half.gguf")


async def test_a_server_that_does_not_end_is_left_behind(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()

    class Stuck:
        def __del__(self) -> None:
            never.wait(60)

    monkeypatch.setattr("towline.engines.llamacpp.server._END_TIMEOUT", 0.1)
    engine = LlamaCppEngine(file)
    engine._server = Stuck()
    await engine.close()
    never.set()
    assert "did not stop within 0.1 s" in caplog.text


async def test_a_turn_gets_the_slot_that_shares_its_prefix_else_the_least_recently_used() -> None:
    slots = ServerSlots(2)
    one, other = gguf_rig.ids(1, 2, 3), gguf_rig.ids(7, 8)
    async with slots.acquire(one) as first, slots.acquire(other) as second:
        slots.set_cached(first, one)
        slots.set_cached(second, other)
        third = asyncio.create_task(slots.acquire(one).__aenter__())
        await asyncio.sleep(0)
        assert (slots.running, slots.waiting) == (2, 1)
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third
        assert slots.waiting == 0
    async with slots.acquire(gguf_rig.ids(7, 8, 9)) as again:
        assert again == second
    async with slots.acquire(gguf_rig.ids(5)) as fresh:
        assert fresh == first, "left longest ago"
    slots.clear()
    async with slots.acquire(one) as any_slot:
        assert any_slot == second
    assert slots.running == 0
