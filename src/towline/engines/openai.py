"""Any OpenAI-compatible chat server as an engine: messages in, and as much of the tokens out as it will tell.

Such a server renders and encodes by itself, so `exact` cannot hold: its turns are each rendered anew and stitched
afterwards (builder `merged`), and how far the stitched context is from what the model saw is measured. What the server
tells is found by asking it:

- `tokens`: prompt ids, sampled ids and logprobs (vLLM's `return_token_ids`);
- `logprobs`: logprobs by token text; ids only with the model's own tokenizer at hand;
- `text`: neither. Such turns carry messages for offline data and no trained token.

Turns are read as streams where the server streams all that it tells otherwise, so that a stall shows. Of any other server
a turn comes as a whole, and is limited by `timeout` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from towline import exact_json
from towline.arrays import Ids
from towline.conversation import Finish, Message, Reply, Request, ToolCall
from towline.engines.base import Capture, ContextExceeded, EngineGone, EngineInfo, PauseMode, Sample, SampleRequest
from towline.engines.chat_stream import Assembly
from towline.engines.holds import Gate, Holds
from towline.engines.refusals import refusal, room_beside
from towline.engines.validation import BadAnswer, check_sample, count, logprob, reading, token_ids
from towline.errors import EngineError
from towline.tokens.tokenizer import Tokenizer

_FINISH = {
    "stop": Finish.STOP,
    "tool_calls": Finish.STOP,
    "function_call": Finish.STOP,
    "content_filter": Finish.STOP,
    "length": Finish.LENGTH,
    "abort": Finish.ABORT,
}
_NONE: Ids = np.empty(0, np.int32)
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_LINE = 2**24
"""The longest line of a stream, in bytes."""
_CONTEXT = 1_000_000
"""The server itself refuses what does not fit."""


class ChatServerEngine:
    def __init__(
        self, base_url: str, model: str, *, api_key: str = "", tokenizer: Tokenizer | None = None, timeout: float = 600
    ):
        """`base_url` ends before `/chat/completions`, as OpenAI's clients have it."""
        self._url = base_url.rstrip("/")
        self._model = model
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._tokenizer = tokenizer
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._streaming = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
        self._streams = False
        self._http: aiohttp.ClientSession | None = None
        self._capture = Capture.TEXT
        self._extra: dict[str, Any] = {}
        self._version = 0
        self._running = Gate()
        self._flying: dict[str, asyncio.Task[dict[str, Any]]] = {}

    @property
    def info(self) -> EngineInfo:
        size = self._tokenizer.size if self._tokenizer is not None else 0
        details = {"url": self._url, "model": self._model, "streams": "yes" if self._streams else "no"}
        return EngineInfo("openai", self._capture, _CONTEXT, size, details)

    @property
    def holds(self) -> Holds:
        return self._running.holds

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        """Ask the server one token and look at what it tells."""
        self._http = aiohttp.ClientSession(
            timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=_LINE
        )
        probe = {"model": self._model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        wishes: list[dict[str, Any]] = [{"logprobs": True, "return_token_ids": True}, {"logprobs": True}, {}]
        refusal: EngineError | None = None
        for extra in wishes:
            try:
                answer = await self._post({**probe, **extra})
            except EngineError as error:
                refusal = error
                continue
            self._extra = extra
            with reading(self._url, answer):
                self._capture = _level(answer)
            self._streams = await self._streams_all({**probe, **extra})
            return
        raise EngineError(f"{self._url} does not answer chat completions: {refusal}")

    async def _streams_all(self, probe: Mapping[str, Any]) -> bool:
        """Whether a stream tells as much of a turn as a whole answer."""
        try:
            answer = await self._streamed(probe, lambda tokens: None)
        except EngineError:
            return False
        with reading(self._url, answer):
            return _level(answer) is self._capture

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        async with self._asked(body, self._timeout) as response:
            data = await response.read()
        with reading(self._route, data):
            answer = exact_json.loads(data)
            if not isinstance(answer["choices"][0]["message"], dict):
                raise TypeError("no chat completion")
            return dict(answer)

    async def _streamed(self, body: Mapping[str, Any], beat: Callable[[int], None]) -> dict[str, Any]:
        """The whole answer, read as a stream; `beat` is told of tokens as they come."""
        made = Assembly()
        async with self._asked({**body, **_STREAM}, self._streaming) as response:
            if response.content_type != "text/event-stream":
                raise EngineError(f"{self._route} answered no stream, but {response.content_type}")
            async for line in response.content:
                data = line[5:].strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    break
                if data:
                    with reading(self._route, data):
                        event = exact_json.loads(data)
                        if event.get("error") or event.get("object") == "error":
                            raise ValueError("it is an error")
                        beat(made.feed(event))
        if not made.finished:
            raise EngineGone(f"{self._route} ended a turn in the middle")
        return made.answer()

    @property
    def _route(self) -> str:
        return f"{self._url}/chat/completions"

    @contextlib.asynccontextmanager
    async def _asked(
        self, body: Mapping[str, Any], limit: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200; any other is an error that quotes it."""
        if self._http is None:
            raise EngineError("the engine was not started")
        data = exact_json.dumps(body)
        try:
            async with self._http.post(self._route, data=data, headers=self._headers, timeout=limit) as response:
                if response.status != 200:
                    raise refusal(self._route, response.status, await response.read())
                yield response
        except TimeoutError as error:
            raise EngineError(f"{self._route} has not answered in time") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineGone(f"{self._route}: {error or type(error).__name__}") from error
        except ValueError as error:
            raise BadAnswer(f"{self._route} sent a line of more than {_LINE} bytes") from error

    async def sample(self, request: SampleRequest) -> Sample:
        if request.request is None:
            raise EngineError("a chat server needs messages")
        with request.waiting():
            await self._running.wait()
        task = asyncio.get_running_loop().create_task(self._answered(request, self._body(request, request.request)))
        self._flying[request.id] = task
        try:
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            aborted = task.cancelled()
            task.cancel()
            if not aborted:
                raise
            return _aborted()
        finally:
            self._flying.pop(request.id, None)
        with reading(self._url, answer):
            sample = self._read(answer)
        return check_sample(sample, request, self.info.vocabulary)

    async def _answered(self, request: SampleRequest, body: dict[str, Any]) -> dict[str, Any]:
        """The server's answer. It counts `max_tokens` against a context that it does not tell beforehand: a refusal for that
        alone is no prompt that is too long, and the turn is asked for again with the room that there is."""
        try:
            return await self._ask(request, body)
        except ContextExceeded as refused:
            room = room_beside(refused)
            if room is not None and not 0 < room < request.max_tokens:
                raise
            if room is not None:
                return await self._ask(request, body | {"max_tokens": room})
            await self._ask(request, body | {"max_tokens": 1})
            raise EngineError(
                f"the server refuses max_tokens={request.max_tokens} beside a prompt that fits: lower "
                f"session.sampling.max_tokens ({refused})"
            ) from refused

    async def _ask(self, request: SampleRequest, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._streams:
            return await self._streamed(body, request.beat)
        request.blind()
        return await self._post(body)

    def _body(self, request: SampleRequest, asked: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [message_json(message) for message in asked.messages],
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            **self._extra,
        }
        if asked.tools:
            body["tools"] = [tool.as_function() for tool in asked.tools]
        if request.stop_strings:
            body["stop"] = list(request.stop_strings)
        if request.seed is not None:
            body["seed"] = request.seed
        if asked.template_args:
            body["chat_template_kwargs"] = asked.template_args
        return body

    def _read(self, answer: Mapping[str, Any]) -> Sample:
        choice = answer["choices"][0]
        reason = choice.get("finish_reason")
        if reason not in _FINISH:
            raise ValueError(f"the finish reason {reason!r} is not one of {', '.join(_FINISH)}")
        if (finish := _FINISH[reason]) is Finish.ABORT:
            return _aborted()
        told = _logprobs(choice)
        ids, prompt, flags = _NONE, _NONE, ["rendered_elsewhere"]
        if self._capture is Capture.TOKENS:
            size = self.info.vocabulary
            ids = np.asarray(token_ids(choice.get("token_ids"), size), np.int32)
            given = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
            prompt = np.asarray(token_ids(given, size), np.int32)
            if not len(ids) or not len(prompt):
                raise ValueError(f"it holds {len(prompt)} prompt ids and {len(ids)} sampled ids")
        elif self._capture is Capture.LOGPROBS and self._tokenizer is not None:
            known = [self._tokenizer.id_of_text(token) for token, _ in told]
            # Tokens that the server kept to itself, but for an end of turn, leave a hole in the row.
            sampled = count((answer.get("usage") or {}).get("completion_tokens") or 0, "completion_tokens")
            if all(id is not None for id in known) and len(known) + 1 >= sampled:
                ids = np.asarray(known, np.int32)
                flags.append("ids_from_text")
        logprobs = np.asarray([value for _, value in told], np.float32)
        if len(logprobs) != len(ids):
            if self._capture is Capture.TOKENS:
                raise ValueError(f"it holds {len(ids)} sampled ids and {len(logprobs)} logprobs")
            ids, logprobs = _NONE, np.empty(0, np.float32)
            flags.append("no_ids")
        return Sample(
            ids,
            logprobs,
            np.full(len(ids), self._version, np.int32),
            finish,
            prompt_tokens=len(prompt),
            cached_tokens=_cached(answer),
            flags=tuple(flags),
            prompt=prompt,
            reply=_reply(choice["message"], finish),
        )

    async def abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            if id in self._flying:
                self._flying[id].cancel()

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        """No request crosses an update: with `abort`, those in flight are given up and sampled anew afterwards."""
        self._running.clear()
        if mode is PauseMode.DRAIN and self._flying:
            await asyncio.wait(list(self._flying.values()), timeout=deadline)
        flying = list(self._flying.values())
        await self.abort(list(self._flying))
        await asyncio.gather(*flying, return_exceptions=True)

    async def resume(self, version: int | None = None) -> None:
        if version is not None:
            self._version = version
        self._running.set()

    async def ready(self) -> None:
        await self._running.wait()

    async def update_weights(self, folder: Path, version: int) -> None:
        raise EngineError("a chat server's weights cannot be replaced from here: pause, replace them there, resume")

    async def close(self) -> None:
        await self.abort(list(self._flying))
        if self._http is not None:
            with contextlib.suppress(aiohttp.ClientError):
                await self._http.close()


def _aborted() -> Sample:
    """A turn that is sampled anew: such a server cannot take half a reply."""
    return Sample(_NONE, np.empty(0, np.float32), _NONE, Finish.ABORT, 0, prompt=_NONE)


def _level(answer: Mapping[str, Any]) -> Capture:
    choice = answer["choices"][0]
    has_prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    if choice.get("token_ids") and has_prompt and _logprobs(choice):
        return Capture.TOKENS
    return Capture.LOGPROBS if _logprobs(choice) else Capture.TEXT


def _logprobs(choice: Mapping[str, Any]) -> list[tuple[str, float]]:
    content = (choice.get("logprobs") or {}).get("content") or []
    return [(str(token.get("token", "")), logprob(token.get("logprob"))) for token in content]


def _cached(answer: Mapping[str, Any]) -> int:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return count(details.get("cached_tokens") or 0, "cached_tokens")


def message_json(message: Message) -> dict[str, Any]:
    """A neutral message as OpenAI's chat completions have it."""
    fields: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.media:
        parts: list[dict[str, Any]] = [{"type": "text", "text": message.text}] if message.text else []
        images = [media for media in message.media if media.kind == "image"]
        fields["content"] = parts + [{"type": "image_url", "image_url": {"url": media.url}} for media in images]
    if message.role == "assistant":
        if message.reasoning:
            fields["reasoning_content"] = message.reasoning
        if message.tool_calls:
            fields["tool_calls"] = [_call_json(call) for call in message.tool_calls]
    elif message.role == "tool":
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _call_json(call: ToolCall) -> dict[str, Any]:
    if isinstance(call.arguments, str):
        text = exact_json.dumps({"input": call.arguments}).decode() if call.custom else call.arguments
    else:
        text = exact_json.dumps(call.arguments).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}


def _reply(message: Mapping[str, Any], finish: Finish) -> Reply:
    calls = []
    malformed = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        text = str(function.get("arguments") or "{}")
        try:
            arguments = exact_json.loads(text)
        except orjson.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict) or not function.get("name"):
            malformed.append(exact_json.dumps(call).decode())
            continue
        calls.append(ToolCall(str(call.get("id") or ""), str(function["name"]), arguments))
    text = "\n".join(part for part in [_text(message.get("content")), *malformed] if part)
    reasoning = message.get("reasoning_content") or message.get("reasoning") or None
    return Reply(text, str(reasoning) if reasoning else None, tuple(calls), finish, malformed=tuple(malformed))


def _text(content: Any) -> str:
    """The text of a message, which some servers split into parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(_text(part["text"]) for part in content if part["type"] == "text")
    raise ValueError(f"the content of a message is neither text nor a list of parts: {content!r:.60}")
