"""A real service for the adapters' tests: a tiny model, the example agent in sandboxes, real sessions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.trainers.adapter_service import Service, group_task
from towline.client import Client
from towline.demo import tiny_model
from towline.schema import Trajectory, unusable_reason
from towline.trainers.service import own_service

# Before TRL is imported: all that is used of it is called experimental there.
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sessions in sandboxes beside a large framework take minutes on a machine that is busy with other things."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.create(tmp_path_factory.mktemp("models") / "tiny", steps=20)


@pytest.fixture(scope="session")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with own_service(model, tmp_path_factory.mktemp("service"), ["--concurrency", "4"]) as url, Client(url) as client:
        yield Service(model, client)


@pytest.fixture(scope="session")
def sessions(service: Service) -> list[Trajectory]:
    """Two groups of three sessions each, scored."""
    client = service.client
    tasks = [group_task(number, f"sessions/{number}", samples=3) for number in range(2)]
    accepted = client.submit([task.model_copy(update={"max_attempts": 3}) for task in tasks])
    ended = [client.wait(one.task_id, 600) for one in accepted]
    found = client.trajectories([one.session_id for status in ended for one in status.sessions])
    usable = [one for one in found if unusable_reason(one) is None]
    assert len(usable) == 6, [(one.session_id, unusable_reason(one), one.error) for one in found]
    return usable
