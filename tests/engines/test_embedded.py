"""The embedded engine at its interface: what it reports is what a plain forward pass of the same weights gives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from towline.conversation import Finish
from towline.engines.base import CaptureLevel, Engine, PauseMode, Sample, SampleRequest
from towline.engines.embedded import Decoder, DecoderConfig, EmbeddedEngine, create_decoder, save_decoder
from towline.engines.embedded.loop import StepLoop
from towline.errors import ConfigError, EngineError

torch.set_num_threads(1)

VOCABULARY = 256
CONFIG = DecoderConfig(
    model_type="qwen3",
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    initializer_range=0.2,
)


def decoder(seed: int = 0) -> Decoder:
    return create_decoder(CONFIG, seed)


def text(ids: Sequence[int]) -> str:
    return bytes(list(ids)).decode("utf-8", errors="replace")


def prompt(*parts: tuple[int, int]) -> np.ndarray:
    """Random ids: for each (seed, length) a run, so that equal parts are equal prefixes."""
    runs = [np.random.default_rng(seed).integers(0, VOCABULARY, length) for seed, length in parts]
    return np.concatenate(runs).astype(np.int32)


def recomputed(model: Decoder, ids: np.ndarray, sampled: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Logprobs of `sampled` after `ids`, from one full forward pass."""
    row = torch.from_numpy(np.concatenate((ids, sampled))).long()
    with torch.no_grad():
        logits = model(row[None])[0, len(ids) - 1 : -1] / (temperature or 1.0)
    return logits.log_softmax(-1).gather(1, row[len(ids) :, None])[:, 0].numpy()


def proven(model: Decoder, ids: np.ndarray, sample: Sample, temperature: float = 1.0) -> None:
    assert sample.prompt_tokens == len(ids)
    assert len(sample.ids) == len(sample.logprobs) == len(sample.versions)
    assert (sample.ids.dtype, sample.logprobs.dtype, sample.versions.dtype) == (np.int32, np.float32, np.int32)
    np.testing.assert_allclose(sample.logprobs, recomputed(model, ids, sample.ids, temperature), atol=1e-4)


@asynccontextmanager
async def engine(model: Decoder | Path, **options: Any) -> AsyncIterator[EmbeddedEngine]:
    made = EmbeddedEngine(model, **({"threads": 1, "max_cached_tokens": 20000} | options))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def step(served: EmbeddedEngine) -> None:
    """Return after the engine's loop had the opportunity for a step: it steps between two messages."""
    await served.abort([])
    await served.abort([])


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError("the condition never came true")


@pytest.fixture(autouse=True)
def _memory_full_of_rubbish() -> Iterator[None]:
    """Memory that nobody wrote reads as NaN, as it may in a process that has run for a while."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("call", [1024, 0], ids=["padded", "clustered"])
async def test_every_recorded_logprob_is_that_of_a_full_forward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """48 conversations of three turns, 16 at once: sampled, greedy and forced, long and short, with shared prefixes."""
    monkeypatch.setattr("towline.engines.embedded.batch.CALL_COST", call)
    model = decoder()
    save_decoder(model, tmp_path)

    async def converse(served: EmbeddedEngine, index: int) -> None:
        ids = prompt((index % 3, 40 + 60 * (index % 2)), (index, 1 + index % 9))
        temperature = (1.0, 0.0, 0.6, 1.0, 1.5)[index % 5]
        for round_ in range(3):
            forced = prompt((900 + index + round_, 4 + 9 * (index % 4))) if index % 5 == 3 else None
            request = SampleRequest(ids, 5 + index % 20, temperature, seed=index, forced=forced)
            sample = await served.sample(request)
            proven(model, ids, sample, temperature)
            assert sample.finish is Finish.LENGTH
            if forced is not None:
                assert sample.ids.tolist() == forced[: request.max_tokens].tolist()
            else:
                assert len(sample.ids) == request.max_tokens
            if temperature == 0.0:
                with torch.no_grad():
                    logits = model(torch.from_numpy(np.concatenate((ids, sample.ids))).long()[None])[
                        0, len(ids) - 1 : -1
                    ]
                best = logits.amax(-1)
                chosen = logits.gather(1, torch.from_numpy(sample.ids).long()[:, None])[:, 0]
                torch.testing.assert_close(chosen, best, atol=1e-4, rtol=0)
            ids = np.concatenate((ids, sample.ids, prompt((index + 500 + round_, 3 + index % 30))))

    async with engine(tmp_path, prefill_chunk=23) as served:
        assert isinstance(served, Engine)
        assert served.info.capture is CaptureLevel.TOKENS
        assert (served.info.context, served.info.vocabulary, served.version) == (4096, VOCABULARY, 0)
        await asyncio.gather(*(converse(served, index) for index in range(48)))
        assert served.stats.cached_tokens > 5000
        assert served.stats.used_slots == served.stats.running_turns == served.stats.waiting_turns == 0


async def test_a_continued_turn_computes_its_suffix_only() -> None:
    model = decoder()
    async with engine(model) as served:
        ids = prompt((1, 100))
        first = await served.sample(SampleRequest(ids, 20))
        assert (first.cached_tokens, served.stats.prefilled_tokens) == (0, 100)
        # The last id sampled was never fed to the model, so it belongs to what is computed next.
        longer = np.concatenate((ids, first.ids, prompt((2, 30))))
        second = await served.sample(SampleRequest(longer, 10))
        assert second.cached_tokens == 119
        assert served.stats.prefilled_tokens == 100 + 31
        proven(model, longer, second)
        # The same prompt again: all but its last token, whose logits are needed.
        again = await served.sample(SampleRequest(longer, 1))
        assert again.cached_tokens == len(longer) - 1
        # A branch in the middle of what was sampled.
        branch = np.concatenate((ids, first.ids[:7], prompt((3, 5))))
        sample = await served.sample(SampleRequest(branch, 6))
        assert sample.cached_tokens >= 107
        proven(model, branch, sample)
        # Forced ids are cached as sampled ones are.
        forced = await served.sample(SampleRequest(branch, 50, forced=prompt((8, 12))))
        after = await served.sample(SampleRequest(np.concatenate((branch, forced.ids)), 1))
        assert after.cached_tokens == len(branch) + 11


async def test_a_group_computes_its_common_prompt_once() -> None:
    model = decoder()
    async with engine(model, prefill_chunk=16) as served:
        system = (1, 90)
        prompts = [prompt(system, (10 + index, 5 + index)) for index in range(16)]
        for index, ids in enumerate(prompts):
            ids[90] = index  # nothing beyond the system prompt is shared
        samples = await asyncio.gather(*(served.sample(SampleRequest(ids, 8)) for ids in prompts))
        for ids, sample in zip(prompts, samples, strict=True):
            proven(model, ids, sample)
        assert served.stats.prefilled_tokens == 90 + sum(len(ids) - 90 for ids in prompts)
        assert sum(sample.cached_tokens for sample in samples) == served.stats.cached_tokens == 15 * 90
        before = served.stats.prefilled_tokens
        same = prompt((77, 50))
        samples = await asyncio.gather(*(served.sample(SampleRequest(same, 8, seed=index)) for index in range(16)))
        assert served.stats.prefilled_tokens - before == 50 + 15
        assert len({tuple(sample.ids) for sample in samples}) == 16


async def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    async with engine(decoder(), prefill_chunk=8) as served:
        ended: list[str] = []

        async def run(name: str, ids: np.ndarray, count: int) -> None:
            await served.sample(SampleRequest(ids, count))
            ended.append(name)

        running = asyncio.create_task(run("running", prompt((1, 4)), 60))
        await until(lambda: served.stats.decoded_tokens > 0)
        long = asyncio.create_task(run("long", prompt((2, 2000)), 1))
        await until(lambda: served.stats.prefilled_tokens > 4)
        short = asyncio.create_task(run("short", prompt((3, 12)), 3))
        await asyncio.gather(running, long, short)
        assert ended.index("short") < ended.index("long")
        assert ended.index("running") < ended.index("long")


async def test_weights_are_swapped_in_flight_and_every_token_says_which_it_came_from(tmp_path: Path) -> None:
    models = [decoder(seed) for seed in range(3)]
    for version, model in enumerate(models):
        save_decoder(model, tmp_path / str(version))
    async with engine(tmp_path / "0") as served:

        async def turn(index: int) -> tuple[np.ndarray, list[Sample]]:
            """One turn of 1500 tokens that goes on after each interruption."""
            ids, samples = prompt((1, 30), (index, 5)), []
            left = 1500
            forced = prompt((50 + index, 1500)) if index % 4 == 3 else None
            while left:
                await served.ready()
                given = None if forced is None else forced[1500 - left :]
                context = np.concatenate([ids, *(sample.ids for sample in samples)])
                samples.append(await served.sample(SampleRequest(context, left, forced=given)))
                left -= len(samples[-1].ids)
            return ids, samples

        turns = [asyncio.create_task(turn(index)) for index in range(8)]
        await until(lambda: served.stats.decoded_tokens > 800)
        await served.update_weights(tmp_path / "1", 1)
        assert served.version == 1
        seen = served.stats.decoded_tokens
        await until(lambda: served.stats.decoded_tokens > seen + 800)
        models[2].requires_grad_(True)
        await served.update_weights(models[2], 2)
        with torch.no_grad():
            trained = decoder(2)
            models[2].head.mul_(3.0)  # what happens to the decoder afterwards does not reach the engine
        models[2] = trained

        crossed = 0
        for ids, samples in await asyncio.gather(*turns):
            whole = np.concatenate([sample.ids for sample in samples])
            versions = np.concatenate([sample.versions for sample in samples])
            logprobs = np.concatenate([sample.logprobs for sample in samples])
            assert (np.diff(versions) >= 0).all()
            crossed += len(set(versions.tolist())) > 1
            assert [sample.finish for sample in samples[:-1]] == [Finish.ABORT] * (len(samples) - 1)
            assert samples[-1].finish is Finish.LENGTH
            for version in set(versions.tolist()):
                mine = versions == version
                expected = recomputed(models[version], ids, whole)
                np.testing.assert_allclose(logprobs[mine], expected[mine], atol=1e-4)
        assert crossed >= 4
        fresh = prompt((1, 30), (60, 5))
        for cached in (30, 34):  # the new weights have a cache of their own
            sample = await served.sample(SampleRequest(fresh, 5))
            proven(models[2], fresh, sample)
            assert sample.cached_tokens == cached

        other = create_decoder(DecoderConfig.from_json(CONFIG.to_json() | {"num_hidden_layers": 1}), 0)
        with pytest.raises(EngineError, match="another model"):
            await served.update_weights(other, 3)
        with pytest.raises(EngineError, match="cannot read"):
            await served.update_weights(tmp_path / "nowhere", 3)
        assert served.version == 2
        proven(models[2], fresh, await served.sample(SampleRequest(fresh, 5)))


async def test_pause_drains_or_aborts_and_resume_continues() -> None:
    model = decoder()
    async with engine(model, max_batch=4) as served:

        def begin(count: int, length: int) -> list[asyncio.Task[Sample]]:
            return [asyncio.create_task(served.sample(SampleRequest(prompt((n, 9)), length))) for n in range(count)]

        running = begin(4, 80)
        await until(lambda: served.stats.decoded_tokens > 8)
        queued = begin(3, 5)
        await until(lambda: served.stats.waiting_turns == 3)
        await served.pause(PauseMode.DRAIN)
        assert [(await task).finish for task in running] == [Finish.LENGTH] * 4
        waiting = asyncio.create_task(served.ready())
        steps = served.stats.steps
        await step(served)
        assert served.stats.steps == steps
        assert not any(task.done() for task in [*queued, waiting])
        await served.resume()
        await waiting
        assert [len((await task).ids) for task in queued] == [5] * 3

        running = begin(4, 3000)
        await until(lambda: served.stats.running_turns == 4 and served.stats.steps > steps + 30)
        await served.pause(PauseMode.ABORT)
        samples = [await task for task in running]
        assert {sample.finish for sample in samples} == {Finish.ABORT}
        for n, sample in enumerate(samples):
            assert 0 < len(sample.ids) < 3000
            proven(model, prompt((n, 9)), sample)
        await served.resume(version=7)
        assert served.version == 7
        whole = np.concatenate((prompt((0, 9)), samples[0].ids))
        more = await served.sample(SampleRequest(whole, 4))
        assert (more.versions.tolist(), more.cached_tokens) == ([7] * 4, 0)

        running = begin(4, 3000)
        await until(lambda: served.stats.running_turns == 4)
        await served.pause(PauseMode.DRAIN, deadline=0.01)
        assert {(await task).finish for task in running} == {Finish.ABORT}
        # An update leaves a paused engine paused, and a running one running.
        await served.update_weights(model, 8)
        waiting = asyncio.create_task(served.sample(SampleRequest(whole, 2)))
        await until(lambda: served.stats.waiting_turns == 1)
        await step(served)
        assert not waiting.done()
        await served.resume()
        assert (await waiting).versions.tolist() == [8, 8]
        await served.update_weights(model, 9)
        await served.ready()
        assert (await served.sample(SampleRequest(whole, 1))).versions.tolist() == [9]


async def test_cancel_and_abort_end_turns_and_free_their_slots() -> None:
    model = decoder()
    async with engine(model, max_batch=3) as served:
        ids = prompt((1, 20))
        tasks = [asyncio.create_task(served.sample(SampleRequest(ids, 3000, id=f"turn{n}"))) for n in range(5)]
        await until(lambda: served.stats.running_turns == 3 and served.stats.decoded_tokens > 10)
        assert served.stats.used_slots > 20
        tasks[0].cancel()
        tasks[4].cancel()
        await until(lambda: served.stats.waiting_turns == 0)
        await served.abort(["turn1", "turn2", "unknown"])
        assert [(await task).finish for task in tasks[1:3]] == [Finish.ABORT] * 2
        proven(model, ids, await tasks[1])
        assert tasks[0].cancelled()
        assert tasks[4].cancelled()
        await served.pause(PauseMode.ABORT)
        assert (await tasks[3]).finish is Finish.ABORT
        assert served.stats.used_slots == served.stats.running_turns == 0
        waiting = asyncio.create_task(served.sample(SampleRequest(ids, 5, id="queued")))
        await until(lambda: served.stats.waiting_turns == 1)
        await served.abort(["queued"])
        sample = await waiting
        assert (sample.finish, len(sample.ids), sample.prompt_tokens) == (Finish.ABORT, 0, 20)


async def test_memory_that_was_never_written_is_never_read() -> None:
    """Turns that ended in the middle of their prompt leave slots behind which hold anything, here NaN."""
    model = decoder()
    async with engine(model, max_batch=2, prefill_chunk=8) as served:
        assert served._loop is not None
        served._loop._runner._pool[:, 1:] = float("nan")
        tasks = [asyncio.create_task(served.sample(SampleRequest(prompt((n, 3000)), 5))) for n in range(2)]
        await until(lambda: served.stats.running_turns == 2)
        for task in tasks:
            task.cancel()
        await until(lambda: served.stats.running_turns == 0)
        assert served.stats.prefilled_tokens < 400
        long, short = prompt((5, 600)), prompt((6, 5))
        requests = [SampleRequest(long, 30), SampleRequest(short, 200)]
        samples = await asyncio.gather(*map(served.sample, requests))
        proven(model, long, samples[0])
        proven(model, short, samples[1])


async def test_seeds_decide_alone_and_in_a_batch() -> None:
    model = decoder()

    def request(seed: int | None, length: int = 40) -> SampleRequest:
        return SampleRequest(prompt((3, 30)), length, temperature=1.1, seed=seed)

    async with engine(model) as served:
        alone = [await served.sample(request(seed)) for seed in range(4)]
        others = [SampleRequest(prompt((n, 7 * n + 1)), 5 * n + 3) for n in range(12)]
        crowd = await asyncio.gather(*map(served.sample, [*others, *map(request, range(4))]))
        for single, batched in zip(alone, crowd[-4:], strict=True):
            assert single.ids.tolist() == batched.ids.tolist()
        assert len({tuple(sample.ids) for sample in alone}) == 4
        free = [await served.sample(request(None)) for _ in range(2)]
        assert free[0].ids.tolist() != free[1].ids.tolist()
        assert (await served.sample(request(-1))).finish is Finish.LENGTH
    runs = []
    for _ in range(2):
        async with engine(model, seed=11) as served:
            runs.append([(await served.sample(request(None))).ids.tolist() for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


async def test_turns_stop_at_stop_ids_stop_strings_and_limits() -> None:
    model = decoder()
    async with engine(model, decode=text, context=300) as served:
        ids = prompt((1, 10))
        greedy = await served.sample(SampleRequest(ids, 60, temperature=0.0))
        stop = int(greedy.ids[5])
        cut = greedy.ids.tolist().index(stop) + 1
        sample = await served.sample(SampleRequest(ids, 60, temperature=0.0, stop_ids=frozenset({stop, 999})))
        assert (sample.finish, sample.ids.tolist()) == (Finish.STOP, greedy.ids[:cut].tolist())
        np.testing.assert_allclose(sample.logprobs, greedy.logprobs[:cut], atol=1e-5)
        last = await served.sample(SampleRequest(ids, cut, temperature=0.0, stop_ids=frozenset({stop})))
        assert last.finish is Finish.STOP

        def forced(said: str, **options: Any) -> SampleRequest:
            return SampleRequest(
                ids, options.pop("limit", 100), forced=np.frombuffer(said.encode(), np.uint8), **options
            )

        async def outcome(request: SampleRequest) -> tuple[str, Finish, str | None]:
            sample = await served.sample(request)
            proven(model, ids, sample)
            return text(sample.ids), sample.finish, sample.stop_string

        assert await outcome(forced("all of it")) == ("all of it", Finish.LENGTH, None)
        assert await outcome(forced("all of it", limit=3)) == ("all", Finish.LENGTH, None)
        assert await outcome(forced("ends.", stop_ids=frozenset(b"."))) == ("ends.", Finish.STOP, None)
        assert await outcome(forced("a.b", stop_ids=frozenset(b"."))) == ("a.", Finish.STOP, None)
        said = forced("né €STOP€ and END", stop_strings=("END", "P€"))
        assert await outcome(said) == ("né €STOP€", Finish.STOP_STRING, "P€")
        assert await outcome(forced("abc", stop_strings=("x",))) == ("abc", Finish.LENGTH, None)
        sampled = text(greedy.ids[:20].tolist())
        found = next((sampled[at : at + 2] for at in range(4, 18) if "\ufffd" not in sampled[at : at + 2]), None)
        assert found is not None
        stopped = await served.sample(SampleRequest(ids, 60, temperature=0.0, stop_strings=(found,)))
        assert (stopped.finish, stopped.stop_string) == (Finish.STOP_STRING, found)
        assert found in text(stopped.ids.tolist())
        assert found not in text(stopped.ids[:-1].tolist())

        clipped = await served.sample(SampleRequest(prompt((2, 290)), 50))
        assert (len(clipped.ids), clipped.finish) == (10, Finish.LENGTH)
        full = await served.sample(SampleRequest(prompt((2, 300)), 50))
        assert (len(full.ids), full.finish, full.prompt_tokens) == (0, Finish.LENGTH, 300)
        nothing = await served.sample(SampleRequest(ids, 5, forced=np.empty(0, dtype=np.int32)))
        assert (len(nothing.ids), nothing.finish) == (0, Finish.LENGTH)


async def test_truncated_sampling_is_flagged_and_scored_as_drawn() -> None:
    model = decoder()
    async with engine(model) as served:
        ids = prompt((4, 25))
        plain = await served.sample(SampleRequest(ids, 10, temperature=0.8, seed=1))
        assert plain.flags == ()
        for top_p, top_k in ((1.0, 5), (0.6, 0), (0.9, 12)):
            request = SampleRequest(ids, 30, temperature=0.8, top_p=top_p, top_k=top_k, seed=1)
            sample = await served.sample(request)
            assert sample.flags == ("truncated_sampling",)
            row = torch.from_numpy(np.concatenate((ids, sample.ids))).long()
            with torch.no_grad():
                logits = model(row[None])[0, len(ids) - 1 : -1] / 0.8
            for at, token in enumerate(sample.ids.tolist()):
                ranked, order = logits[at].softmax(-1).sort(descending=True)
                ranked = ranked[: top_k or None] / ranked[: top_k or None].sum()
                kept = ranked[: int((ranked.cumsum(0) - ranked < top_p).sum())]
                share = kept / kept.sum()
                assert token in order[: len(kept)].tolist()
                drawn = share[order.tolist().index(token)].log().item()
                assert sample.logprobs[at] == pytest.approx(drawn, abs=1e-4)
            scored = await served.sample(SampleRequest(ids, 30, 0.8, top_p, top_k, forced=sample.ids))
            np.testing.assert_allclose(scored.logprobs, sample.logprobs, atol=1e-4)


async def test_invalid_requests_fail_without_affecting_other_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder()
    ids = prompt((1, 10))
    with pytest.raises(ConfigError, match="cannot read"):
        EmbeddedEngine(tmp_path)
    with pytest.raises(ConfigError, match="at least 1"):
        EmbeddedEngine(model, max_batch=0)
    idle = EmbeddedEngine(model)
    with pytest.raises(EngineError, match="not started"):
        await idle.sample(SampleRequest(ids, 1))
    await idle.close()

    def fails(ids: Sequence[int]) -> str:
        raise KeyError("no such id")

    async with engine(model, context=200, max_cached_tokens=100, decode=fails) as served:
        steady = asyncio.create_task(served.sample(SampleRequest(ids, 60, seed=1)))
        bad: list[tuple[str, SampleRequest]] = [
            ("prompt is empty", SampleRequest(ids[:0], 5)),
            ("vocabulary has 256", SampleRequest(np.array([1, 256], dtype=np.int32), 5)),
            ("vocabulary has 256", SampleRequest(np.array([1, -1], dtype=np.int32), 5)),
            ("vocabulary has 256", SampleRequest(np.array([2**32 + 1]), 5)),
            ("vocabulary has 256", SampleRequest(ids, 5, forced=np.array([300], dtype=np.int32))),
            ("integer ids", SampleRequest(np.array([1.5]), 5)),
            ("integer ids", SampleRequest(ids[None], 5)),
            ("prompt has 201 tokens, the context 200", SampleRequest(prompt((1, 201)), 1)),
            ("can never fit the 100", SampleRequest(prompt((1, 100)), 2)),
            ("max_tokens", SampleRequest(ids, -1)),
            ("temperature", SampleRequest(ids, 5, temperature=-1.0)),
            ("temperature", SampleRequest(ids, 5, temperature=float("nan"))),
            ("top_p", SampleRequest(ids, 5, top_p=0.0)),
            ("top_k", SampleRequest(ids, 5, top_k=-2)),
            ("KeyError", SampleRequest(ids, 5, stop_strings=("x",))),
        ]
        for reason, request in bad:
            with pytest.raises(EngineError, match=reason):
                await served.sample(request)
        proven(model, ids, await steady)
        assert len((await served.sample(SampleRequest(prompt((1, 100)), 1))).ids) == 1
        greedy = EmbeddedEngine(model, max_cached_tokens=10**13, threads=1)
        with pytest.raises(EngineError, match="lower max_cached_tokens"):
            await greedy.start()

        broken = decoder(3)
        with torch.no_grad():
            broken.model.norm.weight.fill_(float("nan"))
        await served.update_weights(broken, 1)
        with pytest.raises(EngineError, match="version 1 give logits that are NaN"):
            await served.sample(SampleRequest(ids, 5))
        await served.update_weights(model, 2)

        from towline.engines.embedded.runner import ModelRunner

        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "hidden", lambda *_: torch.zeros(1) @ torch.zeros(2))
            with pytest.raises(EngineError, match="the step failed: RuntimeError"):
                await served.sample(SampleRequest(ids, 5))
        proven(model, ids, await served.sample(SampleRequest(ids, 30)))
        assert served.stats.used_slots == 0

    async with engine(model) as served:
        with pytest.raises(EngineError, match="created with `decode`"):
            await served.sample(SampleRequest(ids, 5, stop_strings=("x",)))


async def test_threads_of_the_engine_are_its_own() -> None:
    used: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        used.append(torch.get_num_threads())
        return ""

    before = torch.get_num_threads()
    async with engine(decoder(), threads=before + 2, decode=decode) as served:
        await served.sample(SampleRequest(prompt((1, 5)), 2, stop_strings=("x",)))
        assert set(used) == {before + 2}
        assert torch.get_num_threads() == before
        later = threading.Thread(target=lambda: used.append(torch.get_num_threads()))
        later.start()
        later.join(60)
        assert used[-1] == before


async def test_close_ends_everything() -> None:
    model = decoder()
    served = EmbeddedEngine(model, max_batch=2, threads=1, max_cached_tokens=9000)
    await served.start()
    await served.start()
    ids = prompt((1, 10))
    tasks = [asyncio.create_task(served.sample(SampleRequest(ids, 3000, seed=n))) for n in range(4)]
    await until(lambda: served.stats.decoded_tokens > 10)
    await served.close()
    samples = [await task for task in tasks]
    assert {sample.finish for sample in samples} == {Finish.ABORT}
    assert sorted(len(sample.ids) > 0 for sample in samples) == [False, False, True, True]
    proven(model, ids, samples[0])
    await served.close()
    for call in (served.sample(SampleRequest(ids, 1)), served.ready(), served.resume(), served.start()):
        with pytest.raises(EngineError, match="closed"):
            await call

    paused = EmbeddedEngine(model, threads=1, max_cached_tokens=9000)
    await paused.start()
    await paused.pause()
    waiting = asyncio.create_task(paused.ready())
    queued = asyncio.create_task(paused.sample(SampleRequest(ids, 3)))
    await until(lambda: paused.stats.waiting_turns == 1)
    await paused.close()
    assert (await queued).finish is Finish.ABORT
    with pytest.raises(EngineError, match="closed"):
        await waiting


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_defect_in_the_thread_answers_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by design")

    async with engine(decoder()) as served:
        turn = asyncio.create_task(served.sample(SampleRequest(prompt((1, 10)), 8000)))
        await until(lambda: served.stats.decoded_tokens > 0)
        monkeypatch.setattr(StepLoop, "abort", fail)
        async with asyncio.timeout(60):
            with pytest.raises(EngineError, match="failed: ZeroDivisionError: by design"):
                await served.abort(["x"])
            assert (await turn).finish is Finish.ABORT
            with pytest.raises(EngineError, match="closed"):
                await served.sample(SampleRequest(prompt((1, 10)), 2))
