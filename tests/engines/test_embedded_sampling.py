"""Drawing and stopping: distributions against their definition, stop strings against a search of the whole text."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from towline.engines.embedded.runner import Sampler, distribution, score
from towline.engines.embedded.turn import EngineTurn
from towline.engines.stop_strings import StopStrings

torch.set_num_threads(1)


def turn(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int | None = None) -> EngineTurn:
    random = None if seed is None else np.random.default_rng(seed)
    ids = np.zeros(2, dtype=np.int32)
    return EngineTurn("", ids, 1, 1, False, temperature, top_p, top_k, frozenset(), None, random, lambda sample: None)


def defined(logits: list[float], temperature: float, top_p: float, top_k: int) -> list[float]:
    """The distribution by its definition, in double precision."""
    scaled = [logit / (temperature or 1.0) for logit in logits]
    top = max(scaled)
    weights = {index: math.exp(value - top) for index, value in enumerate(scaled)}
    ranked = sorted(weights, key=lambda index: -weights[index])[: top_k or None]
    total = math.fsum(weights[index] for index in ranked)
    kept, reached = [], 0.0
    for index in ranked:
        if reached >= top_p and top_p < 1.0:
            break
        kept.append(index)
        reached += weights[index] / total
    total = math.fsum(weights[index] for index in kept)
    return [weights[index] / total if index in kept else 0.0 for index in range(len(logits))]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(-400, 400), min_size=12, max_size=12, unique=True),
            st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.9]),
            st.sampled_from([0.05, 0.5, 0.83, 1.0]),
            st.sampled_from([0, 1, 3, 12, 50]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_each_row_of_a_mixed_batch_is_its_own_distribution(rows: list[tuple[list[int], float, float, int]]) -> None:
    logits = torch.tensor([[value / 50 for value in row[0]] for row in rows])
    turns = [turn(*row[1:]) for row in rows]
    found = distribution(logits, turns).exp()
    for row, values in enumerate(found.tolist()):
        assert values == pytest.approx(defined(logits[row].tolist(), *rows[row][1:]), abs=2e-6)
    scores = score(logits[:1].expand(12, 12), torch.arange(12), turns[0])
    assert np.exp(scores).tolist() == pytest.approx(found[0].tolist(), abs=1e-7)


def test_draws_follow_the_distribution() -> None:
    rng = np.random.default_rng(0)
    row = torch.tensor(rng.normal(0, 2, 20), dtype=torch.float32)
    settings_of = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.6, 0.8, 0), (1.0, 1.0, 4)]
    turns = [turn(*settings_of[index % 4], seed=index) for index in range(16)]
    sampler = Sampler(16, 20)
    logits = row.expand(16, 20)
    counts = np.zeros((4, 20))
    draws = 3000
    for _ in range(draws):
        ids, logprobs = sampler.draw(logits, turns)
        for index, token in enumerate(ids):
            counts[index % 4, token] += 1
    for index, setting in enumerate(settings_of):
        expected = np.array(defined(row.tolist(), *setting))
        total = draws * 4
        deviation = np.sqrt(total * expected * (1 - expected)) + 1e-9
        assert (np.abs(counts[index] - total * expected) / deviation).max() < 4.5
        assert not counts[index][expected == 0].any()
    for token, logprob, setting in zip(ids[:4], logprobs[:4], settings_of, strict=True):
        assert math.exp(logprob) == pytest.approx(defined(row.tolist(), *setting)[token], rel=1e-5)


def test_greedy_takes_the_likeliest_and_scores_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9999, -1.0], [5.0, 3.0, 2.0, 5.1]])
    ids, logprobs = Sampler(3, 4).draw(logits, [turn(0.0), turn(0.0)])
    assert ids == [1, 3]
    expected = logits.log_softmax(-1)[[0, 1], [1, 3]].tolist()
    assert logprobs == pytest.approx(expected, abs=1e-6)


def read(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


@settings(deadline=None, max_examples=200)
@given(
    st.text(alphabet="ab \né€😀", max_size=30),
    st.lists(st.text(alphabet="ab \né€😀", min_size=1, max_size=4), min_size=1, max_size=3),
    st.binary(max_size=3),
)
def test_stop_strings_are_found_at_the_token_that_completes_them(text: str, stops: list[str], noise: bytes) -> None:
    middle = len(text) // 2
    ids = list(text[:middle].encode() + noise + text[middle:].encode())
    ends = [count for count in range(1, len(ids) + 1) if any(stop in read(ids[:count]) for stop in stops)]
    watch = StopStrings(stops, read)
    for count, token in enumerate(ids, 1):
        found = watch.feed(token)
        if found is not None:
            assert count == ends[0]
            whole = read(ids[:count])
            first = min(whole.find(stop) for stop in stops if stop in whole)
            assert whole.find(found) == first
            return
    assert not ends


def test_stop_strings_cost_a_window_and_not_the_whole_text() -> None:
    longest = 0

    def counting(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return read(ids)

    watch = StopStrings(["never there", ""], counting)
    assert all(watch.feed(token) is None for token in "plain text, and then some €€€ ".encode() * 20)
    assert longest <= 8
