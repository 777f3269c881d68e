"""What engines behind HTTP share: the connection, the pause gate, the turns in flight, and the weight version.

A turn is read as a stream, token by token, into a `Flight`. Whatever ends it early leaves there what had arrived: an
abort returns it with `Finish.ABORT`, a server that is lost raises `EngineGone` with it. Giving a stream up closes its
connection, which is how the server learns that the turn is over.

Invariant: weights change only while nothing is in flight, so all tokens of a flight are of one version, unless the server
itself says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from towline.conversation import Finish
from towline.engines.base import ContextExceeded, EngineGone, EngineInfo, PauseMode, Sample, SampleRequest
from towline.engines.holds import Gate, Holds
from towline.engines.refusals import Refused, refusal
from towline.engines.validation import BadAnswer, check_sample, quote
from towline.errors import EngineError

TRUNCATED = "truncated_sampling"
_FIELDS = (b":", b"event", b"id", b"retry")
"""How the other lines of an event stream begin."""
_LINE = 2**24
"""The longest line of a stream, in bytes."""


@dataclass(slots=True)
class Stats:
    """Counters since the engine was made."""

    turns: int = 0
    decoded_tokens: int = 0
    aborted: int = 0


@dataclass(slots=True, eq=False)
class Flight:
    """A turn in flight and what has arrived of it; an engine's reader fills it in."""

    request: SampleRequest
    version: int
    """Of the weights, when it began."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """As many as ids if the server tells, else none."""
    finish: Finish | None = None
    prompt_tokens: int | None = None
    """As the server counted them."""
    cached_tokens: int = 0
    stop_string: str | None = None
    vocabulary: int = 0
    """How many ids there are to sample; 0 if that is not known."""
    task: asyncio.Task[None] | None = None

    def sample(self) -> Sample:
        """What there is; a turn that has not ended was aborted."""
        request = self.request
        versions = self.versions or [self.version] * len(self.ids)
        return Sample(
            ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(versions, np.int32),
            finish=self.finish or Finish.ABORT,
            prompt_tokens=len(request.prompt) if self.prompt_tokens is None else self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            stop_string=self.stop_string,
            flags=(TRUNCATED,) if request.top_p < 1.0 or request.top_k > 0 else (),
        )


class RemoteEngine:
    """Base of engines behind HTTP. One writes `start`, `_read` and, where weights can be replaced, `_push`."""

    def __init__(self, url: str, *, api_key: str = "", timeout: float = 3600.0, patience: float = 60.0):
        """
        `url`: where the server listens, with or without `/v1`.
        `timeout`: the longest that one turn or one weight update may take, in seconds.
        `patience`: the longest that any other call may take.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self.stats = Stats()
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=patience)
        self._patience = aiohttp.ClientTimeout(total=patience)
        self._http: aiohttp.ClientSession | None = None
        self._info: EngineInfo | None = None
        self._version = 0
        self._gate = Gate()
        self._held = False
        """Paused by a caller, and not only for an update."""
        self._updating = asyncio.Lock()
        self._flights: set[Flight] = set()
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError(f"the engine at {self.url} is not started: call start() first")
        return self._info

    @property
    def version(self) -> int:
        return self._version

    @property
    def holds(self) -> Holds:
        return self._gate.holds

    async def start(self) -> None:
        raise NotImplementedError

    async def sample(self, request: SampleRequest) -> Sample:
        self._check(request)
        with request.waiting():
            await self._gate.wait()
        flight = Flight(request, self._version, vocabulary=self.info.vocabulary)
        if self._limit(request) == 0:
            flight.finish = Finish.LENGTH
            return flight.sample()
        task = flight.task = asyncio.create_task(self._read(flight))
        self._flights.add(flight)
        try:
            await asyncio.wait((task,))
        finally:
            # Also when this call is cancelled: the stream is closed, and the server ends the turn.
            task.cancel()
            self._flights.discard(flight)
            self.stats.turns += 1
        return await self._landed(flight, task)

    async def _landed(self, flight: Flight, task: asyncio.Task[None]) -> Sample:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Refused) and error.status >= 500 and not await self.healthy():
            error = EngineGone(str(error))
        if error is None and flight.finish is None and not task.cancelled():
            error = EngineGone(f"{self.url} ended a turn in the middle")
        if isinstance(error, EngineGone):
            raise EngineGone(str(error), flight.sample() if flight.ids else None) from error
        if error is not None:
            raise error
        self.stats.aborted += flight.finish in (None, Finish.ABORT)
        return check_sample(flight.sample(), flight.request, flight.vocabulary)

    async def abort(self, ids: Sequence[str]) -> None:
        names = frozenset(ids)
        await self._give_up([flight for flight in self._flights if flight.request.id in names])

    async def _give_up(self, flights: Iterable[Flight]) -> None:
        tasks = [flight.task for flight in flights if flight.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        self._held = True
        await self._stop(mode, deadline)

    async def _stop(self, mode: PauseMode, deadline: float | None) -> None:
        """Close the gate and empty the air."""
        self._gate.clear()
        tasks = [flight.task for flight in self._flights if flight.task is not None]
        if mode is PauseMode.DRAIN and tasks:
            await asyncio.wait(tasks, timeout=deadline)
        await self._give_up(list(self._flights))

    async def resume(self, version: int | None = None) -> None:
        if version is not None:
            self._version = version
        self._held = False
        self._gate.set()

    async def ready(self) -> None:
        await self._gate.wait()

    async def update_weights(self, folder: Path, version: int) -> None:
        """Abort what is in flight, replace the weights and check them.

        An engine that a caller paused stays paused. One whose update fails does too, until another update or `resume`:
        nobody knows what it would sample from. What can be refused before anything is touched leaves it as it was.
        """
        async with self._updating:
            await self._vet(folder)
            await self._stop(PauseMode.ABORT, None)
            await self._push(folder, version)
            self._version = version
            if not self._held:
                await self.resume()

    async def close(self) -> None:
        await self._give_up(list(self._flights))
        self._closed = True
        if self._http is not None:
            await self._http.close()

    async def healthy(self) -> bool:
        """Whether `/health` says so."""
        try:
            await self._get("/health")
        except EngineError:
            return False
        return True

    async def _read(self, flight: Flight) -> None:
        """Ask the server for the turn and note what comes, until its end."""
        raise NotImplementedError

    async def _vet(self, folder: Path) -> None:
        """Raise `EngineError` for weights of which it is clear beforehand that they cannot be taken."""

    async def _push(self, folder: Path, version: int) -> None:
        """Replace the weights, while nothing is in flight."""
        raise EngineError(f"the weights of {self.url} cannot be replaced from here: pause, replace them there, resume")

    def _check(self, request: SampleRequest) -> None:
        """Refuse what no server could do, before it is asked."""
        length, context, vocabulary = len(request.prompt), self.info.context, self.info.vocabulary
        if length == 0:
            raise EngineError("the prompt is empty: at least one token is needed")
        if length > context:
            raise ContextExceeded(f"the prompt has {length} tokens, the context {context}")
        if request.max_tokens < 0:
            raise EngineError(f"max_tokens must not be negative, it is {request.max_tokens}")
        smallest, largest = int(np.min(request.prompt)), int(np.max(request.prompt))
        if smallest < 0 or (vocabulary and largest >= vocabulary):
            raise EngineError(f"the prompt has ids from {smallest} to {largest}, the vocabulary has {vocabulary} ids")

    def _limit(self, request: SampleRequest) -> int:
        """How many tokens the turn may have: what was asked, or what is left of the context."""
        return min(request.max_tokens, self.info.context - len(request.prompt))

    async def _get(self, path: str, *, long: bool = False) -> bytes:
        async with self._asked("GET", path, None, self._timeout if long else self._patience) as response:
            return await response.read()

    async def _post(self, path: str, body: Any = None, *, long: bool = False) -> bytes:
        async with self._asked("POST", path, body, self._timeout if long else self._patience) as response:
            return await response.read()

    async def _events(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream, up to `[DONE]`; an event that tells an error is raised."""
        async with self._asked("POST", path, body, self._timeout) as response:
            async for line in self._lines(response):
                if not line.startswith(b"data:"):
                    if line.strip() and not line.startswith(_FIELDS):
                        raise BadAnswer(f"{self.url}{path} sent no event stream; it begins: {quote(line)}")
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = decoded(data, f"{self.url}{path}")
                if error := event.get("error"):
                    code = error.get("code") if isinstance(error, Mapping) else None
                    raise refusal(f"{self.url}{path}", code if isinstance(code, int) else 500, data)
                yield event

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        lines = response.content
        while True:
            try:
                line = await lines.readline()
            except ValueError as error:
                raise BadAnswer(f"{response.url} sent a line of more than {_LINE} bytes") from error
            if not line:
                return
            yield line

    @contextlib.asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: Any, limit: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200. Others are `Refused`; a server that cannot be reached is `EngineGone`."""
        url = f"{self.url}{path}"
        data = None if body is None else orjson.dumps(body)
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            async with self._client().request(method, url, data=data, headers=headers, timeout=limit) as response:
                if response.status != 200:
                    raise refusal(url, response.status, await response.read())
                yield response
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineGone(f"{url}: {error or type(error).__name__}") from error

    def _client(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineError(f"the engine at {self.url} is closed")
        if self._http is None:
            # A connection each: one that the server has just closed for being idle would look like a server that is gone.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._http = aiohttp.ClientSession(connector=connector, headers=self._headers, read_bufsize=_LINE)
        return self._http


def decoded(data: bytes, url: str) -> dict[str, Any]:
    """A JSON object that a server sent."""
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadAnswer(f"{url} answered no JSON: {error}; it begins: {quote(data)}") from error
    if not isinstance(answer, dict):
        raise BadAnswer(f"{url} answered no JSON object; it begins: {quote(data)}")
    return answer
