"""Attacks on the HTTP service by clients without a key, and by web pages."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi.openapi.docs import get_swagger_ui_html

from support.security.attack import attack, without
from support.security.wire import Wire, request
from support.server.server_rig import Caller, Rig, rig, task
from towline.config import GatewaySettings, NodeSettings, ServerSettings, Settings
from towline.config.section import Section
from towline.schema import Role
from towline.server.api import front_door
from towline.server.api.auth import ANONYMOUS
from towline.server.api.connections import ConnectionTable
from towline.server.api.key_guesses import GuessLimiter

DOOR = "towline.server.api.front_door"
HEAD = 2048
"""The limit on header bytes in these tests."""


@asynccontextmanager
async def door(data: Path, **http: Any) -> AsyncIterator[tuple[Rig, Callable[[], Any]]]:
    """A service with low limits, and a function that connects to it."""
    wires: list[Wire] = []
    async with rig(data, http={"header_bytes": HEAD, "headers": 16, **http}) as r:

        async def connect() -> Wire:
            wires.append(await Wire.open(r.url))
            return wires[-1]

        try:
            yield r, connect
        finally:
            for wire in wires:
                await wire.close()


# Keys come before bodies


async def _anyone(*_: Any) -> Any:
    return ANONYMOUS


async def _unchecked(*_: Any) -> None:
    return None


@attack(
    "44",
    guard=without(
        (f"{DOOR}.FrontDoor.authenticate", _anyone), ("towline.server.api.dependencies.check_roles", _unchecked)
    ),
)
@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/v1/tasks", ""),
        ("/v1/tasks", "tlk-unknown"),
        ("/v1/results/ack", "tlk-unknown"),
        ("/v1/tasks", "Basic"),
        ("/v1/policy/weights", "submit"),
        ("/v1/keys", "submit"),
    ],
)
async def test_bodies_of_strangers_are_not_read(tmp_path: Path, path: str, key: str) -> Any:
    """`100 Continue` is sent when the service begins to read a body."""
    async with door(tmp_path) as (r, connect):
        if key == "submit":
            key = (await r.service.keys.create("", [Role.SUBMIT])).key
        given = [f"Authorization: {'Basic eA==' if key == 'Basic' else f'Bearer {key}'}"] if key else []
        wire = await connect()
        sent = ("Expect: 100-continue", "Content-Type: application/json", "Content-Length: 4000000", *given)
        await wire.send(request(path, *sent, method="POST"))
        return await wire.status() == 100


@attack("44", guard=without((f"{DOOR}.body_limit", lambda path, settings: 1 << 40)))
@pytest.mark.parametrize("path", ["/v1/keys", "/v1/results", "/v1/results/ack", "/v1/trajectories", "/v1/policy/pause"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_bodies_are_as_large_as_their_route_needs(tmp_path: Path, path: str, chunked: bool) -> Any:
    body = b'{"consumer": "%s"}' % (b"x" * (front_door.SMALL_BODY + 1))

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    async with rig(tmp_path) as r:
        headers = {"authorization": f"Bearer {r.caller.key}", "content-type": "application/json"}
        data: Any = pieces() if chunked else body
        async with r.caller.web.post(path, data=data, headers=headers) as answer:
            return answer.status not in (413,)


# Headers


def _fed_whole(self: Any, data: bytes) -> bytes:
    self.parser.feed_data(data)
    return b""


@attack(
    "45",
    guard=without(
        ("towline.server.api.protocol.LimitedProtocol._feed", _fed_whole),
        (
            "towline.server.api.protocol.LimitedProtocol.on_header",
            lambda self, name, value: self.headers.append((name.lower(), value)),
        ),
    ),
)
@pytest.mark.parametrize(
    "heads",
    [
        [f"X-Long: {'a' * 40 * HEAD}"],
        [f"X-{number}: {'b' * 100}" for number in range(400)],
        [f"X-{number}:" for number in range(60)],
        [f"X-Same: {number}" for number in range(30)],
        [f"Authorization: Bearer {'t' * 40 * HEAD}"],
        [f"{'n' * 20 * HEAD}: x"],
    ],
    ids=["one", "many", "empty", "repeated", "key", "name"],
)
async def test_endless_headers(tmp_path: Path, heads: list[str]) -> Any:
    async with door(tmp_path) as (_, connect):
        wire = await connect()
        data = request("/healthz", *heads)
        for start in range(0, len(data), 1000):
            if not await wire.send(data[start : start + 1000]):
                break
            await asyncio.sleep(0)
        return await wire.status() == 200


@attack("45", guard=without(("towline.server.api.protocol.LimitedProtocol._feed", _fed_whole)))
async def test_endless_request_line(tmp_path: Path) -> Any:
    async with door(tmp_path) as (_, connect):
        wire = await connect()
        await wire.send(request(f"/v1/{'x' * 20 * HEAD}"))
        return await wire.status() in (401, 404)


@attack("45", guard=without(("towline.server.api.protocol.LimitedProtocol._feed", _fed_whole)))
@pytest.mark.parametrize("kind", ["trailer", "extension"])
async def test_endless_trailers_and_chunk_extensions(tmp_path: Path, kind: str) -> Any:
    """They come after the headers; the next request on the connection shows that they were taken."""
    start, end = {"trailer": (b"0\r\nX-Trailer: ", b"\r\n\r\n"), "extension": (b"0;", b"\r\n\r\n")}[kind]
    async with door(tmp_path) as (_, connect):
        wire = await connect()
        await wire.send(request("/healthz", "Transfer-Encoding: chunked"))
        assert await wire.status() == 200
        await wire.send(start)
        for _ in range(40):
            if not await wire.send(b"e" * HEAD):
                break
            await asyncio.sleep(0.001)
        await wire.send(end + request("/livez"))
        return await wire.status() == 200


# Time


@attack("46", guard=without(("towline.server.api.protocol._Deadline.start", lambda self: None)))
@pytest.mark.parametrize("way", ["silent", "partial", "trickle", "newlines", "second", "body", "refused body"])
async def test_slow_clients(tmp_path: Path, unguarded: bool, way: str) -> Any:
    """A connection on which no request arrives is closed, however it is kept alive."""
    first = {
        "silent": b"",
        "partial": b"GET /healthz HTTP/1.1\r\nHost: local",
        "trickle": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        "newlines": b"\r\n",
        "second": request("/healthz") + b"GET /healthz HTTP/1.1\r\nX-Slow: ",
        "body": request("/v1/tasks", "Content-Length: 1000", "Content-Type: application/json", method="POST"),
        "refused body": request("/v1/tasks", "Content-Length: 1000", method="POST"),
    }[way]
    more = {"trickle": b"x", "newlines": b"\r\n", "second": b"x", "body": b" ", "refused body": b"x"}.get(way, b"")
    async with door(tmp_path, header_seconds=0.3, body_seconds=0.3) as (r, connect):
        if way == "body":
            first = first.replace(b"\r\n", f"\r\nAuthorization: Bearer {r.caller.key}\r\n".encode(), 1)
        wire = await connect()
        await wire.send(first)

        async def keep_alive() -> None:
            taken = bool(more)
            while taken:
                await asyncio.sleep(0.05)
                taken = await wire.send(more)

        sending = asyncio.create_task(keep_alive())
        try:
            return not await wire.closed(1.5 if unguarded else 60)
        finally:
            sending.cancel()


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(tmp_path: Path) -> None:
    async with door(tmp_path, idle_seconds=0.2) as (r, connect):
        idle, busy = await connect(), await connect()
        await idle.send(request("/healthz"))
        body = json.dumps({"consumer": "c", "wait": 1.0}).encode()
        key = f"Authorization: Bearer {r.caller.key}"
        await busy.send(request("/v1/results", key, method="POST", body=body) + b"GET /healthz")
        assert await idle.status() == 200
        assert await idle.closed()
        assert await busy.status() == 200


# Connections


@attack(
    "46",
    "connections",
    guard=without((f"{DOOR.rpartition('.')[0]}.connections.ConnectionTable.admit", lambda *_: True)),
)
@pytest.mark.parametrize("limit", ["connections", "connections_per_address"])
async def test_floods_of_connections(tmp_path: Path, limit: str) -> Any:
    """More connections than the limit are never open at once."""
    async with door(tmp_path, **{limit: 8}) as (_, connect):
        wires = [await connect() for _ in range(24)]
        answers = 0
        for wire in wires:
            await wire.send(request("/healthz"))
        for wire in wires:
            answers += await wire.status() == 200
        return answers > 8


@attack(
    "46",
    "connections",
    guard=without((f"{DOOR.rpartition('.')[0]}.connections.ConnectionTable.prove", lambda *_: None)),
)
async def test_a_flood_without_keys_takes_no_place_of_a_client_with_one(tmp_path: Path) -> Any:
    async with door(tmp_path, connections_per_address=8) as (r, connect):
        client = await connect()
        listing = request("/v1/tasks", f"Authorization: Bearer {r.caller.key}")
        await client.send(listing)
        assert await client.status() == 200
        for _ in range(24):
            await connect()
        await client.send(listing)
        return await client.status() != 200


@attack("44", "pipelining", guard=without(("towline.server.api.protocol.PIPELINED", 1 << 30)))
async def test_a_bomb_of_pipelined_requests(tmp_path: Path) -> Any:
    async with door(tmp_path) as (_, connect):
        wire = await connect()
        await wire.send(request("/healthz") * 200)
        answers = 0
        while await wire.status() == 200:
            answers += 1
            if answers == 200:
                break
        return answers > 100


async def test_a_table_of_connections_counts_networks_and_forgets_closed_ones() -> None:
    class Connection:
        def __init__(self, address: str):
            self.address, self.evicted = address, False

        def evict(self) -> None:
            self.evicted = True

    table = ConnectionTable(4, 2)
    first, second, third, other = (Connection(name) for name in ("a", "a", "a", "b"))
    assert [table.admit(one) for one in (first, second, other)] == [True] * 3
    table.prove(first)
    assert table.admit(third)
    assert (first.evicted, second.evicted, other.evicted, len(table)) == (False, True, False, 3)
    table.prove(third)
    assert not table.admit(second)
    for one in (first, third, other, other):
        table.remove(one)
    assert len(table) == 0


# Key guesses


@attack("47", guard=without((f"{DOOR}.GuessLimiter.retry_after", lambda *_: None)))
@pytest.mark.parametrize(
    "spoof",
    [
        {},
        {"x-forwarded-for": "10.0.0.{}"},
        {"forwarded": "for=10.0.0.{}"},
        {"x-real-ip": "10.0.0.{}"},
        {"connection": "close"},
    ],
    ids=["plain", "x-forwarded-for", "forwarded", "x-real-ip", "new connections"],
)
async def test_key_guesses(tmp_path: Path, spoof: dict[str, str]) -> Any:
    async with door(tmp_path, key_guesses=5) as (r, _):
        heard = 0
        for number in range(30):
            guess = Caller(r.caller.web, f"tlk-guess-{number}")
            answer = await guess.call(
                "GET", "/v1/tasks", headers={name: value.format(number) for name, value in spoof.items()}
            )
            assert answer.status in (401, 429)
            assert answer.status == 401 or int(answer.headers["retry-after"]) >= 1
            heard += answer.status == 401
        return heard > 15


@attack("47", guard=without((f"{DOOR}.GuessLimiter.retry_after", lambda *_: None)))
async def test_even_a_right_guess_waits(tmp_path: Path) -> Any:
    """A limit that only wrong keys meet would not slow a search down."""
    async with door(tmp_path, key_guesses=1) as (r, _):
        for number in range(10):
            await Caller(r.caller.web, f"tlk-guess-{number}").call("GET", "/v1/tasks")
        fresh = (await r.service.keys.create("", [Role.ADMIN])).key
        return (await Caller(r.caller.web, fresh).call("GET", "/v1/tasks")).status == 200


async def test_keys_in_use_pass_while_others_guess(tmp_path: Path) -> None:
    async with door(tmp_path, key_guesses=1) as (r, _):
        assert (await r.caller.call("GET", "/v1/tasks")).status == 200
        for number in range(10):
            await Caller(r.caller.web, f"tlk-guess-{number}").call("GET", "/v1/tasks")
        assert (await r.caller.call("GET", "/v1/tasks")).status == 200
        # A missing key is no guess, and the open paths ask for none.
        assert (await Caller(r.caller.web).call("GET", "/v1/tasks")).status == 401
        assert (await Caller(r.caller.web, "tlk-x").call("GET", "/healthz")).status == 200


def test_guesses_are_forgotten_over_a_minute() -> None:
    now = 0.0
    limiter = GuessLimiter(2, clock=lambda: now)
    limiter.failed("a")
    assert limiter.retry_after("a", "key") is None
    limiter.failed("a")
    assert limiter.retry_after("a", "key") == pytest.approx(30)
    assert limiter.retry_after("b", "key") is None
    now = 31.0
    assert limiter.retry_after("a", "key") is None


# Web pages

EVIL = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:3000"},
    {"origin": "http://127.0.0.1.evil.example"},
    {"origin": "file://"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
]


@attack("42", "43", guard=without((f"{DOOR}.check_origin", lambda *_: None)))
@pytest.mark.parametrize("headers", EVIL, ids=lambda one: "-".join(one.values()).replace("/", ""))
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_web_page_leases_results(tmp_path: Path, method: str, headers: dict[str, str]) -> Any:
    """With a key, as a browser that was given one would send it."""
    async with rig(tmp_path) as r:
        await r.caller.submit(task("t"))
        await r.caller.until("/v1/tasks/t", state="done")
        wanted: dict[str, Any] = {"consumer": "trainer", "lease": 604800, "wait": 5}
        if method == "GET":
            answer = await r.caller.call("GET", "/v1/results", headers=headers, **wanted)
        else:
            answer = await r.caller.call("POST", "/v1/results", wanted, headers=headers)
        return answer.status == 200 and answer.body["results"]


@attack("42", "43", guard=without(("towline.server.api.result_routes.require_key", lambda caller: None)))
@pytest.mark.parametrize("query", [{"lease": 604800}, {"prefix": "theirs/"}, {"max": 0}])
async def test_a_link_leases_results_of_a_service_without_keys(tmp_path: Path, query: dict[str, Any]) -> Any:
    """A link or an image is a GET without an origin: older browsers send no sign of the page that has it."""
    async with rig(tmp_path, auth=False) as r:
        return (await Caller(r.caller.web).call("GET", "/v1/results", consumer="trainer", **query)).status == 200


@attack("42", guard=without((f"{DOOR}.check_origin", lambda *_: None)))
@pytest.mark.parametrize("headers", EVIL[:6], ids=lambda one: "-".join(one.values()).replace("/", ""))
async def test_a_web_page_submits_to_a_service_without_keys(tmp_path: Path, headers: dict[str, str]) -> Any:
    async with rig(tmp_path, auth=False) as r:
        page = Caller(r.caller.web)
        return (await page.call("POST", "/v1/tasks", task("evil"), headers=headers)).status == 200


@attack("rebinding", guard=without((f"{DOOR}.check_host", lambda head, allowed: ("localhost", None))))
@pytest.mark.parametrize("auth", [True, False], ids=["keys", "no keys"])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "EVIL.example:8600",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example.",
        "localhost@evil.example",
        "evil.example:80:80",
        "127.0.0.1, evil.example",
        "10.1.2.3",
        "",
    ],
)
async def test_another_name_for_the_service(tmp_path: Path, auth: bool, host: str) -> Any:
    async with rig(tmp_path, auth=auth) as r:
        wire = await Wire.open(r.url)
        key = [f"Authorization: Bearer {r.caller.key}"] if auth else []
        await wire.send(request("/v1/tasks", *key, host=host))
        found = await wire.status()
        await wire.close()
        return found == 200


@attack("rebinding", guard=without((f"{DOOR}.check_host", lambda head, allowed: ("localhost", None))))
async def test_two_names_in_one_request(tmp_path: Path) -> Any:
    async with rig(tmp_path, auth=False) as r:
        wire = await Wire.open(r.url)
        await wire.send(request("/v1/tasks", "Host: evil.example"))
        found = await wire.status()
        await wire.close()
        return found == 200


async def test_names_and_pages_of_the_service_itself(tmp_path: Path) -> None:
    async with rig(tmp_path, allowed_hosts=["towline.example", "*.inside.example"]) as r:
        port = r.url.rpartition(":")[2]
        for headers, status in (
            ({"host": "localhost:1"}, 200),
            ({"host": "[::1]"}, 200),
            ({"host": "Towline.example"}, 200),
            ({"host": "a.inside.example:443"}, 200),
            ({"host": "inside.example"}, 403),
            ({"host": f"127.0.0.1:{port}", "origin": f"http://127.0.0.1:{port}", "sec-fetch-site": "same-origin"}, 200),
            ({"host": "towline.example", "origin": "https://towline.example"}, 200),
            ({"host": "towline.example", "origin": "https://towline.example:444"}, 403),
            ({"sec-fetch-site": "none"}, 200),
        ):
            assert (await r.caller.call("GET", "/v1/tasks", headers=headers)).status == status, headers
        answer = await r.caller.call("GET", "/docs", headers={"sec-fetch-site": "cross-site"})
        assert answer.status == 200  # a link to the documentation


# The open pages


@attack(
    "52", guard=without(("towline.server.api.app.docs_page", lambda _: get_swagger_ui_html(openapi_url="/", title="t")))
)
@pytest.mark.parametrize("path", ["/docs", "/redoc"])
async def test_pages_load_code_from_elsewhere(tmp_path: Path, path: str) -> Any:
    async with rig(tmp_path) as r, aiohttp.request("GET", f"{r.url}{path}") as answer:
        page = await answer.text()
        assert answer.status == 200
        return re.findall(r"<script|(?:src|href)=.https?://[^'\">]*", page)


async def test_docs_need_no_key_and_name_every_route(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        anyone = Caller(r.caller.web)
        schema = await anyone.ok("GET", "/openapi.json")
        answer = await anyone.call("GET", "/docs")
        assert "script-src" not in answer.headers["content-security-policy"]
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert all(path in answer.body.decode() for path in schema["paths"])
        for path in ("/healthz", "/livez"):
            assert (await anyone.call("GET", path)).status == 200
        assert (await anyone.call("GET", "/metrics")).status == 401
        assert (await anyone.call("GET", "/v1/none")).status == 401


# Settings


@attack("53", guard=without(("towline.config.section.Section.model_validate", lambda values: values)))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 1e300, 10**30, -(10**30)])
@pytest.mark.parametrize(
    ("section", "name"),
    [
        (ServerSettings, "lease_seconds"),
        (ServerSettings, "body_bytes"),
        (ServerSettings, "queue"),
        (ServerSettings, "keep_seconds"),
        (NodeSettings, "run_workers"),
        (GatewaySettings, "body_bytes"),
    ],
)
def test_absurd_limits(section: type[Section], name: str, value: float) -> Any:
    try:
        return section.model_validate({name: value})
    except ValueError:
        return None


def test_every_number_of_the_settings_has_bounds() -> None:
    def numbers(section: type[Section], path: str) -> list[str]:
        found = []
        schema = section.model_json_schema(mode="validation")
        for name, field in schema.get("properties", {}).items():
            for kind in (field, *field.get("anyOf", ())):
                if kind.get("type") in ("integer", "number"):
                    low = kind.keys() & {"minimum", "exclusiveMinimum"}
                    high = kind.keys() & {"maximum", "exclusiveMaximum"}
                    if not (low and high):
                        found.append(f"{path}{name}")
        return found

    sections = {Settings} | {one for one in _subclasses(Section) if one.__module__.startswith("towline.config")}
    assert [one for section in sections for one in numbers(section, f"{section.__name__}.")] == []


def _subclasses(kind: type[Any]) -> set[type[Any]]:
    return {one for sub in kind.__subclasses__() for one in ({sub} | _subclasses(sub))}
