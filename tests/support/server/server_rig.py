"""A service with the fake runner, and an HTTP caller with its admin key."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from towline.benchmarks.fake_runner import FakeRunner
from towline.config import ServerSettings
from towline.schema import EndReason, Result, SessionResult, SessionState
from towline.schema.files import dump_json
from towline.server.api.app import serving
from towline.server.events import Signal
from towline.server.service import Service


def task(task_id: str, samples: int = 1, **fields: Any) -> dict[str, Any]:
    return {"task_id": task_id, "instruction": "do it", "harness": "fake", "num_samples": samples, **fields}


def row_of(seq: int, version: int) -> dict[str, object]:
    """A result as it is stored."""
    body = SessionResult(
        session_id=f"s{seq}",
        task_id="t",
        sample=0,
        attempt=1,
        state=SessionState.DONE,
        end_reason=EndReason.EXITED,
        usable=True,
        turns=1,
        trained_tokens=1,
        lowest_version=version,
        finished=0.0,
    )
    known = {
        "unit": "session",
        "task_id": "t",
        "owner": "default",
        "usable": True,
        "max_staleness": None,
        "created": 0.0,
    }
    return known | {"seq": seq, "session_id": f"s{seq}", "body": dump_json(body), "lowest_version": version}


@dataclass
class Answer:
    status: int
    headers: Any
    body: Any
    """JSON if it is, else bytes."""


class Caller:
    """An HTTP client with an API key, or without."""

    def __init__(self, web: aiohttp.ClientSession, key: str = ""):
        self.web = web
        self.key = key

    async def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, **query: Any
    ) -> Answer:
        sent = {"authorization": f"Bearer {self.key}"} if self.key else {}
        params = {name: str(value) for name, value in query.items()}
        # Paths are as given: a %2F stays one.
        url = URL(str(self.web._base_url).rstrip("/") + path, encoded=True)
        async with self.web.request(
            method, url.update_query(params) if params else url, json=body, headers=sent | (headers or {})
        ) as answer:
            data = await answer.read()
            try:
                return Answer(answer.status, answer.headers, json.loads(data))
            except ValueError:
                return Answer(answer.status, answer.headers, data)

    async def ok(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        answer = await self.call(method, path, body, **query)
        assert answer.status in (200, 201, 204), answer
        return answer.body

    async def submit(self, *tasks: dict[str, Any]) -> list[dict[str, Any]]:
        return await self.ok("POST", "/v1/tasks", list(tasks))  # type: ignore[no-any-return]

    async def lease(self, consumer: str = "c", unit: str = "session", **query: Any) -> list[Result]:
        found = await self.ok("POST", "/v1/results", {"consumer": consumer, "unit": unit, "wait": 5, **query})
        return [Result.model_validate(one) for one in found["results"]]

    async def take(self, count: int, consumer: str = "c", unit: str = "session", **query: Any) -> list[Result]:
        """Lease and acknowledge `count` results; fails if none arrives for a while."""
        found: list[Result] = []
        while len(found) < count:
            some = await self.lease(consumer, unit, max=count - len(found), **{"wait": 30, **query})
            assert some, f"{len(found)} of {count} {unit} results came"
            await self.ack(*some, consumer=consumer)
            found += some
        return found

    async def ack(self, *results: Result, consumer: str = "c") -> dict[str, Any]:
        body = {"consumer": consumer, "result_ids": [one.result_id for one in results]}
        return await self.ok("POST", "/v1/results/ack", body)  # type: ignore[no-any-return]

    async def until(self, path: str, **fields: Any) -> Any:
        """Poll until the response has these fields."""
        for _ in range(2000):
            found = await self.ok("GET", path)
            if all(found[name] == value for name, value in fields.items()):
                return found
            await asyncio.sleep(0.01)
        raise AssertionError(f"{path} came to be {found}, not {fields}")


@dataclass
class Rig:
    service: Service
    runner: FakeRunner
    caller: Caller
    url: str


async def until_idle(service: Service) -> None:
    """Returns once the scheduler has looked at the queue again and found nothing to start."""
    service.signals.work.notify()
    await until_waiting(service.signals.work)


async def until_waiting(signal: Signal, waiting: bool = True) -> None:
    """Returns once a part of the server waits for the signal, or none does."""
    for _ in range(30_000):
        if signal.waiting is waiting:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"the signal {'is not' if waiting else 'is still'} waited for")


def admin_key(data: Path) -> str:
    """The key that the first start on a data folder has made; empty if there is none."""
    path = data / "admin.key"
    return path.read_text().strip() if path.exists() else ""


@contextlib.asynccontextmanager
async def rig(
    data: Path, database: str | None = None, runner: FakeRunner | None = None, **settings: Any
) -> AsyncIterator[Rig]:
    runner = runner or FakeRunner()
    values = {"port": 0, "data": data, "database": database, "stop_seconds": 0, **settings}
    async with (
        serving(ServerSettings.model_validate(values), runner) as running,
        aiohttp.ClientSession(running.url, timeout=aiohttp.ClientTimeout(total=60)) as web,
    ):
        yield Rig(running.service, runner, Caller(web, admin_key(data)), running.url)
