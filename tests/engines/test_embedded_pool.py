"""A pool that is too small for what is asked of it: turns wait, give way and evict, and nothing else changes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from towline.conversation import Finish
from towline.engines.base import Sample, SampleRequest
from towline.engines.embedded import DecoderConfig, EmbeddedEngine, EmbeddedStats, create_decoder

torch.set_num_threads(1)

CONFIG = DecoderConfig(
    model_type="qwen2",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.3,
)
MODEL = create_decoder(CONFIG, 0)


def served(
    requests: list[SampleRequest],
    slots: int,
    batch: int,
    chunk: int,
    call: int = 1024,
    ended: list[int] | None = None,
) -> tuple[list[Sample], EmbeddedStats]:
    """All requests at once through an engine of its own; with `call` 0, whatever can attend together does.

    `ended` takes the order in which they end.
    """

    async def run() -> tuple[list[Sample], EmbeddedStats]:
        engine = EmbeddedEngine(
            MODEL, threads=1, max_cached_tokens=slots, max_batch=batch, prefill_chunk=chunk, context=256
        )
        await engine.start()
        async with asyncio.timeout(60):
            tasks = [asyncio.create_task(engine.sample(request)) for request in requests]
            for index, task in enumerate(tasks):
                task.add_done_callback(lambda _, index=index: None if ended is None else ended.append(index))
            samples = await asyncio.gather(*tasks)
        stats = engine.stats
        await engine.close()
        return samples, stats

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("towline.engines.embedded.batch.CALL_COST", call)
        return asyncio.run(run())


def same(left: list[Sample], right: list[Sample]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.finish is other.finish
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@st.composite
def requests(draw: st.DrawFn) -> SampleRequest:
    """Prompts from few parts, so that they share prefixes of many lengths; any fits a pool of 40 alone."""
    parts = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=3))
    ids = np.concatenate([np.random.default_rng(seed).integers(0, 32, length) for seed, length in parts])
    forced = draw(st.none() | st.lists(st.integers(0, 31), min_size=1, max_size=12))
    return SampleRequest(
        prompt=ids.astype(np.int32),
        max_tokens=draw(st.integers(1, 14)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 9)),
        stop_ids=draw(st.sampled_from([frozenset[int](), frozenset({3, 4})])),
        forced=None if forced is None else np.array(forced, dtype=np.int32),
    )


@settings(deadline=None, max_examples=25)
@given(
    st.lists(requests(), min_size=1, max_size=14),
    st.integers(40, 70),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([1, 5, 64]),
    st.sampled_from([0, 1024]),
)
def test_results_do_not_depend_on_the_pool(
    asked: list[SampleRequest], slots: int, batch: int, chunk: int, call: int
) -> None:
    plain, _ = served(asked, slots=5000, batch=1, chunk=256)
    squeezed, stats = served(asked, slots, batch, chunk, call)
    same(plain, squeezed)
    assert stats.used_slots == 0


def test_turns_give_way_and_still_end() -> None:
    """Eight turns of 60 tokens in a pool of 130: at its end, none fits beside more than one other."""
    asked = [
        SampleRequest(np.random.default_rng(seed).integers(0, 32, 20).astype(np.int32), 41, seed=seed)
        for seed in range(8)
    ]
    plain, _ = served(asked, slots=5000, batch=8, chunk=256)
    ended: list[int] = []
    squeezed, stats = served(asked, slots=130, batch=8, chunk=256, ended=ended)
    assert ended[0] == 0  # the oldest never gives way
    same(plain, squeezed)
    assert stats.preempted_turns > 0
    assert stats.evicted_tokens > 0
    assert {sample.finish for sample in squeezed} == {Finish.LENGTH}
    assert all((sample.versions == 0).all() for sample in squeezed)


def test_a_turn_that_fills_the_pool_alone_ends() -> None:
    asked = [
        SampleRequest(np.random.default_rng(seed).integers(0, 32, 30).astype(np.int32), 35, seed=seed)
        for seed in range(5)
    ]
    plain, _ = served(asked, slots=5000, batch=4, chunk=256)
    squeezed, stats = served(asked, slots=64, batch=4, chunk=256)
    same(plain, squeezed)
    assert stats.slots == 64
