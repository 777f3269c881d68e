"""Every route with every role: a key cannot use the routes of another role."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from support.server.routes import ROUTES, A, C, S
from support.server.server_rig import Caller, rig, task
from towline.benchmarks.fake_runner import FakeRunner
from towline.config import ServerSettings
from towline.errors import ConfigError
from towline.schema import Role
from towline.server.api.app import make_app, serving


async def test_every_route_and_role(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database, http={"key_guesses": 1000}) as r:
        documented = {
            (method.upper(), path)
            for path, methods in make_app(r.service).openapi()["paths"].items()
            for method in methods
        }
        assert documented == {(method, path) for method, path, _, _ in ROUTES}
        await r.caller.submit(task("t"))
        (result,) = await r.caller.take(1)
        admin = Caller(r.caller.web, (await r.caller.ok("POST", "/v1/keys", {"name": "me", "roles": ["admin"]}))["key"])
        callers = {"nobody": Caller(r.caller.web), "stranger": Caller(r.caller.web, "tlk-unknown"), A: admin}
        for role in (S, C):
            callers[role] = Caller(r.caller.web, (await admin.ok("POST", "/v1/keys", {"roles": [role]}))["key"])
        both = Caller(r.caller.web, (await admin.ok("POST", "/v1/keys", {"roles": [S, C]}))["key"])
        values = {"task_id": "t", "session_id": result.sessions[0].session_id, "key_id": "none", "name": "none"}
        for method, path, body, allowed in ROUTES:
            filled = path.format(**values)
            query = (
                {"idle": 0} if path == "/v1/events" else {"consumer": "c"} if method + path == "GET/v1/results" else {}
            )
            for name, caller in callers.items():
                answer = await caller.call(method, filled, body, **query)
                if name in allowed:
                    assert answer.status in (200, 201, 204, 404, 422), (name, method, path, answer)
                else:
                    assert answer.status == (403 if name in (S, C) else 401), (name, method, path, answer)
                    assert set(answer.body) == {"error", "field"}
            answer = await both.call(method, filled, body, **query)
            assert (answer.status != 403) == bool(allowed & {S, C}), (method, path, answer)
        keys = await admin.ok("GET", "/v1/keys")
        mine = next(key["key_id"] for key in keys if key["name"] == "me")
        for key in keys:
            if key["key_id"] != mine:
                assert (await admin.call("DELETE", f"/v1/keys/{key['key_id']}")).status == 204
        assert (await admin.call("DELETE", f"/v1/keys/{mine}")).status == 409  # the last admin
        assert (await both.call("GET", "/v1/tasks")).status == 401
        secret = admin.key.encode()
    assert not [path for path in _files(tmp_path) if secret in path.read_bytes()]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_submit_keys_cannot_use_the_host(tmp_path: Path) -> None:
    request = task("reach", environment={"sandbox": "process"})
    async with rig(tmp_path) as r:
        made = await r.service.keys.create("", [Role.ADMIN])
        submitter = Caller(r.caller.web, (await r.service.keys.create("", [Role.SUBMIT])).key)
        answer = await submitter.call("POST", "/v1/tasks", request)
        assert (answer.status, answer.body["field"]) == (403, "environment.sandbox")
        assert (await Caller(r.caller.web, made.key).call("POST", "/v1/tasks", request)).status == 200
    async with rig(tmp_path, trust_submitters=True) as r:
        assert (await Caller(r.caller.web, submitter.key).call("POST", "/v1/tasks", request)).status == 200


async def test_only_loopback_may_do_without_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--no-auth"):
        async with serving(ServerSettings(host="0.0.0.0", port=0, data=tmp_path, auth=False), FakeRunner()):
            pass
    async with rig(tmp_path, auth=False) as r:
        anyone = Caller(r.caller.web)
        assert (await anyone.call("GET", "/v1/tasks")).status == 200
        assert (await anyone.call("POST", "/v1/results", {"consumer": "c"})).status == 200
    assert not (tmp_path / "admin.key").exists()


async def test_a_service_beyond_loopback_makes_its_first_key(tmp_path: Path) -> None:
    async with serving(ServerSettings(host="0.0.0.0", port=0, data=tmp_path), FakeRunner()) as running:
        assert running.url.startswith("http://0.0.0.0:")
        assert running.key_file == tmp_path / "admin.key"
        local = running.url.replace("0.0.0.0", "127.0.0.1")
        headers = {"authorization": f"Bearer {running.key_file.read_text().strip()}"}
        async with aiohttp.request("GET", f"{local}/v1/tasks", headers=headers) as answer:
            assert answer.status == 200
        async with aiohttp.request("GET", f"{local}/v1/tasks") as answer:
            assert answer.status == 401


async def test_a_key_belongs_to_a_tenant(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        made = await r.caller.ok("POST", "/v1/keys", {"roles": ["admin"]})
        assert made["info"]["tenant"] == "default"
        admin = Caller(r.caller.web, made["key"])
        made = await admin.ok("POST", "/v1/keys", {"roles": ["submit"], "tenant": "acme"})
        found = await r.service.keys.caller(f"Bearer {made['key']}")
        assert (found.tenant, found.admin) == ("acme", False)
        assert {one["tenant"] for one in await admin.ok("GET", "/v1/keys")} == {"default", "acme"}
        for name in ("", "a b", "../x", "a\x1fb", "-x", "x" * 64, "a/b"):
            answer = await admin.call("POST", "/v1/keys", {"roles": ["submit"], "tenant": name})
            assert (answer.status, answer.body["field"]) == (422, "tenant")
