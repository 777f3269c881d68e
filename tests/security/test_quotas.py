"""Quotas: what exceeds a tenant's limit is refused when it is sent, with one line that names the limit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.security.attack import attack, without
from support.security.two_tenants import key, two_tenants
from support.server.server_rig import rig, task
from towline.benchmarks.fake_runner import FakeRunner
from towline.cli import app
from towline.config import ServerSettings
from towline.schema import Role, Task
from towline.server.errors import InvalidInput
from towline.server.scheduling.queue import admit

TASKS = without(("towline.server.quotas.check_task", lambda *_: None))
DEMANDS: list[tuple[str, dict[str, Any]]] = [
    ("run_seconds", {"timeouts": {"run": 1e9}}),
    ("run_seconds", {"timeouts": {"run": 86_401}}),
    (
        "run_seconds",
        {"steps": [{"name": f"s{number}", "instruction": "x", "seconds": 80_000} for number in range(2)]},
    ),
    (
        "run_seconds",
        {"timeouts": {"run": 86_000}, "steps": [{"name": f"s{n}", "instruction": "x"} for n in range(2)]},
    ),
    ("stage_seconds", {"timeouts": {"evaluate": 1e9}}),
    ("stage_seconds", {"timeouts": {"init": 1e9}}),
    ("stage_seconds", {"timeouts": {"build": 1e9}}),
    ("stage_seconds", {"grace_seconds": 1e9, "num_samples": 2, "min_samples": 1}),
    ("memory_mb", {"environment": {"resources": {"memory_mb": 10**7}}}),
    ("disk_mb", {"environment": {"resources": {"disk_mb": 10**9}}}),
    ("cpus", {"environment": {"resources": {"cpus": 10_000}}}),
    ("pids", {"environment": {"resources": {"pids": 10**7}}}),
    ("samples", {"num_samples": 20_000}),
    ("attempts", {"max_attempts": 10**6}),
    ("priority", {"priority": 2**31 - 1}),
    ("task_bytes", {"instruction": "x" * 5_000_000}),
    ("task_bytes", {"metadata": {"x": ["y" * 1000] * 5000}}),
    ("task_bytes", {"environment": {"files": [{"target": "/work/x", "text": "x" * 5_000_000}]}}),
]


@pytest.mark.parametrize(("limit", "fields"), DEMANDS, ids=[f"{n}-{limit}" for n, (limit, _) in enumerate(DEMANDS)])
@attack("37", "38", "39", "40", guard=TASKS)
async def test_a_task_that_asks_for_more_than_the_limit(tmp_path: Path, limit: str, fields: dict[str, Any]) -> Any:
    """As the service admits it, without the service."""
    asked = Task.model_validate(task("big", **fields))
    settings = ServerSettings(data=tmp_path, queue=50_000)
    refusal: InvalidInput | None = None
    try:
        await admit(
            asked, "[1]", runner=FakeRunner(), settings=settings, trusted=False, tenant="m", limits=settings.limits
        )
    except InvalidInput as error:
        refusal = error
    if refusal is None:
        return "admitted"
    assert limit in str(refusal)
    assert "\n" not in str(refusal)
    assert str(refusal.field).startswith("[1].")
    return None


async def test_one_task_above_a_limit_refuses_all_of_its_call(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as t:
        call = [task("small"), task("big", timeouts={"run": 1e9})]
        answer = await t.mallory.call("POST", "/v1/tasks", call)
        assert (answer.status, answer.body["field"]) == (422, "[1].timeouts.run")
        assert answer.body["error"] == "1000000000.0 exceeds the limit run_seconds = 86400.0 of this tenant"
        assert await t.mallory.ok("GET", "/v1/tasks") == []


@attack("37", guard=without(("towline.server.service.queue_limit", lambda tenants, tenant: 10**9)))
async def test_fill_the_queue_by_many_calls_at_once(tmp_path: Path) -> Any:
    """Calls that are under way together must not exceed the limit together."""
    runner = FakeRunner(capacity=1)
    async with rig(tmp_path, None, runner, limits={"queued": 40}) as r:
        await key(r, "default", Role.ADMIN)
        mallory, alice = await key(r, "mallory", Role.SUBMIT), await key(r, "alice", Role.SUBMIT)
        runner.hold = True
        await mallory.call("POST", "/v1/tasks", task("first"))
        calls = [mallory.call("POST", "/v1/tasks", task(f"m{number}", 10)) for number in range(12)]
        statuses = [one.status for one in await asyncio.gather(*calls)]
        waiting = r.service.scheduler.waiting_of["mallory"]
        # A queue that one tenant has filled has room for another.
        assert (await alice.call("POST", "/v1/tasks", task("mine", 40))).status == 200
        refused = statuses.count(429)
        runner.hold = False
        runner.release()
        return waiting > 41 and (waiting, refused)


@attack("37", guard=without(("towline.server.quotas.RequestQuota.take", lambda self, tenant: None)))
async def test_send_requests_faster_than_the_limit(tmp_path: Path) -> Any:
    async with two_tenants(tmp_path, tenants={"mallory": {"requests_per_second": 2}}) as t:
        statuses = [(await t.mallory.call("GET", "/v1/policy")).status for _ in range(30)]
        assert (await t.alice.call("GET", "/v1/policy")).status == 200  # another tenant has its own rate
        return statuses.count(200) > 28 and statuses


@attack("12", guard=without(("towline.server.quotas.RequestQuota.take", lambda self, tenant: None)))
async def test_hold_many_requests_open(tmp_path: Path) -> Any:
    async with two_tenants(tmp_path, tenants={"mallory": {"requests_in_flight": 4}}) as t:
        held = [
            asyncio.create_task(t.mallory.call("POST", "/v1/results", {"consumer": f"c{number}", "wait": 20}))
            for number in range(8)
        ]
        refused = 0
        for _ in range(200):
            refused = sum(one.done() and one.result().status == 429 for one in held)
            if refused == 4 or t.rig.service.requests.in_flight["mallory"] == 8:
                break
            await asyncio.sleep(0.02)
        assert (await t.alice.call("GET", "/v1/policy")).status == 200
        t.rig.service.stop()
        await asyncio.gather(*held)
        return refused < 4 and f"{8 - refused} at once"


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@attack("40", guard=without(("towline.server.api.front_door.tenant_body_limit", lambda path, most, limits: most)))
async def test_send_a_body_above_the_limit(tmp_path: Path, chunked: bool) -> Any:
    """Refused by its length before it is read, or while it is read; and not parsed either way."""
    async with two_tenants(tmp_path, tenants={"mallory": {"body_bytes": 100_000, "task_bytes": 10**6}}) as t:
        body = json.dumps(task("large", instruction="x" * 200_000)).encode()

        async def parts() -> Any:
            for start in range(0, len(body), 50_000):
                yield body[start : start + 50_000]

        headers = {"authorization": f"Bearer {t.mallory.key}", "content-type": "application/json"}
        sent = parts() if chunked else body
        async with t.mallory.web.post("/v1/tasks", data=sent, headers=headers) as answer:
            return answer.status == 200 and await answer.json()


@attack("36", guard=without(("towline.server.delivery.leases.check_consumers", lambda tx, request: asyncio.sleep(0))))
async def test_make_consumers_without_end(tmp_path: Path) -> Any:
    async with two_tenants(tmp_path, tenants={"mallory": {"consumers": 3}}) as t:
        calls = [await t.mallory.call("POST", "/v1/results", {"consumer": f"c{number}"}) for number in range(6)]
        assert (await t.mallory.call("POST", "/v1/results", {"consumer": "c0"})).status == 200
        return [one.status for one in calls].count(200) > 3 and "6 consumers"


@attack("40", guard=without(("towline.server.service.Service._check_stored", lambda *_: asyncio.sleep(0))))
async def test_submit_while_too_much_is_stored(tmp_path: Path) -> Any:
    async with two_tenants(tmp_path, tenants={"mallory": {"stored_bytes": 1000}}) as t:
        await t.mallory.submit(task("a", metadata={"x": "y" * 2000}))
        t.rig.service.tenants._stored.clear()
        answer = await t.mallory.call("POST", "/v1/tasks", task("b"))
        assert answer.status == 200 or "stored_bytes" in answer.body["error"]
        return answer.status == 200 and "accepted"


async def test_admin_keys_may_exceed_limits(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as t:
        await t.admin.submit(task("long", timeouts={"run": 1e6}))


def test_the_operator_sets_weights_and_limits(tmp_path: Path) -> None:
    def tenants(*words: str) -> Any:
        found = CliRunner().invoke(app, ["tenants", *words, "--data", str(tmp_path), "--json"])
        return json.loads(found.stdout) if found.exit_code == 0 else found

    made = tenants(
        "set", "acme", "--weight", "3", "--max-queued", "7", "--limit", "memory_mb=none", "--limit", "cpus=2"
    )
    assert made["limits"] == {"queued": 7, "memory_mb": None, "cpus": 2}
    assert tenants("set", "acme", "--limit", "cpus=default")["limits"] == {"queued": 7, "memory_mb": None}
    (one,) = tenants("list")
    assert (one["name"], one["weight"], one["keys"]) == ("acme", 3.0, 0)
    for wrong in (["--limit", "nonsense=1"], ["--limit", "cpus=x"], ["--weight", "0"], ["--limit", "cpus"]):
        assert tenants("set", "acme", *wrong).exit_code != 0
    assert tenants("set", "a b", "--weight", "1").exit_code != 0
