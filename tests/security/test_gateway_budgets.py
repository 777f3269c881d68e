"""Attacks 12 to 16 and 18: what one session may take of the gateway, and where its images may come from."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.gateway.gateway_rig import Opened, chat, eventually, user
from support.security.attack import attack, without
from support.security.gateway_attacks import (
    COUNTS,
    DIALECTS,
    PATHS,
    Held,
    attacked,
    body,
    data_url,
    own_listener,
    send,
    with_image,
)
from towline.common import addresses
from towline.config.budgets import SessionBudgets
from towline.conversation import Media, Request
from towline.dialects.registry import all_dialects
from towline.engines.scripted import Say
from towline.errors import BadRequest
from towline.gateway import app
from towline.gateway.budgets import SessionUsage, more_values_than
from towline.gateway.images import RemoteImages
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

ANYWHERE = without(
    ("towline.common.addresses.is_public", lambda address: True),
    ("towline.common.addresses.is_own", lambda address: False),
)
SECONDS = 0.5
"""How long an attack watches what it holds; the limits under attack are a fraction of it."""


@pytest.fixture(scope="session")
def codec(assets: Path) -> ModelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


def answers(request: Request) -> Say:
    return Say("fine")


def nothing(*_: Any, **__: Any) -> None:
    """A guard that is gone."""


def _partial(path: str, session: Opened, sent: bytes = b"x", length: int = 100_000) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {session.key}\r\ncontent-length: {length}\r\n\r\n"
    return head.encode() + sent


# Connections


@attack("12", guard=without(("towline.gateway.connections.exceeds", lambda count, most: False)))
@pytest.mark.parametrize("sent", ["nothing", "half a header", "half a body", "requests"])
@pytest.mark.parametrize("listener", ["own", "shared"])
async def test_exhaust_descriptors(codec: ModelCodec, tmp_path: Path, sent: str, listener: str) -> int:
    """More connections than the budget stay open."""
    async with (
        attacked(codec, tmp_path, answers, connections=8, settings={"connections": 8}) as (rig, session),
        own_listener(rig, session) as port,
    ):
        shared = int(rig.running.base_url.rpartition(":")[2])
        held = Held(port if listener == "own" else shared)
        first = {
            "nothing": b"",
            "half a header": b"POST /v1/chat/completions HTTP/1.1\r\nhost:",
            "half a body": _partial(PATHS["chat"], session),
            "requests": f"GET /v1/models HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {session.key}\r\n\r\n".encode(),
        }[sent]
        await held.open(40, first)
        left = await held.still_open(SECONDS)
        held.close()
    return max(0, left - 8)


@attack("12", guard=without(("towline.gateway.connections.BoundedProtocol._limit", nothing)))
@pytest.mark.parametrize("sent", ["nothing", "half a header", "half a body"])
@pytest.mark.parametrize("listener", ["own", "shared"])
async def test_hold_connections_for_ever(codec: ModelCodec, tmp_path: Path, sent: str, listener: str) -> int:
    async with (
        attacked(codec, tmp_path, answers, header_seconds=0.1, body_seconds=0.1) as (rig, session),
        own_listener(rig, session) as port,
    ):
        shared = int(rig.running.base_url.rpartition(":")[2])
        held = Held(port if listener == "own" else shared)
        first = {"nothing": b"", "half a header": b"POST / HTTP/1.1\r\nhost:", "half a body": b""}[sent]
        await held.open(5, first or (_partial(PATHS["chat"], session) if sent == "half a body" else b""))
        left = await held.still_open(SECONDS)
        held.close()
    return left


@attack("12", guard=without(("towline.gateway.connections.BoundedProtocol._limit", nothing)))
async def test_drip_a_header_byte_by_byte(codec: ModelCodec, tmp_path: Path) -> bool:
    """Every byte comes in time, the request never."""
    async with (
        attacked(codec, tmp_path, answers, header_seconds=0.1) as (rig, session),
        own_listener(rig, session) as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nx-long: ")
        for _ in range(40):
            if reader.at_eof() or writer.transport.is_closing():
                break
            writer.write(b"x")
            await asyncio.sleep(0.02)
        survived = not reader.at_eof() and not writer.transport.is_closing()
        writer.transport.abort()
    return survived


@attack("12", guard=without(("towline.gateway.connections.exceeds", lambda count, most: False)))
@pytest.mark.parametrize("header", [b"x-%d: y\r\n", b"x: " + b"z" * 4096 + b"%d"], ids=["many", "one"])
async def test_endless_headers(codec: ModelCodec, tmp_path: Path, header: bytes) -> bool:
    """The gateway keeps 400 KB of headers of a request that never begins."""
    async with (
        attacked(codec, tmp_path, answers, header_bytes=8192) as (rig, session),
        own_listener(rig, session) as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\n")
        try:
            for number in range(400_000 // len(header)):
                writer.write(header % number)
                await writer.drain()
        except OSError:
            pass
        held = Held(port)
        held.streams.append((reader, writer))
        return await held.still_open(SECONDS) == 1


# Bodies


@attack(
    "13",
    guard=without(
        (
            "towline.gateway.budgets.SessionUsage.receive",
            lambda self, size: setattr(self, "buffered", self.buffered + size),
        )
    ),
)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_hold_partial_bodies(codec: ModelCodec, tmp_path: Path, dialect: str) -> int:
    """Many bodies that never end are held at once."""
    async with attacked(codec, tmp_path, answers, buffered_bytes=300_000) as (rig, session):
        usage = rig.gateway.sessions[session.id].usage
        async with own_listener(rig, session) as port:
            held, most = Held(port), 0
            await held.open(12, _partial(PATHS[dialect], session, b"x" * 60_000))
            for _ in range(100):
                await asyncio.sleep(0.005)
                most = max(most, usage.buffered)
            held.close()
        await eventually(lambda: usage.buffered == 0, "bodies of connections that ended are counted no longer")
    return max(0, most - 300_000)


@attack("13", guard=without())
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
async def test_a_body_over_the_limit(codec: ModelCodec, tmp_path: Path, announced: bool, unguarded: bool) -> bool:
    """The limit is a setting; without it the body is taken."""
    limit = 64 << 20 if unguarded else 20_000
    request = json.dumps(chat(user("x" * 40_000))).encode()
    async with attacked(codec, tmp_path, answers, settings={"body_bytes": limit}) as (rig, session):
        data: Any = request if announced else _chunks(request)
        async with rig.web.post(session.chat, data=data, headers=session.headers) as answer:
            return answer.status == 200


async def _chunks(data: bytes) -> Any:
    for start in range(0, len(data), 5000):
        yield data[start : start + 5000]


# Counts before rendering


@attack("14", guard=without(("towline.gateway.budgets.SessionUsage.check_counts", nothing)))
@pytest.mark.parametrize("what", ["messages", "tools"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_too_many_of_something(codec: ModelCodec, tmp_path: Path, dialect: str, what: str) -> bool:
    async with attacked(codec, tmp_path, answers, messages=30, tools=30) as (rig, session):
        texts = [f"m{n}" for n in range(60 if what == "messages" else 1)]
        request = body(dialect, texts, 60 if what == "tools" else 0)
        status, answer = await send(rig, session, PATHS[dialect], request)
        assert status in (200, 400), answer
        return status == 200


@attack("14", guard=without(("towline.gateway.budgets.SessionUsage.check_counts", nothing)))
@pytest.mark.parametrize("dialect", sorted(COUNTS))
async def test_too_many_tools_to_count(codec: ModelCodec, tmp_path: Path, dialect: str) -> bool:
    """The route that only counts tokens renders as well."""
    async with attacked(codec, tmp_path, answers, tools=30) as (rig, session):
        status, _ = await send(rig, session, COUNTS[dialect], body(dialect, ["x"], 60))
        return status == 200


@attack("14", guard=without(("towline.gateway.budgets.SessionUsage.check_values", nothing)))
@pytest.mark.parametrize("shape", ["parts", "schema", "unknown field"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_too_many_values(codec: ModelCodec, tmp_path: Path, dialect: str, shape: str) -> bool:
    """The same number of things, hidden deeper than a message or a tool."""
    request = body(dialect, ["x"], 1)
    many = [{"type": "text", "text": "y"} for _ in range(2000)]
    if shape == "unknown field":
        request["metadata" if dialect == "messages" else "x_unknown"] = {"user_id": "u", "x": [0] * 3000}
    elif shape == "schema":
        enum = [f"v{n}" for n in range(3000)]
        tool = request["tools"][0]
        declared = tool["functionDeclarations"][0] if dialect == "google" else tool.get("function", tool)
        declared["input_schema" if dialect == "messages" else "parameters"] = {
            "type": "object",
            "properties": {"a": {"type": "string", "enum": enum}},
        }
    elif dialect == "google":
        request["contents"][0]["parts"] = [{"text": "y"} for _ in range(2000)]
    elif dialect == "responses":
        request["input"][0]["content"] = [{**part, "type": "input_text"} for part in many]
    else:
        request["messages"][0]["content"] = many
    async with attacked(codec, tmp_path, answers, values=1500) as (rig, session):
        status, answer = await send(rig, session, PATHS[dialect], request)
        assert status in (200, 413), answer
        return status == 200


@attack("14", guard=without(("towline.gateway.budgets.SessionUsage.check_values", nothing)))
@pytest.mark.parametrize(
    "text", [b"[" + b"[]," * 200_000 + b"[]]", b"[" * 200, b'{"a":' * 100_000 + b"1" + b"}" * 100_000]
)
async def test_a_parse_that_explodes(codec: ModelCodec, tmp_path: Path, text: bytes) -> bool:
    """A small body becomes hundreds of thousands of objects as soon as it is parsed: it is counted before."""
    parsed = Counter[str]()
    real = app._json

    def counted(data: bytes) -> Any:
        parsed["times"] += 1
        return real(data)

    spy = without(("towline.gateway.app._json", counted))
    async with attacked(codec, tmp_path, answers, values=150) as (rig, session):
        with spy():
            async with rig.web.post(session.chat, data=text, headers=session.headers) as answer:
                assert answer.status in (400, 413)
    return parsed["times"] > 0


def test_values_are_counted_outside_of_strings() -> None:
    def count_of(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(map(count_of, value.values()))
        return 1 + sum(map(count_of, value)) if isinstance(value, list) else 1

    for value in ([1, [2, {}], {"a": [], "b": "x,y[{"}], "a", {"q": 'a\\",[\\\\"', "r": ["\\", '"', "[,"]}, [[]] * 50):
        data, exact = json.dumps(value).encode(), count_of(value)
        assert not more_values_than(data, exact + sum(1 for _ in data.split(b"[]")) + data.count(b"{}"))
        assert more_values_than(data, exact - 1)


# Turns


@attack("15", guard=without(("towline.gateway.budgets.SessionUsage.check_turns", nothing)))
@pytest.mark.parametrize("how", ["one request", "many requests"])
async def test_flood_the_engine(codec: ModelCodec, tmp_path: Path, how: str) -> int:
    """More turns in flight than the budget, by `n` or by requests."""
    async with attacked(codec, tmp_path, answers, turns_in_flight=4) as (rig, session):
        opened, most = rig.gateway.sessions[session.id], 0
        hold, real = asyncio.Event(), rig.engine.sample

        async def held(request: Any) -> Any:
            await hold.wait()
            return await real(request)

        rig.engine.sample = held  # type: ignore[method-assign]
        bodies = [chat(user("x"), n=8)] if how == "one request" else [chat(user(f"{n}")) for n in range(8)]
        posts = [asyncio.create_task(rig.post(session, each)) for each in bodies]
        for _ in range(60):
            await asyncio.sleep(0.005)
            most = max(most, opened.in_flight)
        hold.set()
        statuses = [status for status, _ in await asyncio.gather(*posts)]
        assert set(statuses) <= {200, 400, 429}
    return max(0, most - 4)


@attack("15", guard=without(("towline.gateway.budgets.SessionUsage.check_rate", nothing)))
@pytest.mark.parametrize("path", ["models", "chat", "count"])
async def test_flood_requests(codec: ModelCodec, tmp_path: Path, path: str) -> int:
    async with attacked(codec, tmp_path, answers, request_rate=0.001, request_burst=5) as (rig, session):
        statuses = Counter[int]()
        for number in range(15):
            if path == "models":
                async with rig.web.get(f"{session.base_url}/models", headers=session.headers) as answer:
                    statuses[answer.status] += 1
            elif path == "chat":
                statuses[(await rig.post(session, chat(user(f"{number}"))))[0]] += 1
            else:
                statuses[(await send(rig, session, COUNTS["messages"], body("messages", ["x"])))[0]] += 1
        assert set(statuses) <= {200, 429}
        # Another session is not slowed down.
        assert (await rig.post(await rig.open(), chat(user("hello"))))[0] == 200
    return max(0, statuses[200] - 5)


@attack("12", "15", guard=without(("towline.gateway.budgets.SessionUsage.count_refusal", nothing)))
async def test_never_stop_sending_what_is_refused(codec: ModelCodec, tmp_path: Path) -> bool:
    """Refusals cost as well: a session that goes on and on ends, by its own doing."""
    async with attacked(codec, tmp_path, answers, messages=1, refusals=5) as (rig, session):
        for _ in range(10):
            assert (await rig.post(session, chat(user("a"), user("b"))))[0] == 400
        opened = rig.gateway.sessions[session.id]
        assert opened.failure is None, "never an infrastructure failure"
        return not opened.exhausted.is_set()


# The journal


@attack("16", guard=without(("towline.gateway.budgets.SessionUsage.check_journal", nothing)))
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_fill_the_disk_with_images(codec: ModelCodec, tmp_path: Path, dialect: str) -> int:
    async with attacked(codec, tmp_path, answers, journal_bytes=100_000) as (rig, session):
        statuses = Counter[int]()
        for number in range(8):
            status, _ = await send(rig, session, PATHS[dialect], with_image(dialect, data_url(number, 24_000)))
            statuses[status] += 1
        opened = rig.gateway.sessions[session.id]
        assert opened.failure is None, "never an infrastructure failure"
        assert opened.exhausted.is_set() == bool(statuses[429]), "the session ends as `limit`"
        await rig.gateway.journal.flush()
        written = sum(file.stat().st_size for file in (tmp_path / "journal").iterdir())
    return max(0, written - 110_000)


@attack("16", guard=without(("towline.gateway.budgets.SessionUsage.check_journal", nothing)))
@pytest.mark.parametrize("what", ["text", "tools", "choices"])
async def test_fill_the_disk_otherwise(codec: ModelCodec, tmp_path: Path, what: str) -> int:
    """Every request is a root of its own: all of it is recorded again."""
    async with attacked(codec, tmp_path, answers, journal_bytes=150_000) as (rig, session):
        for number in range(10):
            fields: dict[str, Any] = {}
            if what == "tools":
                function = {"name": f"t{number}", "description": "d " * 12_000, "parameters": {"type": "object"}}
                fields = {"tools": [{"type": "function", "function": function}]}
            text = "x " * (12_000 if what != "tools" else 1)
            await rig.post(session, chat(user(f"{number} {text}"), **fields, n=4 if what == "choices" else 1))
        await rig.gateway.journal.flush()
        written = sum(file.stat().st_size for file in (tmp_path / "journal").iterdir())
    return max(0, written - 250_000)


# The event loop


@attack("14", guard=without(("towline.gateway.app.LARGE_BYTES", 1 << 40)))
@pytest.mark.parametrize("step", ["parse", "read", "render"])
async def test_a_long_request_stops_the_others(codec: ModelCodec, tmp_path: Path, step: str) -> bool:
    """While one session's long request is worked on, another session is answered."""
    answered, began = threading.Event(), threading.Event()

    def slow(real: Any) -> Any:
        def work(*arguments: Any, **options: Any) -> Any:
            if any("patience" in str(each)[:400] for each in _texts(arguments)) and not began.is_set():
                began.set()
                answered.wait(2.0)
            return real(*arguments, **options)

        return work

    async with attacked(codec, tmp_path, answers, settings={}) as (rig, session):
        planner = rig.gateway.sessions[session.id].planners["policy"]
        dialect = next(one for one in all_dialects() if one.name == "chat")
        patched = {
            "parse": (app, "_json", app._json),
            "read": (type(dialect), "read", type(dialect).read),
            "render": (type(planner), "plan", type(planner).plan),
        }[step]
        owner, name, real = patched
        setattr(owner, name, slow(real))
        try:
            long = asyncio.create_task(rig.post(session, chat(user("patience " * 40_000))))
            await asyncio.to_thread(began.wait, 10)
            late = answered.is_set() or not began.is_set()
            status, _ = await rig.post(await rig.open(), chat(user("hello")))
            assert status == 200
            stopped = long.done() or late or not _still(began, long)
            answered.set()
            assert (await long)[0] == 200
        finally:
            setattr(owner, name, real)
    return stopped


def _still(began: threading.Event, task: asyncio.Task[Any]) -> bool:
    return began.is_set() and not task.done()


def _texts(arguments: tuple[Any, ...]) -> list[Any]:
    found: list[Any] = []
    for each in arguments:
        if isinstance(each, bytes):
            found.append(each[:400])
        elif isinstance(each, Request):
            found += [message.text[:400] for message in each.messages]
        elif hasattr(each, "body"):
            found.append(each.body.get("messages"))
    return found


# Image URLs


@attack("18", guard=without(("towline.gateway.images.remote_media", lambda messages: [])))
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/x.png", "https://example.org/?secret=1", "HTTPS://example.org/x", "http://[::1]/x"]
)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_url_reaches_the_engine(codec: ModelCodec, tmp_path: Path, dialect: str, url: str) -> list[str]:
    """The engine would fetch it: requests from inside its network, and data carried out in the URL."""
    seen: list[str] = []

    def script(request: Request) -> Say:
        seen.extend(media.url for message in request.messages for media in message.media)
        return Say("seen")

    async with attacked(codec, tmp_path, script) as (rig, session):
        status, answer = await send(rig, session, PATHS[dialect], with_image(dialect, url))
        assert status in (200, 400), answer
        own, _ = await send(rig, session, PATHS[dialect], with_image(dialect, data_url(1, 400)))
        assert own == 200, "an image in the request itself is fine"
    return [one for one in seen if not one.startswith("data:")]


@attack("18", guard=without(("towline.gateway.images.remote_media", lambda messages: [])))
@pytest.mark.parametrize("where", ["file", "video", "tool result", "history", "computer"])
async def test_a_url_of_something_else(codec: ModelCodec, tmp_path: Path, where: str) -> list[str]:
    """Files, videos and images inside tool results and of earlier messages are no way around."""
    url, seen = "https://example.org/secret", []
    look = [{"type": "input_image", "image_url": url}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "file": ("responses", {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": url}]}]}),
        "video": (
            "google",
            {"contents": [{"role": "user", "parts": [{"fileData": {"mimeType": "video/mp4", "fileUri": url}}]}]},
        ),
        "tool result": (
            "responses",
            {
                "input": [
                    {"role": "user", "content": "x"},
                    call,
                    {"type": "function_call_output", "call_id": "c", "output": look},
                ]
            },
        ),
        "history": ("responses", {"input": [{"role": "user", "content": look}, {"role": "user", "content": "and?"}]}),
        "computer": (
            "responses",
            {
                "input": [
                    {"role": "user", "content": "x"},
                    {
                        "type": "computer_call",
                        "call_id": "c",
                        "action": {"type": "screenshot"},
                        "pending_safety_checks": [],
                        "id": "i",
                        "status": "completed",
                    },
                    {
                        "type": "computer_call_output",
                        "call_id": "c",
                        "output": {"type": "computer_screenshot", "image_url": url},
                    },
                ]
            },
        ),
    }

    def script(request: Request) -> Say:
        seen.extend(media.url for message in request.messages for media in message.media)
        return Say("seen")

    dialect, request = bodies[where]
    async with attacked(codec, tmp_path, script) as (rig, session):
        status, answer = await send(rig, session, PATHS[dialect], {"model": "m", **request})
        assert status in (200, 400), answer
    return [one for one in seen if not one.startswith("data:")]


@pytest.fixture
async def canary() -> Any:
    """A server on loopback that serves an image, and remembers who asked for what."""
    asked: list[str] = []

    async def image(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/redirect":
            raise web.HTTPFound("/private")
        if request.path == "/endless":
            return web.Response(body=b"x" * 500_000, content_type="image/png")
        if request.path == "/text":
            return web.Response(text="secret", content_type="text/plain")
        return web.Response(body=b"\x89PNG", content_type="image/png")

    application = web.Application()
    application.router.add_get("/{tail:.*}", image)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    yield runner.addresses[0][1], asked
    await runner.cleanup()


async def fetched(images: RemoteImages, url: str) -> bool:
    try:
        return (await images.fetch(Media("image", "", url))).url.startswith("data:")
    except BadRequest:
        return False


@attack("18", guard=ANYWHERE)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0x7f000001", "pics.example", "[::ffff:127.0.0.1]"])
async def test_an_allowed_host_at_a_private_address(canary: Any, host: str) -> bool:
    """Whatever it is written as, and wherever its name leads."""
    port, asked = canary

    async def resolver(name: str, _: int) -> list[str]:
        return ["127.0.0.1"]

    images = RemoteImages(("*",), 1000, 5, resolver=resolver)
    got = await fetched(images, f"http://{host}:{port}/x.png")
    return got and bool(asked)


@attack("18", guard=without(("towline.gateway.images.is_allowed", lambda *_: True)))
@pytest.mark.parametrize("path", ["x", "pics.example", "?pics.example"])
async def test_a_host_that_is_not_allowed(canary: Any, path: str) -> bool:
    port, asked = canary
    with ANYWHERE():
        images = RemoteImages(("pics.example", "*.pics.example"), 1000, 5)
        return await fetched(images, f"http://127.0.0.1:{port}/{path}") and bool(asked)


@attack("18", guard=without(("towline.gateway.images.FOLLOW_REDIRECTS", True)))
async def test_a_redirect_to_elsewhere(canary: Any) -> bool:
    port, asked = canary
    with ANYWHERE():
        await fetched(RemoteImages(("127.0.0.1",), 1000, 5), f"http://127.0.0.1:{port}/redirect")
    return "/private" in asked


@attack("18", guard=without())
@pytest.mark.parametrize("path", ["endless", "text"])
async def test_an_image_that_is_none(canary: Any, path: str, unguarded: bool) -> bool:
    """Too large, or of another type: without the limit, or as an image, it is taken."""
    port, _ = canary
    with ANYWHERE():
        images = RemoteImages(("127.0.0.1",), 1_000_000 if unguarded else 1000, 5)
        where = "x.png" if path == "text" and unguarded else path
        return await fetched(images, f"http://127.0.0.1:{port}/{where}")


async def test_a_name_whose_answer_changes_is_connected_to_where_it_was_checked(canary: Any) -> None:
    port, asked = canary
    answers_given = iter([["93.184.216.34"], ["127.0.0.1"]])

    async def resolver(name: str, _: int) -> list[str]:
        return next(answers_given)

    found = await addresses.checked_addresses("rebind.example", port, resolver=resolver)
    assert found == ["93.184.216.34"], "the connection goes to the address that was checked, not to the name"
    assert not asked


def test_one_budget_object_per_session_and_one_count_for_all() -> None:
    counted: Counter[str] = Counter()
    one, two = SessionUsage(SessionBudgets(), counted), SessionUsage(SessionBudgets(), counted)
    one.count_refusal("tools")
    two.count_refusal("tools")
    assert (one.refused, two.refused, counted) == (1, 1, {"tools": 2})
