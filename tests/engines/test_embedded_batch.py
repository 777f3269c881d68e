"""Clusters of sequences: always valid, and chosen for what they save."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towline.engines.embedded import batch as grouping
from towline.engines.embedded.batch import DecodeCluster, cluster_decodes


def table_of(sequences: list[list[int]]) -> np.ndarray:
    table = np.zeros((len(sequences), max(map(len, sequences)) + 3), dtype=np.int64)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence)] = sequence
    return table


def shape(clusters: list[DecodeCluster]) -> list[tuple[list[int], int]]:
    return sorted((sorted(cluster.members), cluster.shared) for cluster in clusters)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(st.integers(1, 3), max_size=12), min_size=1, max_size=12),
    st.sampled_from([0, 1, 4, 1024]),
)
def test_clusters_are_a_valid_partition(shared: list[list[int]], call: int) -> None:
    """Paths through a small tree, each ending in a slot of its own as the token being computed does."""
    sequences = [[*path, 100 + index] for index, path in enumerate(shared)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "CALL_COST", call)
        clusters = cluster_decodes(table_of(sequences), list(range(len(sequences))), list(map(len, sequences)))
    assert sorted(member for cluster in clusters for member in cluster.members) == list(range(len(sequences)))
    for cluster in clusters:
        heads = {tuple(sequences[member][: cluster.shared]) for member in cluster.members}
        assert len(heads) == 1
        assert all(len(sequences[member]) > cluster.shared for member in cluster.members)


def test_what_is_chosen() -> None:
    """Long shared prompts are read once, a long sequence does not pad short ones, and little work is left alone."""

    def run(start: int, length: int) -> list[int]:
        return list(range(start, start + length))

    def chosen(sequences: list[list[int]]) -> list[tuple[list[int], int]]:
        rows = list(range(len(sequences)))
        return shape(cluster_decodes(table_of(sequences), rows, list(map(len, sequences))))

    system = run(1, 3000)
    assert chosen([[*system, *run(10_000 * (n + 1), 40)] for n in range(4)]) == [([0, 1, 2, 3], 3000)]
    first, second = [*system, *run(4000, 4000)], [*system, *run(9000, 5000)]
    twos = [[*(first if n % 2 else second), *run(20_000 * (n + 1), 30 + n)] for n in range(6)]
    assert chosen(twos) == [([0, 2, 4], 8000), ([1, 3, 5], 7000)]
    ragged = [run(1, 9000), *(run(10_000 * (n + 1), 100) for n in range(7))]
    assert chosen(ragged) == [([0], 0), (list(range(1, 8)), 0)]
    assert chosen([run(1, 40), run(100, 90), run(200, 60)]) == [([0, 1, 2], 0)]
