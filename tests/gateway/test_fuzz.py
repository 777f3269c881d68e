"""Whatever is sent to the provider routes, the answer is a reply or a 4xx that says what is wrong: never a 5xx, a hang,
or a turn of another session. Afterwards the same gateway works as before.

`TOWLINE_FUZZ_SEED` and `TOWLINE_FUZZ_BODIES` in the environment choose another or a longer run; a failure shows its seed.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from support.gateway.fuzz_bodies import VOCABULARIES, body_of, broken, wounded, written
from support.gateway.gateway_rig import (
    PATIENCE,
    TOOLS,
    Opened,
    Rig,
    Start,
    assert_one_chain,
    chat,
    message_of,
    results,
    system,
    user,
)
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say
from towline.tokens.codec import ModelCodec

# Read at import: the tests' own settings leave nothing of the environment.
SEED = int(os.environ.get("TOWLINE_FUZZ_SEED", "20261115"))
BODIES = int(os.environ.get("TOWLINE_FUZZ_BODIES", "3000"))
PER_SESSION = 500
MARK = re.compile(r"mark-\d+-\d-")


def say(request: Request) -> Say:
    turn = sum(message.role == "assistant" for message in request.messages)
    if request.messages[-1].text != "normal" and turn == 0:
        return Say("ok")
    return Say(f"step {turn}", "hm", [ToolCall("", "bash", {"command": f"{turn}"})] if turn < 3 else [])


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


@dataclass
class Harness:
    """One session, with the mark that is in all it says and what it has seen of its own."""

    session: Opened
    mark: str
    answers: list[str] = field(default_factory=list)
    """Ids of answers that may be stored."""
    turns: int = 0


def marked(request: Request) -> Say:
    """Says whose request it is."""
    if request.messages[-1].text == "normal" or request.messages[0].text == "calm":
        return say(request)
    found = MARK.search(" ".join(message.text for message in request.messages))
    return Say(f"for {found.group() if found else 'nobody'}", "hm")


def with_key(chance: random.Random, key: str, path: str) -> tuple[str, dict[str, str]]:
    """The path and the headers, with the key in one of its places."""
    place = chance.randrange(5)
    if place == 0:
        return f"{path}{'&' if '?' in path else '?'}key={key}", {}
    if place == 1:
        return f"/s/{key}{path}", {}
    name = ("authorization", "x-api-key", "x-goog-api-key")[place - 2]
    return path, {name: f"Bearer {key}" if place == 2 else key}


def check_error(dialect: str, status: int, answer: bytes) -> bool:
    """Whether it is an error as the dialect's clients read it."""
    body = json.loads(answer)
    error = body["error"]
    if not 400 <= status < 500 or not error["message"]:
        return False
    if dialect == "messages":
        return bool(body["type"] == "error" and error["type"])
    return error["code"] == status if dialect == "google" else "param" in error


def choices(dialect: str, answer: bytes) -> int:
    """How many replies are in an answer, whole or streamed; none if it is an error in a stream."""
    events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    parts = events or json.loads(answer)
    name = {"chat": "choices", "google": "candidates"}.get(dialect)
    if name:
        indices = {choice["index"] for part in (parts if isinstance(parts, list) else [parts]) for choice in part[name]}
        return len(indices)
    if not events:
        return int(parts.get("status", "completed") in ("completed", "incomplete"))
    return int(events[-1]["type"] in ("message_stop", "response.completed", "response.incomplete"))


async def generate(rig: Rig, chance: random.Random, harness: Harness, counts: Counter[str]) -> None:
    """One body to one of the endpoints that take bodies."""
    dialect = chance.choice(list(VOCABULARIES))
    words = VOCABULARIES[dialect]
    counting = bool(words.count) and chance.random() < 0.15
    path = words.count if counting else chance.choice(words.generate)
    body = body_of(chance, words, harness.mark)
    if dialect == "responses" and harness.answers and chance.random() < 0.3:
        body["previous_response_id"] = chance.choice(harness.answers)
    body = wounded(chance, body, words)
    data = broken(chance, body) if chance.random() < 0.1 else written(body)
    stranger = chance.random() < 0.03
    counts[f"POST {path}"] += 1
    path, headers = with_key(chance, "tl-nobody-has-this-key" if stranger else harness.session.key, path)
    async with rig.web.post(harness.session.root + path, data=data, headers=headers) as response:
        answer, status = await response.read(), response.status
    said = f"seed {SEED}, {path.replace(harness.session.key, 'KEY')}, body {data[:3000]!r}: {status} {answer[:500]!r}"
    assert {found for found in MARK.findall(answer.decode())} <= {harness.mark}, said
    if status != 200:
        assert check_error(dialect, status, answer), said
        assert stranger == (status == 401), said
        counts[f"{dialect} refused"] += 1
        return
    assert not stranger, said
    counts[f"{dialect} {'counted' if counting else 'answered'}"] += 1
    if not counting:
        made = choices(dialect, answer)
        assert made, said
        harness.turns += made
        if dialect == "responses":
            harness.answers += re.findall(r'"id":"(resp_[0-9a-f]+)"', answer.decode())[:1]


async def look(rig: Rig, chance: random.Random, harness: Harness, other: Harness, counts: Counter[str]) -> None:
    """One request without a body: models, probes, answers that are stored or not, paths and methods that are not there."""
    kind = chance.choice(["models", "model", "probe", "upgrade", "stored", "foreign", "delete", "nowhere", "method"])
    method, expected = "GET", {200}
    if kind == "models":
        path = chance.choice(["/v1/models", "/models", "/v1beta/models", "/v1alpha/models"])
    elif kind == "model":
        name = chance.choice(["a", "a/b:c", "%00%7f", "😀", "claude-9", "..%2f..", "x" * 500])
        path = chance.choice(["/v1/models/", "/v1beta/models/"]) + name
    elif kind == "probe":
        method, path = chance.choice([("HEAD", "/"), ("HEAD", "/api/hello"), ("GET", "/api/hello")])
    elif kind == "upgrade":
        path, expected = "/v1/responses", {426}
    elif kind in ("stored", "delete"):
        method = "GET" if kind == "stored" else "DELETE"
        path = f"/v1/responses/{chance.choice([*harness.answers, 'resp_', '%00', 'resp_0a'])}"
        path += chance.choice(["", "?stream=true", "?stream=true&starting_after=2", "?include=x"])
        expected = {200, 404}
    elif kind == "foreign":
        path, expected = f"/v1/responses/{chance.choice([*other.answers, 'resp_1'])}", {404}
    elif kind == "nowhere":
        method = chance.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
        path, expected = chance.choice(["/v1/embeddings", "/v2/x", "/v1/files/a", "/v1/messages/batches/"]), {404}
    else:
        words = VOCABULARIES[chance.choice(["chat", "messages"])]
        method, path, expected = chance.choice(["PUT", "DELETE", "PATCH", "GET"]), words.generate[0], {405}
    path, headers = with_key(chance, harness.session.key, path)
    headers |= chance.choice([{}, {"anthropic-version": "2023-06-01"}, {"x-goog-api-client": "x"}])
    data = chance.choice([None, None, b"{", b"\xff" * 100])
    async with rig.web.request(method, harness.session.root + path, data=data, headers=headers) as response:
        answer, status = await response.read(), response.status
    said = f"seed {SEED}, {method} {path.replace(harness.session.key, 'KEY')}: {status} {answer[:500]!r}"
    assert status in expected, said
    assert {found for found in MARK.findall(answer.decode())} <= {harness.mark}, said
    if status in (404, 405) and method != "HEAD":
        assert json.loads(answer)["error"]["message"], said
    counts[kind] += 1


async def test_every_endpoint(start: Start, codec: ModelCodec) -> None:
    """Thousands of requests in all dialects, from several sessions at once, with the key in every place."""
    chance = random.Random(SEED)
    counts: Counter[str] = Counter()
    async with start(marked, journal="os") as rig:
        bystander = await rig.open(id="bystander")
        gate = asyncio.Semaphore(8)

        async def one(harness: Harness, other: Harness, seed: int) -> None:
            async with gate:
                lot = random.Random(seed)
                if lot.random() < 0.2:
                    await look(rig, lot, harness, other, counts)
                else:
                    await generate(rig, lot, harness, counts)

        for part in range(0, BODIES, PER_SESSION):
            group = [Harness(await rig.open(), f"mark-{part}-{place}-") for place in range(4)]
            pairs = [chance.sample(group, 2) for _ in range(PER_SESSION)]
            await asyncio.gather(*(one(harness, other, chance.getrandbits(64)) for harness, other in pairs))
            for harness in group:
                await normal_conversation(rig, harness.session)
                trajectory = await rig.seal(harness.session)
                assert len(trajectory.turns) == harness.turns + 4, f"seed {SEED}, part {part}"
                assert all(turn.delivered for turn in trajectory.turns)
                said = codec.tokenizer.decode(np.concatenate([turn.suffix for turn in trajectory.turns]).tolist())
                assert set(MARK.findall(said)) <= {harness.mark}, f"seed {SEED}, part {part}"
                assert trajectory.report.trained_tokens == sum(
                    len(turn.sampled) for turn in trajectory.turns if turn.role in trajectory.trained_roles
                )
        for dialect in VOCABULARIES:
            answered, refused = counts[f"{dialect} answered"], counts[f"{dialect} refused"]
            assert min(answered, refused) > BODIES // 50, counts
        paths = {path for words in VOCABULARIES.values() for path in (*words.generate, words.count) if path}
        assert min(counts[f"POST {path}"] for path in paths) > BODIES // 100, counts
        print(f"{BODIES} requests: {dict(sorted(counts.items()))}")
        assert (await rig.trajectory(bystander)).turns == []
        await normal_conversation(rig, bystander)
        assert_one_chain(await rig.seal(bystander), 4)


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
        # Incomplete, then disconnected: nothing is answered, nothing waits.
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
