"""kill -9 at named points and at random: what a client received is there afterwards, once, and sessions continue.

The clients are agents that know nothing of crashes: they send the request again that got no answer.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.gateway.gateway_process import CONTROL_KEY, Nursery, Process
from support.gateway.gateway_rig import (
    assemble,
    assert_one_chain,
    chat,
    message_of,
    results,
    sampled,
    says,
    system,
    user,
)
from towline.gateway.journal import replay
from towline.schema import Trajectory
from towline.tokens.codec import ModelCodec

CONTROL = {"authorization": f"Bearer {CONTROL_KEY}"}
POINTS = [
    "gateway.before_journal:7",
    "gateway.after_journal:6",
    "gateway.before_reply:5",
    "gateway.after_reply:4",
    "journal.before_write:9",
    "journal.after_write:8",
    "journal.after_sync:7",
    "journal.recover_renamed",
    "journal.create_renamed",
]
"""The last two are reached while the journal is opened, so that it does not come to listen at all."""


class Lost(Exception):
    """The connection ended before the whole answer was there."""


@pytest.fixture(scope="module")
def nursery(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(assets / "tokenizers" / "qwen3", tmp_path_factory.mktemp("processes"))
    yield nursery
    nursery.close()


@pytest.fixture
async def web() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


class Agent:
    """One session's harness."""

    def __init__(self, number: int, made: dict[str, Any]):
        self.id, self.key = made["id"], made["key"]
        self.stream = number % 2 == 0
        self.messages = [system("Be brief."), user("begin")]
        self.received: list[Any] = []
        self.owed: dict[str, Any] | None = None
        """The reply that a crash left in the journal; the next answer must be that one."""

    async def turn(self, web: aiohttp.ClientSession, process: Process) -> None:
        message = await self._ask(web, process)
        if self.owed is not None:
            assert (message.get("content") or "") == self.owed["text"]
            ids = [call["id"] for call in message.get("tool_calls", [])]
            assert ids == [call["id"] for call in self.owed.get("tool_calls", [])]
            self.owed = None
        self.received.append(says(message))
        self.messages += [message, *results(message)]
        if not message.get("tool_calls"):
            self.messages.append(user("go on"))

    async def _ask(self, web: aiohttp.ClientSession, process: Process) -> dict[str, Any]:
        url = f"{process.base_url}/v1/chat/completions"
        body = chat(*self.messages, stream=self.stream)
        try:
            async with web.post(url, json=body, headers={"authorization": f"Bearer {self.key}"}) as response:
                data = await response.read()
                assert response.status == 200, data
        except aiohttp.ClientError as error:
            raise Lost from error
        if not self.stream:
            return message_of(json.loads(data))
        if not data.endswith(b"data: [DONE]\n\n"):
            raise Lost
        events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ") and b"[DONE]" not in line]
        return assemble([json.loads(event) for event in events])

    async def until_lost(self, web: aiohttp.ClientSession, process: Process) -> None:
        for _ in range(200):
            try:
                await self.turn(web, process)
            except Lost:
                return
        raise AssertionError("the gateway did not crash")

    def look(self, data: Path) -> None:
        """What the journal holds after a crash: everything that was received, and at most one turn more."""
        turns = [r.fields for r in replay(data / "journal") if r.kind == "turn" and r.fields["session"] == self.id]
        assert len({turn["id"] for turn in turns}) == len(turns)
        assert len(turns) - len(self.received) in (0, 1)
        texts = [turn["reply"]["text"] for turn in turns]
        assert texts[: len(self.received)] == [text for text, _, _ in self.received]
        self.owed = turns[-1]["reply"] if len(turns) > len(self.received) else None


async def control(web: aiohttp.ClientSession, process: Process, method: str, path: str, body: Any = None) -> bytes:
    async with web.request(method, process.control_url + path, json=body, headers=CONTROL) as response:
        data = await response.read()
        assert response.status in (200, 201), data
        return data


async def started(nursery: Nursery, data: Path, crash_at: str = "") -> Process:
    process = nursery.start(data, crash_at)
    assert await process.listening(), process.log.read_text()
    return process


async def employed(web: aiohttp.ClientSession, process: Process, count: int) -> list[Agent]:
    return [Agent(n, json.loads(await control(web, process, "POST", "/v1/sessions", {}))) for n in range(count)]


async def finish(web: aiohttp.ClientSession, process: Process, agents: list[Agent], codec: ModelCodec) -> None:
    """Two turns more, then every session is one exact chain of what its agent received, and of nothing else."""
    for _ in range(2):
        await asyncio.gather(*(agent.turn(web, process) for agent in agents))
    for agent in agents:
        await control(web, process, "DELETE", f"/v1/sessions/{agent.id}")
        data = await control(web, process, "GET", f"/v1/sessions/{agent.id}/trajectory")
        trajectory = Trajectory.from_json(data)
        assert_one_chain(trajectory, len(agent.received))
        turns = [sampled(codec, trajectory, turn.index) for turn in trajectory.turns]
        assert turns == agent.received
        assert len({json.dumps(turn) for turn in turns}) == len(turns)
        assert {turn[1] for turn in turns} == {f"for {agent.id}"}


async def test_named_points(nursery: Nursery, web: aiohttp.ClientSession, codec: ModelCodec, tmp_path: Path) -> None:
    """One data folder and the same sessions through one crash after the other."""
    process = await started(nursery, tmp_path)
    agents = await employed(web, process, 3)
    process.kill()
    owed = 0
    for point in POINTS:
        await process.dead()
        process = nursery.start(tmp_path, point)
        if await process.listening():
            await asyncio.gather(*(agent.until_lost(web, process) for agent in agents))
        await process.dead()
        for agent in agents:
            agent.look(tmp_path)
            owed += agent.owed is not None
    process = await started(nursery, tmp_path)
    await finish(web, process, agents, codec)
    process.kill()
    assert owed >= 3  # the points between journal and reply left something to be asked for again
    assert min(len(agent.received) for agent in agents) > len(POINTS)


async def test_random_moments(nursery: Nursery, web: aiohttp.ClientSession, codec: ModelCodec, tmp_path: Path) -> None:
    """Under the load of several sessions at once."""
    process = await started(nursery, tmp_path)
    agents = await employed(web, process, 6)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    for _ in range(8):
        working = [asyncio.create_task(agent.until_lost(web, process)) for agent in agents]
        await asyncio.sleep(moments.uniform(0.05, 0.4))
        process.kill()
        await asyncio.gather(*working)
        await process.dead()
        for agent in agents:
            agent.look(tmp_path)
        process = await started(nursery, tmp_path)
    await finish(web, process, agents, codec)
    process.kill()


async def test_sealing(nursery: Nursery, web: aiohttp.ClientSession, codec: ModelCodec, tmp_path: Path) -> None:
    """A crash on the way leaves the session open or sealed, never both and never half: sealing again is sealing."""
    process = await started(nursery, tmp_path)
    agents = await employed(web, process, 3)
    for agent in agents:
        await agent.turn(web, process)
        await agent.turn(web, process)
    process.kill()
    await process.dead()
    (tmp_path / "trajectories" / f".{agents[0].id}.arrow.0123.tmp").write_bytes(b"half a file")
    for agent, point in zip(
        agents, ("journal.before_write", "gateway.before_sealed", "gateway.after_sealed"), strict=True
    ):
        process = await started(nursery, tmp_path, point)
        with pytest.raises(aiohttp.ClientError):
            await control(web, process, "DELETE", f"/v1/sessions/{agent.id}")
        await process.dead()
        assert (tmp_path / "trajectories" / f"{agent.id}.arrow").exists()
    written = [Trajectory.read(tmp_path / "trajectories" / f"{agent.id}.arrow") for agent in agents]
    for _ in range(2):
        process = await started(nursery, tmp_path)
        for agent, expected in zip(agents, written, strict=True):
            headers = {"authorization": f"Bearer {agent.key}"}
            async with web.get(process.base_url + "/v1/models", headers=headers) as response:
                assert response.status == 401
            report = json.loads(await control(web, process, "DELETE", f"/v1/sessions/{agent.id}"))["report"]
            assert report["turns"] == 2
            data = await control(web, process, "GET", f"/v1/sessions/{agent.id}/trajectory")
            assert Trajectory.from_json(data) == expected
            assert [sampled(codec, expected, index) for index in range(2)] == agent.received
        process.kill()
        await process.dead()
        assert sorted(path.name for path in (tmp_path / "trajectories").iterdir()) == sorted(
            f"{agent.id}.arrow" for agent in agents
        )


async def test_secrets_stay_secret(nursery: Nursery, web: aiohttp.ClientSession, tmp_path: Path) -> None:
    """No key is in a log, the journal or a data file, whatever way it was given and whatever went wrong."""
    data = tmp_path / "data"
    process = await started(nursery, data)
    agents = await employed(web, process, 2)
    for agent in agents:
        await agent.turn(web, process)
    key, base = agents[0].key, process.base_url
    places: list[tuple[str, dict[str, str]]] = [
        ("/v1/chat/completions", {"authorization": f"Bearer {key}"}),
        ("/v1/chat/completions", {"x-api-key": key}),
        ("/v1/chat/completions", {"x-goog-api-key": key}),
        (f"/v1/chat/completions?key={key}", {}),
        (f"/s/{key}/v1/chat/completions", {}),
        (f"/s/{key}/nowhere", {}),
        (f"/nowhere/{key}?key={key}", {"authorization": f"Bearer {key}"}),
        (f"/s/{key[:-1]}/v1/models", {}),
        ("/v1/chat/completions", {"authorization": f"Bearer {CONTROL_KEY}"}),
        (f"/v1/chat/completions?key={CONTROL_KEY}", {}),
    ]
    bodies: list[bytes] = [json.dumps(chat(user("hi"), n=n)).encode() for n in (1, 0)] + [b"{", b"", b"\xff"]
    statuses = set()
    for path, headers in places:
        for body in bodies:
            for method in ("POST", "GET", "DELETE"):
                async with web.request(method, base + path, data=body, headers=headers) as response:
                    statuses.add(response.status)
                    assert key not in await response.text() or "nowhere" in path
    assert statuses >= {200, 400, 401, 404, 405}
    assert max(statuses) < 500
    unforeseen = chat(user("break"))
    for path, headers in places[:5]:
        async with web.post(base + path, json=unforeseen, headers=headers) as response:
            assert response.status == 500
    reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rsplit(":", 1)[1]))
    writer.write(f"POST /s/{key}/v1 HTTP/9.9\r\nauthorization: Bearer {key}\r\n\r\n{key}".encode())
    assert b"400" in await reader.read()
    writer.close()
    for agent in agents:
        await control(web, process, "DELETE", f"/v1/sessions/{agent.id}")
    trajectory = await control(web, process, "GET", f"/v1/sessions/{agents[0].id}/trajectory")
    process.kill()
    await process.dead()
    files = [path for path in data.rglob("*") if path.is_file()]
    assert any(path.suffix == ".arrow" for path in files)
    assert any(path.suffix == ".seg" for path in files)
    contents = {path.name: path.read_bytes() for path in [*files, process.log]} | {"trajectory": trajectory}
    assert contents[process.log.name].count(b"this was not foreseen") >= 5
    for secret in (*(agent.key for agent in agents), CONTROL_KEY):
        for name, content in contents.items():
            assert secret.encode() not in content, name
