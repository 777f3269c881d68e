"""Requests generated from the OpenAPI document: every one gets a valid answer, and none causes a 500."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from support.server.postgres import Postgres
from support.server.server_rig import rig, task
from towline.schema import Problem, Role


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[tuple[str, str]]:
    """A service in its own thread, since the client blocks. On PostgreSQL, which is stricter."""
    ready, urls, ends = threading.Event(), [], []

    async def serve() -> None:
        async with rig(tmp_path_factory.mktemp("openapi"), postgres.database()) as r:
            await r.caller.submit(task("t", 2))
            await r.caller.take(2)
            r.service.settings = r.service.settings.model_copy(update={"wait_seconds": 0.01})
            # With a key, so that those that are made up and made lock nobody out.
            urls.append((r.url, (await r.service.keys.create("", [Role.ADMIN])).key))
            stop, loop = asyncio.Event(), asyncio.get_running_loop()
            ends.append(lambda: loop.call_soon_threadsafe(stop.set))
            ready.set()
            await stop.wait()

    # A daemon: one that failed, or does not end, does not keep the whole test run from ending.
    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(120)
        yield urls[0]
    finally:
        for end in ends:
            end()
        thread.join(60)


def test_no_request_breaks_the_service(served: tuple[str, str]) -> None:
    """Every operation, with valid and invalid requests."""
    url, key = served
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    statuses: Counter[int] = Counter()
    operations = [found.ok() for found in schema.get_all_operations()]
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not (operation.query or operation.path_parameters or operation.body):
                continue  # there is nothing to say wrongly
            _try(operation.as_strategy(generation_mode=mode), key, statuses)
    assert len(operations) >= 20
    assert statuses.keys() >= {200, 400, 404, 422}


def _try(cases: Any, key: str, statuses: Counter[int]) -> None:
    @given(case=cases)
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def try_one(case: schemathesis.Case) -> None:
        if case.operation.path == "/v1/events":
            case.query = {**(case.query or {}), "idle": 0}
        response = case.call(headers={"authorization": f"Bearer {key}"}, timeout=60)
        statuses[response.status_code] += 1
        assert response.status_code < 500, (case, response.text)
        if response.status_code >= 400:
            Problem.model_validate_json(response.content)

    try_one()
