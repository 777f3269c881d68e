"""What engines behind HTTP share: the connection, the pause gate, the turns in flight, and the policy version.

`HttpEngine` is the part that every such engine has; `RemoteEngine` adds what servers share that take token ids. A turn is
read as a stream, token by token, into an `ActiveTurn`. Whatever ends it early leaves there what had arrived: an abort
returns it with `Finish.ABORT`, a lost server raises `EngineUnreachable` with it. Cancelling a stream closes its
connection, which is how the server learns that the turn is over.

Invariant: weights that are pushed from here change only while nothing is in flight. A trainer may replace them by its own
means at any time: then the labels that the server reports tell each token's version (`labelled.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from towline.conversation import Finish
from towline.engines.base import (
    TRUNCATED,
    ContextExceeded,
    EngineInfo,
    EngineUnreachable,
    PauseMode,
    Sample,
    SampleRequest,
)
from towline.engines.stalls import PauseGate, PauseState
from towline.engines.validation import InvalidResponse, check_sample, excerpt
from towline.engines.version_stamp import stamp_versions
from towline.engines.weight_labels import MIXED_CACHE, mixed_cache_tokens
from towline.errors import EngineError

_MAX_LINE = 2**24
"""The longest line of a stream, in bytes."""
_OTHER_FIELDS = (b":", b"event", b"id", b"retry")
"""How the lines of an event stream begin that carry no data."""
_UNREACHABLE = frozenset({502, 503, 504})
"""Statuses of a server that is shutting down, or of a proxy that has lost it."""
_TOO_LONG = re.compile(
    r"context_length_exceeded|exceed_context_size|maximum context length|max_model_len|string_above_max_length|"
    r"longer than the (?:model|maximum|context)|exceeds? the (?:available |maximum |model'?s? )*context|"
    r"(?:prompt|input) is too long|too many (?:prompt|input) tokens|reduce the length of the (?:messages|prompt|input)",
    re.IGNORECASE,
)
"""How vLLM, SGLang, llama.cpp, TGI and OpenAI-compatible providers refuse a prompt that does not fit."""
_CONTEXT = re.compile(r"maximum context length (?:is|of) (\d+)|n_ctx\W+(\d+)|context size \((\d+)", re.IGNORECASE)
_PROMPT = re.compile(
    r"\((\d+) in the (?:messages|prompt)|has (?:at least )?(\d+) input tokens|resulted in (\d+) tokens|"
    r"n_prompt_tokens\W+(\d+)|request \((\d+) tokens",
    re.IGNORECASE,
)
"""Where such a refusal gives the length of the context, and that of the prompt."""
_REFUSALS = ("context_length_exceeded", "string_above_max_length", "invalid_prompt", "invalid_request_error")
"""Error codes of OpenAI that blame the request; any other name is the server's failure."""
_SHOWN = 400
"""Bytes of a refusal that an error quotes."""


class HttpStatusError(EngineError):
    """The server responded with a status other than 200."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def status_error(url: str, status: int, data: bytes) -> EngineError:
    """The error for a response with this status; it quotes the response."""
    shown = " ".join(data[:_SHOWN].decode("utf-8", "replace").split())
    message = f"{url} answered {status}: {shown}"
    if status in _UNREACHABLE:
        return EngineUnreachable(message)
    if 400 <= status < 500 and status != 429 and _TOO_LONG.search(shown):
        return ContextExceeded(message)
    return HttpStatusError(message, status)


def event_error(url: str, event: Mapping[str, Any], data: bytes) -> EngineError | None:
    """The error that an event of a stream reports; None if it reports none."""
    error = event.get("error") or (event if event.get("object") == "error" else None)
    if not error:
        return None
    code = error.get("code") if isinstance(error, Mapping) else None
    if isinstance(code, str):
        code = int(code) if code.isascii() and code.isdecimal() else 400 if code in _REFUSALS else 500
    return status_error(url, code if isinstance(code, int) else 500, data)


def remaining_tokens(refused: ContextExceeded) -> int | None:
    """How many tokens fit after the prompt, according to the refusal; None if it does not say."""
    context, prompt = (found.search(str(refused)) for found in (_CONTEXT, _PROMPT))
    if context is None or prompt is None:
        return None
    return int(next(filter(None, context.groups()))) - int(next(filter(None, prompt.groups())))


def parse_json(data: bytes, url: str) -> dict[str, Any]:
    """A JSON object that a server sent."""
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidResponse(f"{url}: the response is not JSON ({error}); it begins: {excerpt(data)}") from error
    if not isinstance(answer, dict):
        raise InvalidResponse(f"{url}: the response is not a JSON object; it begins: {excerpt(data)}")
    return answer


@dataclass(slots=True)
class RemoteStats:
    """Counters since the engine was created."""

    turns: int = 0
    decoded_tokens: int = 0
    aborted: int = 0


@dataclass(slots=True, eq=False)
class ActiveTurn:
    """A turn in flight and what has arrived of it; the engine's reader fills it in."""

    request: SampleRequest
    version: int
    """Policy version of the weights when the turn began, and of the prefix cache that it may read."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """One per id if the server reports them, else empty."""
    finish: Finish | None = None
    prompt_tokens: int | None = None
    """Number of prompt tokens, as the server counted them."""
    cached_tokens: int = 0
    stop_string: str | None = None
    flags: tuple[str, ...] = ()
    vocabulary: int = 0
    """Size of the vocabulary; 0 if unknown."""
    task: asyncio.Task[Any] | None = None

    def drop(self) -> None:
        """Forget what has arrived: it comes from other weights than those that were expected."""
        self.ids.clear()
        self.logprobs.clear()
        self.versions.clear()

    def stamp(self, versions: Sequence[int]) -> None:
        """Note the versions of tokens that have just arrived."""
        if len(self.versions) + len(versions) == len(self.ids):
            self.versions += versions

    def sample(self) -> Sample:
        """What has arrived, each token stamped with its policy version; a turn that has not ended was aborted."""
        request = self.request
        versions = stamp_versions(len(self.ids), self.version, self.versions)
        mixed = mixed_cache_tokens(versions, self.version, self.cached_tokens)
        truncated = request.top_p < 1.0 or request.top_k > 0
        return Sample(
            ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=versions,
            finish=self.finish or Finish.ABORT,
            prompt_tokens=len(request.prompt) if self.prompt_tokens is None else self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            mixed_cache=mixed,
            stop_string=self.stop_string,
            flags=((TRUNCATED,) if truncated else ()) + ((MIXED_CACHE,) if mixed else ()) + self.flags,
        )


class HttpEngine:
    """One server: requests to it, the pause gate and the turns in flight."""

    _encode: Callable[[Any], bytes] = staticmethod(orjson.dumps)
    _keep_alive = False
    """By default one connection per request: one that the server has just closed as idle would look like a dead server."""

    def __init__(self, url: str, headers: Mapping[str, str], turn_timeout: aiohttp.ClientTimeout):
        self.url = url
        self._headers = dict(headers)
        self._turn_timeout = turn_timeout
        self._http: aiohttp.ClientSession | None = None
        self._info: EngineInfo | None = None
        self._version = 0
        self._gate = PauseGate()
        self._paused_by_caller = False
        """As opposed to paused for a weight update."""
        self._active: set[ActiveTurn] = set()
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
    def pauses(self) -> PauseState:
        return self._gate.pauses

    async def abort(self, ids: Sequence[str]) -> None:
        names = frozenset(ids)
        await self._cancel([turn for turn in self._active if turn.request.id in names])

    async def _cancel(self, turns: Iterable[ActiveTurn]) -> None:
        tasks = [turn.task for turn in turns if turn.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        self._paused_by_caller = True
        await self._stop(mode, deadline)

    async def _stop(self, mode: PauseMode, deadline: float | None) -> None:
        """Close the gate and end every turn in flight."""
        self._gate.clear()
        tasks = [turn.task for turn in self._active if turn.task is not None]
        if mode is PauseMode.DRAIN and tasks:
            await asyncio.wait(tasks, timeout=deadline)
        await self._cancel(list(self._active))

    async def resume(self, version: int | None = None) -> None:
        if version is not None:
            self._version = version
        self._paused_by_caller = False
        self._gate.set()

    async def ready(self) -> None:
        await self._gate.wait()

    async def close(self) -> None:
        await self._cancel(list(self._active))
        self._closed = True
        if self._http is not None:
            await self._http.close()

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Any, limit: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with status 200; raises `HttpStatusError` for others, `EngineUnreachable` if the server is lost."""
        url = f"{self.url}{path}"
        data = None if body is None else self._encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            async with self._client().request(method, url, data=data, headers=headers, timeout=limit) as response:
                if response.status != 200:
                    raise status_error(url, response.status, await response.read())
                yield response
        except TimeoutError as error:
            raise self._timeout_error(url, error) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineUnreachable(f"{url}: {error or type(error).__name__}") from error

    def _timeout_error(self, url: str, error: TimeoutError) -> EngineError:
        return EngineUnreachable(f"{url}: {error or type(error).__name__}")

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        while True:
            try:
                line = await response.content.readline()
            except ValueError as error:
                raise InvalidResponse(f"{response.url} sent a line of more than {_MAX_LINE} bytes") from error
            if not line:
                return
            yield line

    def _client(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineError(f"the engine at {self.url} is closed")
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=not self._keep_alive)
            self._http = aiohttp.ClientSession(connector=connector, headers=self._headers, read_bufsize=_MAX_LINE)
        return self._http


class RemoteEngine(HttpEngine, ABC):
    """Base of servers that take token ids. Subclasses write `start`, `_read` and, where weights can be replaced,
    `_load_weights`."""

    def __init__(self, url: str, *, api_key: str = "", timeout: float = 3600.0, patience: float = 60.0):
        """
        `url`: where the server listens, with or without `/v1`.
        `timeout`: limit of one turn or one weight update, in seconds.
        `patience`: limit of any other call, in seconds.
        """
        super().__init__(
            url.rstrip("/").removesuffix("/v1"),
            {"authorization": f"Bearer {api_key}"} if api_key else {},
            aiohttp.ClientTimeout(total=timeout, sock_connect=patience),
        )
        self.stats = RemoteStats()
        self._call_timeout = aiohttp.ClientTimeout(total=patience)
        self._updating = asyncio.Lock()

    @abstractmethod
    async def start(self) -> None:
        """Find out what the server offers, before the first turn."""

    async def sample(self, request: SampleRequest) -> Sample:
        self._check(request)
        with request.suspended():
            await self._gate.wait()
        turn = ActiveTurn(request, self._version, vocabulary=self.info.vocabulary)
        if self._token_limit(request) == 0:
            turn.finish = Finish.LENGTH
            return turn.sample()
        task = turn.task = asyncio.create_task(self._read(turn))
        self._active.add(turn)
        try:
            await asyncio.wait((task,))
        finally:
            # Also when this call is cancelled: closing the stream makes the server end the turn.
            task.cancel()
            self._active.discard(turn)
            self.stats.turns += 1
        return await self._finish(turn, task)

    async def _finish(self, turn: ActiveTurn, task: asyncio.Task[None]) -> Sample:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, HttpStatusError) and error.status >= 500 and not await self.healthy():
            error = EngineUnreachable(str(error))
        if error is None and turn.finish is None and not task.cancelled():
            error = EngineUnreachable(f"{self.url}: the stream closed before the turn finished")
        if isinstance(error, EngineUnreachable):
            raise EngineUnreachable(str(error), turn.sample() if turn.ids else None) from error
        if error is not None:
            raise error
        self.stats.aborted += turn.finish in (None, Finish.ABORT)
        return check_sample(turn.sample(), turn.request, turn.vocabulary)

    async def update_weights(self, folder: Path, version: int) -> None:
        """Abort what is in flight, replace the weights and check them.

        An engine that a caller paused stays paused. So does one whose update fails, until another update or `resume`:
        its weights are unknown. What can be refused before anything is touched leaves the engine as it was.
        """
        async with self._updating:
            await self._validate_weights(folder)
            await self._stop(PauseMode.ABORT, None)
            await self._load_weights(folder, version)
            self._version = version
            if not self._paused_by_caller:
                await self.resume()

    async def healthy(self) -> bool:
        """Whether `/health` responds with 200."""
        try:
            await self._get("/health")
        except EngineError:
            return False
        return True

    @abstractmethod
    async def _read(self, turn: ActiveTurn) -> None:
        """Request the turn from the server and record what arrives, until its end."""

    async def _validate_weights(self, folder: Path) -> None:
        """Raise `EngineError` for weights that clearly cannot be loaded, before anything is touched."""

    async def _load_weights(self, folder: Path, version: int) -> None:
        """Replace the weights, while nothing is in flight."""
        raise EngineError(f"the weights of {self.url} cannot be replaced from here: pause, replace them there, resume")

    def _check(self, request: SampleRequest) -> None:
        """Refuse what no server could do, before calling it."""
        request.check(self.info.context)
        smallest, largest, vocabulary = int(np.min(request.prompt)), int(np.max(request.prompt)), self.info.vocabulary
        if smallest < 0 or (vocabulary and largest >= vocabulary):
            raise EngineError(f"the prompt has ids from {smallest} to {largest}, the vocabulary has {vocabulary} ids")

    def _token_limit(self, request: SampleRequest) -> int:
        """The most tokens that the turn may have: what was requested, or what is left of the context."""
        return min(request.max_tokens, self.info.context - len(request.prompt))

    async def _get(self, path: str, *, long: bool = False) -> bytes:
        async with self._request("GET", path, None, self._turn_timeout if long else self._call_timeout) as response:
            return await response.read()

    async def _post(self, path: str, body: Any = None, *, long: bool = False) -> bytes:
        async with self._request("POST", path, body, self._turn_timeout if long else self._call_timeout) as response:
            return await response.read()

    async def _json(self, path: str) -> dict[str, Any]:
        return parse_json(await self._get(path), self.url + path)

    async def _stream(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream, up to `[DONE]`; an error event is raised."""
        async with self._request("POST", path, body, self._turn_timeout) as response:
            async for line in self._lines(response):
                if not line.startswith(b"data:"):
                    if line.strip() and not line.startswith(_OTHER_FIELDS):
                        raise InvalidResponse(f"{self.url}{path} sent no event stream; it begins: {excerpt(line)}")
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = parse_json(data, f"{self.url}{path}")
                if error := event_error(f"{self.url}{path}", event, data):
                    raise error
                yield event
