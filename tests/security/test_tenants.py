"""Tenants: no key reaches what another tenant owns, on any route, and no tenant is in another's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.security.attack import attack, without
from support.security.two_tenants import MARK, TwoTenants, key, leaks, two_tenants
from support.server.routes import ROUTES
from support.server.server_rig import Answer, Caller, task, until_idle
from towline.benchmarks.fake_runner import FakeRunner
from towline.schema import Role

NAMES = without(
    ("towline.server.store.names.qualify", lambda tenant, name: name),
    ("towline.server.store.tables.owned_by", lambda table, tenant: ()),
)
"""Without name spaces and without owners: the service before tenants."""
OWNERS = without(("towline.server.store.tables.owned_by", lambda table, tenant: ()))
NAMED = without(
    ("towline.server.api.tenancy.acting_tenant", lambda caller, named: named or caller.tenant),
    ("towline.server.api.tenancy.visible_tenant", lambda caller, named: named or caller.tenant),
)
"""Any key may name any tenant."""
VISIBLE = without(("towline.server.store.names.visible", lambda owner, tenant: True))


def query_of(path: str) -> dict[str, Any]:
    """The parameters that a route needs."""
    if path == "/v1/events":
        return {"idle": 0}
    return {}


async def walk(t: TwoTenants, caller: Caller, **query: Any) -> list[str]:
    """Call every route with Alice's ids; returns those that told something of hers, or changed something."""
    gained = []
    for method, path, body, _ in ROUTES:
        before = await t.rows()
        if path == "/v1/results/release":
            body = {"consumer": f"{MARK}-consumer"}
        elif path == "/v1/results/ack":
            body = {"consumer": f"{MARK}-consumer", "result_ids": [t.result_id]}
        elif path == "/v1/results":
            body = {"consumer": f"{MARK}-consumer"}
        elif path == "/v1/trajectories":
            body = {"session_ids": [t.session_id]}
        after = {"last-event-id": "0"} if path == "/v1/events" else {}
        more = query_of(path)
        if method == "GET" and body is not None:
            more, body = body, None
        answer = await caller.call(method, path.format(**t.ids), body, after, **more, **query)
        # The walk made a consumer of the same name for its own tenant.
        told = b'tenant="alice"' in answer.body if path == "/metrics" else leaks(answer)
        if told or await t.rows() != before:
            gained.append(f"{method} {path}")
    return gained


@attack("33", "34", "35", guard=NAMES)
async def test_walk_all_routes_with_foreign_ids(tmp_path: Path) -> list[str]:
    async with two_tenants(tmp_path) as t:
        return await walk(t, t.mallory)


@attack("33", "34", "35", guard=NAMED)
async def test_walk_all_routes_naming_the_tenant(tmp_path: Path) -> list[str]:
    async with two_tenants(tmp_path) as t:
        return await walk(t, t.mallory, tenant="alice")


async def test_the_walk_gets_somewhere(tmp_path: Path) -> None:
    """Alice's own key, and an admin's, gain on the routes that concern tenants; else the walk proves nothing."""
    async with two_tenants(tmp_path) as t:
        mine = await walk(t, t.alice)
        for route in (
            "GET /v1/tasks",
            "GET /v1/tasks/{task_id}",
            "GET /v1/sessions/{session_id}/log",
            "GET /v1/events",
        ):
            assert route in mine
        assert {"POST /v1/trajectories", "POST /v1/results/ack", "GET /metrics"} <= set(mine)
    async with two_tenants(tmp_path / "admin") as t:
        # An admin reads all tenants without naming one, and acts for one that it names.
        assert "GET /v1/tasks" in await walk(t, t.admin)
        assert "DELETE /v1/tasks/{task_id}" not in await walk(t, t.admin)
    async with two_tenants(tmp_path / "named") as t:
        assert {"GET /v1/tasks/{task_id}", "POST /v1/results/release"} <= set(await walk(t, t.admin, tenant="alice"))


@pytest.mark.parametrize(
    "named",
    ["alice", "Alice", "alice\x1f", "", "*", "alice/../alice", "default", "mallory\x1falice"],
    ids=["name", "case", "separator", "empty", "star", "dots", "default", "qualified"],
)
async def test_no_name_of_a_tenant_opens_it(tmp_path: Path, named: str) -> None:
    async with two_tenants(tmp_path) as t:
        answer = await t.mallory.call("GET", "/v1/tasks", tenant=named)
        assert answer.status in (403, 422) or not leaks(answer)


FOREIGN = [
    ("GET", "/v1/tasks/{}", "task"),
    ("DELETE", "/v1/tasks/{}", "task"),
    ("GET", "/v1/sessions/{}", "session"),
    ("GET", "/v1/sessions/{}/trajectory", "session"),
    ("GET", "/v1/sessions/{}/log", "session"),
    ("GET", "/v1/tasks?after={}", "task"),
    ("GET", "/v1/sessions?after={}", "session"),
    ("GET", "/v1/sessions?task={}", "task"),
]


@pytest.mark.parametrize(("method", "path", "kind"), FOREIGN, ids=[path for _, path, _ in FOREIGN])
@attack("36", guard=NAMES)
async def test_a_foreign_id_is_told_from_one_that_does_not_exist(
    tmp_path: Path, method: str, path: str, kind: str
) -> Any:
    """An answer must not tell that something exists: the same status and text, the id aside."""
    async with two_tenants(tmp_path) as t:
        foreign = t.session_id if kind == "session" else f"{MARK}-task"

        async def asked(name: str) -> tuple[int, str]:
            answer: Answer = await t.mallory.call(method, path.format(name))
            return answer.status, repr(answer.body).replace(name, "ID")

        exists, invented = await asked(foreign), await asked("s-0-1-00000000")
        return exists != invented and (exists, invented)


@attack("33", guard=NAMES)
async def test_cancel_the_tasks_of_another(tmp_path: Path) -> Any:
    runner = FakeRunner()
    async with two_tenants(tmp_path, runner=runner) as t:
        runner.hold = True
        await t.alice.submit(task(f"{MARK}-running", 2))
        await t.mallory.call("DELETE", f"/v1/tasks/{MARK}-running")
        status = await t.alice.call("GET", f"/v1/tasks/{MARK}-running")
        runner.hold = False
        runner.release()
        return status.body["state"] == "cancelled" and status.body


@attack("34", guard=NAMES)
async def test_acknowledge_the_leases_of_another(tmp_path: Path) -> Any:
    async with two_tenants(tmp_path) as t:
        # Mallory's consumer has seen as many results, and has the same name.
        await t.mallory.submit(task("m"))
        await t.mallory.lease(f"{MARK}-consumer", wait=30)
        await t.mallory.call("POST", "/v1/results/ack", {"consumer": f"{MARK}-consumer", "result_ids": [t.result_id]})
        await t.alice.ok("POST", "/v1/results/release", {"consumer": f"{MARK}-consumer"})
        again = [one.result_id for one in await t.alice.lease(f"{MARK}-consumer", wait=0)]
        return t.result_id not in again and "acknowledged"


@attack("34", guard=NAMES)
async def test_release_the_leases_of_another(tmp_path: Path) -> Any:
    async with two_tenants(tmp_path) as t:
        answer = await t.mallory.call("POST", "/v1/results/release", {"consumer": f"{MARK}-consumer"})
        return answer.body["released"]


@pytest.mark.parametrize("prefix", [None, "a", "alice", "alices", "alice\x1f"], ids=repr)
@pytest.mark.parametrize("tenant", ["mallory", "default"])
@attack("35", guard=NAMES)
async def test_lease_results_of_another(tmp_path: Path, prefix: str | None, tenant: str) -> Any:
    """A new consumer, with prefixes that look like stored names; also in the tenant whose names are stored as they are."""
    async with two_tenants(tmp_path) as t:
        thief = await key(t.rig, tenant, Role.CONSUME)
        query = {} if prefix is None else {"prefix": prefix}
        if prefix == "alice\x1f":
            answer = await thief.call("GET", "/v1/results", consumer="new", **query)
            assert answer.status == 422  # no client can send the separator
            query = {}
        elif prefix == "alice" and tenant == "default":
            query = {"prefix": "alice"}
        answer = await thief.call("GET", "/v1/results", consumer="new", **query)
        return leaks(answer) and answer.body


@attack("36", guard=NAMES)
async def test_squat_a_task_id(tmp_path: Path) -> Any:
    async with two_tenants(tmp_path) as t:
        await t.mallory.submit(task("step-1", instruction="squat"))
        answer = await t.alice.call("POST", "/v1/tasks", task("step-1", instruction="train"))
        return answer.status == 409 and answer.body


@attack("36", guard=NAMES)
async def test_squat_the_prefix_of_a_consumer(tmp_path: Path) -> Any:
    async with two_tenants(tmp_path) as t:
        await t.mallory.call("GET", "/v1/results", consumer="trainer", prefix="none", max=0)
        answer = await t.alice.call("GET", "/v1/results", consumer="trainer", prefix=MARK, max=0)
        return answer.status == 409 and answer.body


@attack("36", guard=NAMES)
async def test_poison_the_task_that_another_runs(tmp_path: Path) -> Any:
    """Two tasks with one id: each session must run the task of its own tenant."""
    async with two_tenants(tmp_path) as t:
        await t.mallory.call("POST", "/v1/tasks", task("same", metadata={"whose": "mallory"}))
        await t.alice.call("POST", "/v1/tasks", task("same", metadata={"whose": "alice"}))
        await until_idle(t.rig.service)
        found = await t.alice.lease("second", max=10)
        whose = [one.sessions[0].metadata for one in found if one.task_id == "same"]
        return ({"whose": "alice"} not in whose and whose) or "no result"[: not whose]


@pytest.mark.parametrize("path", ["/v1/nodes", "/v1/stragglers", "/metrics", "/v1/pacing"])
@attack("35", guard=VISIBLE)
async def test_see_names_of_another_in_the_status(tmp_path: Path, path: str) -> Any:
    runner = FakeRunner()
    async with two_tenants(tmp_path, runner=runner) as t:
        await t.alice.lease(f"{MARK}-paced", "group", groups_per_update=1, max_staleness=1, max=0, wait=0)
        runner.hold = True
        await t.alice.submit(task(f"{MARK}-running"))
        status = await t.alice.until(f"/v1/tasks/{MARK}-running", state="running")
        runner.hold = False
        answer = await t.mallory.call("GET", path)
        runner.release()
        assert status
        if path == "/metrics":
            # The labels of consumers come from a query with owners; here it is the pacer's, and the tenants' own.
            return b'tenant="alice"' in answer.body and "labels"
        return leaks(answer) and answer.body


@attack("35", guard=OWNERS)
async def test_read_the_events_of_another(tmp_path: Path) -> Any:
    async with two_tenants(tmp_path) as t:
        answer = await t.mallory.call("GET", "/v1/events", headers={"last-event-id": "0"}, idle=0)
        assert b"event: missed" not in answer.body
        return leaks(answer) and answer.body


@attack("pacing", guard=without(("towline.server.pacing.consumers.PacedConsumer.follows", lambda self, task_id: True)))
async def test_hold_the_queue_of_another_by_a_pace(tmp_path: Path) -> Any:
    """A consumer that never uses what it asked for holds its own tenant's groups back, and no other's."""
    runner = FakeRunner()
    async with two_tenants(tmp_path, runner=runner) as t:
        await t.mallory.lease("slow", "group", groups_per_update=1, max_staleness=0, max=0, wait=0)
        runner.hold = True
        await t.mallory.submit(task("m1"), task("m2"))
        await t.mallory.until("/v1/tasks/m1", state="running")
        await t.alice.submit(task(f"{MARK}-held"))
        await until_idle(t.rig.service)
        state = (await t.alice.ok("GET", f"/v1/tasks/{MARK}-held"))["state"]
        assert (await t.mallory.ok("GET", "/v1/tasks/m2"))["state"] == "queued"
        runner.hold = False
        runner.release()
        return state == "queued" and "Alice's group waits"


async def test_ids_with_the_separator_are_refused(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as t:
        for caller in (t.mallory, await key(t.rig, "default", Role.SUBMIT, Role.CONSUME)):
            assert (await caller.call("POST", "/v1/tasks", task("alice\x1fx"))).status == 422
            for path in ("/v1/tasks/alice%1Falices-task", "/v1/sessions?task=alice%1Falices-task"):
                assert not leaks(await caller.call("GET", path))
            assert (await caller.call("POST", "/v1/results/release", {"consumer": "alice\x1fc"})).status == 422
        longest = task("x" * 512)
        assert (await t.mallory.call("POST", "/v1/tasks", longest)).body["field"] == "task_id"
        assert (await t.mallory.call("POST", "/v1/tasks", task("x" * 504))).status == 200
