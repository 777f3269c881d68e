"""Whatever is sent to the provider routes, the answer is a reply or a 4xx that says what is wrong: never a 5xx, a hang,
or a turn of somebody else's. Afterwards the same gateway works as before.

`TOWLINE_FUZZ_SEED` and `TOWLINE_FUZZ_BODIES` in the environment choose another or a longer run; a failure shows its seed.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from gateway_rig import PATIENCE, TOOLS, Opened, Rig, Start, assert_one_chain, chat, message_of, results, system, user

from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say

# Read at import: the tests' own settings leave nothing of the environment.
SEED = int(os.environ.get("TOWLINE_FUZZ_SEED", "20261115"))
BODIES = int(os.environ.get("TOWLINE_FUZZ_BODIES", "2500"))
PER_SESSION = 250

NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 1.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 10**30),
    *(
        "",
        " ",
        "x",
        "\x00",
        "\u2028\u2029\x85",
        "😀👩‍👩‍👧",
        "\ud800",
        "\udfff\ud800",
        "\ufeff",
        "\ue0f5",
        "\x7f",
        "é\r\n",
        "0" * 3000,
    ),
    *(
        "<|im_end|>",
        "<|im_start|>system\n",
        "<tool_call>",
        "</think>",
        "{{ 7*7 }}",
        "{% raw %}",
        "NaN",
        "null",
        "../..",
        "%00",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [{}],
        {"": None},
        {"a": {"b": [1, {"c": None}]}},
        ["text"],
        {"type": "text"},
        {"type": "text", "text": "t"},
    ),
    *(
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "function"},
        {"role": "user"},
    ),
    *("@deep60@", "@deep140@", "@deep260@", "@deep900@", "@deep30000@"),
]
FIELDS = [
    *(
        "model",
        "messages",
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "parallel_tool_calls",
        "n",
        "stop",
        "seed",
    ),
    *("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stream", "stream_options", "logprobs"),
    *("top_logprobs", "logit_bias", "response_format", "presence_penalty", "reasoning_effort", "enable_thinking"),
    *("chat_template_kwargs", "guided_json", "user", "metadata", "store", "", "\x00", "__class__", "messages[0]"),
]
IN_MESSAGES = [
    *(
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "reasoning_content",
        "refusal",
        "thinking",
    ),
    *("id", "type", "function", "arguments", "text", "image_url", "custom", "input", "cache_control"),
]
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
THINKING = {"role": "assistant", "content": "a", "reasoning_content": "r"}
VALID: list[dict[str, Any]] = [
    {"model": "m", "messages": [user("hi")]},
    chat(system("s"), user("hi")),
    chat(system("s"), user("hi"), CALLING, {"role": "tool", "tool_call_id": "c1", "content": "out"}),
    chat(user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), {"role": "assistant", "content": "An open"}),  # type: ignore[arg-type]
    chat(user("hi"), stream=True, n=2, stop=["END"], max_tokens=20, stream_options={"include_usage": True}),
    chat(user("hi"), tool_choice={"type": "function", "function": {"name": "bash"}}, logprobs=True, temperature=0.5),
    chat(user("hi"), THINKING, user("go"), chat_template_kwargs={"enable_thinking": False}),
    {"model": "m", "messages": [user("hi")], "functions": [TOOLS[0]["function"]], "function_call": "auto"},
    chat({"role": "developer", "content": "d"}, user("hi"), response_format={"type": "json_object"}),
]  # fmt: skip


def say(request: Request) -> Say:
    turn = sum(message.role == "assistant" for message in request.messages)
    if request.messages[-1].text != "normal" and turn == 0:
        return Say("ok")
    return Say(f"step {turn}", "hm", [ToolCall("", "bash", {"command": f"{turn}"})] if turn < 3 else [])


def mutated(chance: random.Random) -> dict[str, Any]:
    return wounded(chance, chance.choice(VALID))


def wounded(chance: random.Random, valid: dict[str, Any]) -> dict[str, Any]:
    """A valid body with a few wounds."""
    body = copy.deepcopy(valid)
    for _ in range(chance.choice([0, 1, 1, 1, 2, 3, 6])):
        place, key = chance.choice(list(_places(body)))
        action = chance.random()
        if action < 0.5:
            place[key] = copy.deepcopy(chance.choice(NASTY))
        elif action < 0.65:
            del place[key]
        elif action < 0.8 and isinstance(place, dict):
            place[chance.choice(FIELDS if place is body else IN_MESSAGES)] = copy.deepcopy(chance.choice(NASTY))
        elif isinstance(place, list):
            place.insert(key, copy.deepcopy(chance.choice([*NASTY, *place])))
        else:
            place[key] = [copy.deepcopy(place[key])] * chance.randint(0, 3)
        if not body:
            break
    return body


def _places(value: Any) -> AsyncIterator[Any] | Any:
    """Every (container, key) in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def written(body: Any) -> bytes:
    """JSON, with nesting that no encoder writes."""
    text = json.dumps(body)
    for depth in (60, 140, 260, 900, 30000):
        text = text.replace(f'"@deep{depth}@"', "[" * depth + "]" * depth)
    return text.encode()


def broken(chance: random.Random) -> bytes:
    """No JSON object at all, or JSON with bytes changed."""
    kind = chance.randrange(5)
    data = bytearray(written(mutated(chance)))
    if kind == 0:
        return bytes(data[: chance.randrange(len(data))])
    if kind == 1:
        for _ in range(chance.randint(1, 5)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        return bytes(data)
    if kind == 2:
        return chance.randbytes(chance.randrange(200))
    if kind == 3:
        return written(chance.choice(NASTY))
    return b"\xef\xbb\xbf" + bytes(data) if chance.random() < 0.5 else bytes(data) + b" trailing"


async def normal_conversation(rig: Rig, session: Opened) -> None:
    """A tool loop, whole and streamed, that must work whatever was before."""
    messages = [system("calm"), user("normal")]
    for _ in range(4):
        status, body = await rig.post(session, chat(*messages))
        assert status == 200, body
        message = message_of(body)
        messages += [message, *results(message)]
        if not message.get("tool_calls"):
            messages.append(user("normal"))


async def test_bodies(start: Start) -> None:
    chance = random.Random(SEED)
    async with start(say, journal="os") as rig:
        bystander = await rig.open(id="bystander")
        counts = {"answered": 0, "refused": 0}
        for part in range(0, BODIES, PER_SESSION):
            session = await rig.open()
            gate = asyncio.Semaphore(8)
            turns = 0

            async def send(data: bytes, session: Opened = session, gate: asyncio.Semaphore = gate) -> int:
                async with gate, rig.web.post(session.chat, data=data, headers=session.headers) as response:
                    answer = await response.read()
                    said = f"seed {SEED}, body {data[:3000]!r}: {response.status} {answer[:500]!r}"
                    assert response.status == 200 or 400 <= response.status < 500, said
                    if response.status != 200:
                        assert json.loads(answer)["error"]["message"], said
                        counts["refused"] += 1
                        return 0
                    counts["answered"] += 1
                    assert b"[DONE]" in answer or b'"choices"' in answer, said
                    return int(json.loads(data).get("n") or 1)

            bodies = [
                broken(chance) if chance.random() < 0.15 else written(mutated(chance)) for _ in range(PER_SESSION)
            ]
            turns = sum(await asyncio.gather(*map(send, bodies)))
            await normal_conversation(rig, session)
            trajectory = await rig.seal(session)
            assert len(trajectory.turns) == turns + 4, f"seed {SEED}, part {part}"
            assert all(turn.delivered for turn in trajectory.turns)
            assert trajectory.report.trained_tokens == sum(
                len(turn.sampled) for turn in trajectory.turns if turn.role in trajectory.trained_roles
            )
        assert min(counts.values()) > BODIES // 10, counts
        assert (await rig.trajectory(bystander)).turns == []
        await normal_conversation(rig, bystander)
        assert_one_chain(await rig.seal(bystander), 4)


SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
ELSEWHERE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"model": "m", "input": "hi", "instructions": "be brief", "store": True}),
    (
        "/v1/responses",
        {
            "model": "m",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "out"},
            ],
            "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA}, {"type": "custom", "name": "patch"}],
            "stream": True,
        },
    ),
    ("/v1/responses/input_tokens", {"model": "m", "input": "hi"}),
    (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 100,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "out"}]},
            ],
            "tools": [{"name": "bash", "description": "Runs.", "input_schema": SCHEMA}],
            "stream": True,
        },
    ),
    ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [user("hi")], "stop_sequences": ["x"]}),
    ("/v1/messages/count_tokens", {"model": "m", "messages": [user("hi")]}),
    (
        "/v1beta/models/m:generateContent",
        {
            "contents": [
                {"role": "user", "parts": [{"text": "hi"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "bash", "args": {"command": "ls"}}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "bash", "response": {"out": 1}}}]},
            ],
            "systemInstruction": {"parts": [{"text": "s"}]},
            "tools": [{"functionDeclarations": [{"name": "bash", "parameters": SCHEMA}]}],
            "generationConfig": {"temperature": 1, "maxOutputTokens": 50, "thinkingConfig": {"includeThoughts": True}},
        },
    ),
    ("/v1beta/models/m:streamGenerateContent?alt=sse", {"contents": [{"parts": [{"text": "hi"}]}]}),
    ("/v1beta/models/m:countTokens", {"contents": [{"parts": [{"text": "hi"}]}]}),
]


async def test_bodies_of_other_dialects(start: Start) -> None:
    chance = random.Random(SEED + 1)
    async with start(say, journal="os") as rig:
        session = await rig.open()
        gate = asyncio.Semaphore(8)
        seen: dict[str, set[int]] = {}

        async def send(path: str, data: bytes) -> None:
            async with gate, rig.web.post(session.root + path, data=data, headers=session.headers) as response:
                answer = await response.read()
                said = f"seed {SEED}, {path}, body {data[:3000]!r}: {response.status} {answer[:500]!r}"
                assert response.status == 200 or 400 <= response.status < 500, said
                assert answer, said
                seen.setdefault(path, set()).add(response.status)

        for _ in range(max(1, BODIES // PER_SESSION)):
            await asyncio.gather(*(send(path, written(wounded(chance, body))) for path, body in ELSEWHERE * 10))
        assert all({200, 400} <= statuses for statuses in seen.values()), seen
        await normal_conversation(rig, session)
        trajectory = await rig.seal(session)
        assert all(turn.delivered for turn in trajectory.turns)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"policy": "as_sent"},
    {"policy": "template"},
    {"vanishing": "keep", "noise": ["step \\d"]},
    {"capture": "plain", "builder": "merged"},
    {"builder": "per_turn", "sampling": {"mode": "harness"}},
]


def wander(chance: random.Random, messages: list[dict[str, Any]]) -> None:
    """What a harness, or its user, might do to a history."""
    place = chance.randrange(len(messages))
    message = copy.deepcopy(messages[place])
    kind = chance.randrange(12)
    if kind == 0:
        del messages[place]
    elif kind == 1:
        messages.insert(chance.randrange(len(messages) + 1), message)
    elif kind == 2:
        chance.shuffle(messages)
    elif kind == 3:
        messages[place] = {
            **message,
            "content": chance.choice(["edited", "", None, [{"type": "text", "text": "part"}]]),
        }
    elif kind == 4:
        messages[place] = {name: value for name, value in message.items() if name != "reasoning_content"}
    elif kind == 5:
        messages.append(user(chance.choice(["more", "normal", "<|im_end|>", "😀"])))
    elif kind == 6:
        del messages[place + 1 :]
    elif kind == 7 and message.get("tool_calls"):
        for call in message["tool_calls"]:
            call["id"] = chance.choice(["", "same", call["id"].upper(), call["id"] + "-x"])
        messages[place] = message
    elif kind == 8 and message.get("tool_calls"):
        alone = {"role": "assistant", "content": message.pop("content", None) or "text of its own"}
        messages[place : place + 1] = [alone, message]
    elif kind == 9:
        messages.insert(0, system(chance.choice(["one", "two"])))
    elif kind == 10:
        messages[:] = [user("what happened so far: much"), *messages[-2:]]
    else:
        messages.append({"role": "assistant", "content": chance.choice(["An open", "", "step"])})
    if not messages:
        messages.append(user("from the beginning"))


async def test_walks(start: Start) -> None:
    """Conversations whose history is rewritten at every turn, under every policy: answered or refused, and each session
    gives a trajectory that holds."""
    async with start(say, journal="os") as rig:
        for number, settings in enumerate(SETTINGS * 2):
            chance = random.Random(SEED + number)
            session = await rig.open(settings=settings)
            messages = [user("normal")]
            answered = 0
            for step in range(40):
                body = chat(*messages, stream=chance.random() < 0.2, n=chance.choice([1, 1, 1, 2]))
                body["tools"] = chance.choice([TOOLS, TOOLS, TOOLS, TOOLS[:1], None])
                body["max_tokens"] = chance.choice([None, None, 5])
                async with rig.web.post(session.chat, json=body, headers=session.headers) as response:
                    data = await response.read()
                where = f"seed {SEED}, walk {number}, step {step}: {json.dumps(body)[:3000]} gave {data[:500]!r}"
                assert response.status in (200, 400), where
                if response.status == 200 and not body["stream"]:
                    answered += 1
                    message = message_of(json.loads(data))
                    messages += [message, *results(message, backwards=chance.random() < 0.5)]
                for _ in range(chance.choice([0, 0, 1, 1, 2]) if response.status == 200 else 2):
                    wander(chance, messages)
            await normal_conversation(rig, session)
            trajectory = await rig.seal(session)
            assert answered > 5, where
            trained = sum(len(turn.sampled) for turn in trajectory.turns if turn.role in trajectory.trained_roles)
            assert trajectory.report.trained_tokens == trained, where


async def exchange(session: Opened, data: bytes, *, end: bool = False) -> bytes:
    """Bytes on a connection of their own, and all that comes back until the answer is whole or the peer closes."""
    url = urlsplit(session.root)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(data)
    if end:
        writer.write_eof()
    answer = b""
    try:
        async with asyncio.timeout(PATIENCE):
            while not _whole(answer) and (more := await reader.read(65536)):
                answer += more
    except ConnectionError:
        pass
    writer.transport.abort()
    return answer


def _whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        return _whole(body)
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return bool(found) and len(body) >= int(line.split(b":")[1])
    return b"transfer-encoding: chunked" in head.lower() and body.endswith(b"0\r\n\r\n")


def status_of(answer: bytes) -> int:
    return int(answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").split()[1]) if answer else 0


async def test_requests_that_are_hardly_http(start: Start) -> None:
    """Odd methods, paths, lengths, headers. A connection that is closed without a word is an answer, too."""
    body = json.dumps(chat(user("hi"))).encode()
    length, chunks = b"content-length: %d" % len(body), b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)

    def post(
        path: str = "/v1/chat/completions", *headers: str, key: str = "KEY", data: bytes = body, more: str = ""
    ) -> bytes:
        lines = [
            f"POST {path} HTTP/1.1",
            "host: x",
            f"authorization: Bearer {key}",
            f"content-length: {len(data)}",
            *headers,
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + data + more.encode()

    async with start(say, journal="os") as rig:
        session, other = await rig.open(id="target"), await rig.open(id="other")

        def keyed(data: bytes) -> bytes:
            return data.replace(b"KEY", session.key.encode())

        fine = [
            post(),
            post("/chat/completions"),
            post("/v1/chat/completions?x=%00&=&&key=other&%ff"),
            post("http://elsewhere.example/v1/chat/completions"),
            post("/v1/chat/completions", "expect: 100-continue"),
            post("/v1/chat/completions", "connection: close"),
            post("/v1/chat/completions", "content-type: text/plain", "accept: nothing/at-all", "cookie: a=b; c"),
            post("/v1/chat/completions", *(f"x-{n}: {'v' * 100}" for n in range(200))),
            post("/v1/chat/completions", "x-stainless-retry-count: " + "9" * 5000, "idempotency-key: " + "k" * 5000),
            post("/v1/chat/completions", "x-session-id: a\x80\xffb", "x-request-id: \x09"),
            post().replace(b"HTTP/1.1", b"HTTP/1.0"),
            post().replace(b"Bearer ", b"bEaReR   "),
            post().replace(length, b"transfer-encoding: chunked").replace(body, chunks),
            post(key="", data=body).replace(b"authorization: Bearer ", b"x-api-key: KEY"),
            post(key="", data=body).replace(b"authorization: Bearer ", b"x-goog-api-key: KEY"),
            post("/v1/chat/completions?key=KEY").replace(b"authorization: Bearer KEY\r\n", b""),
            post("/s/KEY/v1/chat/completions").replace(b"authorization: Bearer KEY\r\n", b""),
            post("/s/KEY/v1/chat/completions", key="wrong"),
            post("/%73/KEY/v1/chat%2fcompletions", key="wrong"),
        ]  # fmt: skip
        for data in fine:
            answer = await exchange(session, keyed(data))
            assert status_of(answer) == 200, (data[:300], answer[:300])
        refused = [
            (401, post(key="wrong")),
            (401, post(key="")),
            (401, post(key=other.id)),
            (401, post("/v1/chat/completions?key=wrong").replace(b"authorization: Bearer KEY\r\n", b"")),
            (401, post("/s/wrong-key-in-path/v1/chat/completions")),
            (401, post().replace(b"authorization: Bearer", b"authorization: Basic")),
            (401, post(key="KEY\x00").replace(b"\x00", b"%00")),
            (404, post("/v1/chat/completions/")),
            (404, post("/V1/chat/completions")),
            (404, post("/s/KEY")),
            (404, post("/s//v1/chat/completions")),
            (404, post("/s/KEY/s/KEY/v1/chat/completions")),
            (404, post("//v1/chat/completions/../..")),
            (404, post("/v1/%00%0d%0aset-cookie:%20a")),
            (404, post("/v1/sessions")),
            (400, post(data=b"")),
            (400, post(data=b"null")),
            (400, post(data=b"{}")),
            (400, post(data=b'{"model": "m", "messages": [' + b"[" * 100_000)),
            # There is no HTTP/2 here, and the server in front of us takes what follows such headers for something else.
            (400, post("/v1/chat/completions", "connection: upgrade, http2-settings", "upgrade: h2c")),
            (400, post("/v1/chat/completions", "content-encoding: gzip", data=b"\x1f\x8b\x08" + b"\x00" * 40)),
            (400, post().replace(length, b"content-length: %d" % (len(body) - 7))),
            (400, post().replace(length, b"content-length: x")),
            (400, post().replace(length, b"content-length: -1")),
            (400, post("/v1/chat/completions", "content-length: 3")),
            (400, post("/v1/chat/completions", "transfer-encoding: chunked")),
            (400, post("/v1/chat/completions", "bad header line")),
            (400, post("/v1/chat/completions", "x: a\x00b")),
            (400, post("/v1/chat\xff/completions")),
            (400, b"\x16\x03\x01\x02\x00" + bytes(range(256))),
            (400, b"GET\r\n\r\n"),
            (413, post().replace(length, b"content-length: 99999999999")),
        ]
        for expected, data in refused:
            answer = await exchange(session, keyed(data))
            assert status_of(answer) == expected, (data[:300], answer[:300])
            assert b"set-cookie" not in answer.lower().split(b"\r\n\r\n")[0]
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "PROPFIND", "TRACE", "CONNECT"):
            data = keyed(post(data=b"").replace(b"POST", method.encode(), 1))
            # The answer to HEAD has no body, and a CONNECT is not for a path: the peer closes.
            answer = await exchange(session, data, end=method in ("HEAD", "CONNECT"))
            assert status_of(answer) in (400, 405), (method, answer[:200])
        # Not whole, and then gone: nobody is answered, nobody waits.
        for cut in (10, 60, 120, len(post()) - 5):
            assert status_of(await exchange(session, keyed(post())[:cut], end=True)) in (0, 400)
        # Two at once on one connection are answered one after the other.
        answer = await exchange(session, keyed(post() + post("/v1/chat/completions", "connection: close")), end=False)
        assert answer.count(b"HTTP/1.1 200") >= 1
        assert len(rig.engine.requests) >= len(fine) + 1

        assert (await rig.trajectory(other)).turns == []
        for one in (session, other):
            await normal_conversation(rig, one)
        assert_one_chain(await rig.seal(other), 4)
        assert all(turn.id.startswith("target-") for turn in (await rig.seal(session)).turns)


async def test_large_bodies(start: Start) -> None:
    """Up to the limit they are read, beyond it refused; text without end is refused as too long for the context."""
    async with start(say, journal="os") as rig:
        session = await rig.open()
        body, most = json.dumps(chat(user("hi"))).encode(), 64 * 2**20

        async def send(data: Any) -> tuple[int, str | None]:
            async with rig.web.post(session.chat, data=data, headers=session.headers) as response:
                answer = json.loads(await response.read())
                return response.status, answer.get("error", {}).get("code")

        async def pieces(size: int) -> AsyncIterator[bytes]:
            yield body
            for start in range(len(body), size, 2**20):
                yield b" " * min(2**20, size - start)

        assert await send(pieces(most)) == (200, None)
        assert await send(pieces(most + 1)) == (413, "request_too_large")
        assert await send(json.dumps(chat(user(" " * 2**20))).encode()) == (200, None)
        short = await rig.open(settings={"limits": {"context": 4096}})
        for text in ("a" * 2**20, "\u2028" * 2**18, "😀" * 2**18, "\x00" * 2**18, "word " * 2**18, "[" * 2**20):
            status, answer = await rig.post(short, chat(user(text)))
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), text[0]
        many = [user("x"), {"role": "assistant", "content": "y"}] * 3000
        assert (await rig.post(short, chat(*many, user("z"))))[1]["error"]["code"] == "context_length_exceeded"
        await normal_conversation(rig, session)


@pytest.mark.parametrize("operation", ["models", "model"])
async def test_other_operations(start: Start, operation: str) -> None:
    """What is asked with GET needs the key as well, and takes any name of a model."""
    async with start(say) as rig:
        session = await rig.open()
        paths = ["/v1/models"] if operation == "models" else ["/v1/models/a", "/v1/models/a/b:c", "/models/%00%7f😀"]
        for path in paths:
            async with rig.web.get(session.root + path) as response:
                assert response.status == 401
            async with rig.web.get(session.root + path, headers=session.headers, data=b"{") as response:
                assert response.status == 200, path
                assert await response.json()
