"""Real sandboxes for evaluators: isolated ones, and plain folders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.evaluators.evaluator_rig import MakeRig, Rig, a_task
from towline.sandboxes.base import Runtime
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.sandboxes.process.runtime import ProcessRuntime

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A runtime is opened once a module, so its tests share the module's loop."""
    for item in items:
        if HERE in item.path.parents and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bubblewrap(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    runtime = BubblewrapRuntime(tmp_path_factory.mktemp("bubblewrap"))
    await runtime.open()
    yield runtime
    await runtime.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    runtime = ProcessRuntime(tmp_path_factory.mktemp("process"))
    await runtime.open()
    yield runtime
    await runtime.close()


@pytest.fixture
def rig(bubblewrap: Runtime, tmp_path: Path) -> MakeRig:
    """A rig over isolated sandboxes: evaluator's spec, and fields of the task."""

    def make(evaluator: dict[str, Any], **fields: Any) -> Rig:
        logs = tmp_path / "logs"
        logs.mkdir(exist_ok=True)
        return Rig(bubblewrap, a_task(evaluator, **fields), logs)

    return make
