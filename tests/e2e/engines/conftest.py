"""The models, and one server that most tests share: it is steered by tests, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from support.engines.vllm_server import STEERABLE, Server, make_model, serving
from towline.engines.vllm import VllmEngine

_MEASURED: list[str] = []


@pytest.fixture(scope="session")
def sets(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three sets of weights of one untied model."""
    folder = tmp_path_factory.mktemp("untied")
    return [make_model(folder / str(seed), seed) for seed in range(3)]


@pytest.fixture(scope="session")
def tied(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two sets of weights of a model with tied embeddings."""
    folder = tmp_path_factory.mktemp("tied")
    return [make_model(folder / str(seed), seed, tied=True) for seed in range(2)]


@pytest.fixture(scope="session")
def server(sets: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the route for ids, and steerable."""
    with serving(sets[0], tmp_path_factory.mktemp("server") / "vllm.log", *STEERABLE) as shared:
        asyncio.run(shared.ready())
        yield shared


@pytest.fixture
async def engine(server: Server, sets: list[Path]) -> AsyncIterator[VllmEngine]:
    """The shared server, with the first set of weights."""
    engine = VllmEngine(server.url)
    await engine.start()
    if engine.version:
        await engine.update_weights(sets[0], 0)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Notes figures of a test, which are shown at the end of the run."""

    def note(**figures: object) -> None:
        shown = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
        )
        _MEASURED.append(f"{request.node.name}: {shown}")

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _MEASURED:
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A server's start is part of the first test that needs it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))
