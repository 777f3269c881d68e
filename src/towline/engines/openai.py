"""Any OpenAI-compatible chat server as an engine: messages in, and as many of the tokens out as it reports.

Such a server renders and encodes by itself, so `exact` cannot hold: its turns are each rendered from scratch and stitched
afterwards (builder `merged`), and the distance between the stitched context and what the model saw is measured. What the
server reports is found by asking it (`CaptureLevel`):

- `tokens`: prompt ids, sampled ids and logprobs (vLLM's `return_token_ids`);
- `logprobs`: logprobs by token text; ids only with the model's own tokenizer at hand;
- `text`: neither. Such turns carry messages for offline data and no trained token.

Logprobs are proven at the start, as vLLM's are: one token at temperature 1 and one at another show whether the reported
logprobs are those of the sampling distribution. Where they are not, or cannot be shown to be, turns that were sampled at
another temperature than 1 or from a truncated distribution have the flag `unproven_logprobs` and are not trained. Every
parameter that shapes the distribution is sent, if the server accepts it; a setting that it does not is flagged.

Turns are read as streams where a stream reports as much as a whole response, so that a stall is noticed. From any other
server a turn arrives as a whole and is limited by `timeout` alone. The server applies stop strings itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from towline.common import exact_json
from towline.common.arrays import Ids
from towline.conversation import Finish, Message, Reply, Request, ToolCall
from towline.engines import server_checks
from towline.engines.base import (
    TRUNCATED,
    UNPROVEN_LOGPROBS,
    CaptureLevel,
    ContextExceeded,
    EngineInfo,
    EngineUnreachable,
    Sample,
    SampleRequest,
)
from towline.engines.chat_stream import StreamAssembler
from towline.engines.remote import ActiveTurn, HttpEngine, event_error, remaining_tokens
from towline.engines.validation import check_sample, logprob, parsing, token_count, token_ids
from towline.engines.version_stamp import stamp_versions
from towline.engines.weight_labels import MIXED_VERSIONS
from towline.errors import EngineError
from towline.tokens.tokenizer import Tokenizer

log = logging.getLogger("towline.engines")
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
_ROUTE = "/chat/completions"
_CONTEXT = 1_000_000
"""Stands for an unknown context: the server itself refuses what does not fit."""
_NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""What shapes the distribution beyond OpenAI's own parameters; servers fill in defaults of the model."""
_NO_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
NOT_SENT = "top_k_not_sent"
"""Flag of a turn whose `top_k` the server does not accept: it was sampled without."""


class ChatServerEngine(HttpEngine):
    _encode = staticmethod(exact_json.dumps)
    _keep_alive = True

    def __init__(
        self, base_url: str, model: str, *, api_key: str = "", tokenizer: Tokenizer | None = None, timeout: float = 600
    ):
        """`base_url` ends before `/chat/completions`, as in OpenAI's clients."""
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        super().__init__(base_url.rstrip("/"), headers, aiohttp.ClientTimeout(total=timeout))
        self._model = model
        self._tokenizer = tokenizer
        self._stream_timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
        self._streams = False
        self._capture = CaptureLevel.TEXT
        self._extra: dict[str, Any] = {}
        self._unproven = ""
        """Why logprobs are not shown to be those of the sampling distribution; empty if they are."""

    async def start(self) -> None:
        """Request one token and see what the server reports."""
        probe = {"model": self._model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        levels: list[dict[str, Any]] = [{"logprobs": True, "return_token_ids": True}, {"logprobs": True}, {}]
        refused: EngineError | None = None
        for extra in [{**level, **more} for level in levels for more in (_NEUTRAL, {})]:
            try:
                answer = await self._post({**probe, **extra})
            except EngineError as error:
                refused = error
                continue
            self._extra = extra
            with parsing(self.url, answer):
                self._capture = _capture_level(answer)
            self._streams = await self._streams_all({**probe, **extra})
            size = self._tokenizer.size if self._tokenizer is not None else 0
            details = {"url": self.url, "model": self._model, "streams": "yes" if self._streams else "no"}
            details["top_k"] = "sent" if "top_k" in extra else "not accepted"
            if self._capture is not CaptureLevel.TEXT:
                self._unproven = await self._prove_logprobs({**probe, **extra})
                details["logprobs"] = f"unproven: {self._unproven}" if self._unproven else "processed"
                if self._unproven:
                    log.warning("turns at other temperatures than 1 are not trained: %s", self._unproven)
            self._info = EngineInfo("openai", self._capture, _CONTEXT, size, details)
            return
        raise EngineError(f"{self.url} does not answer chat completions: {refused}")

    async def _prove_logprobs(self, probe: Mapping[str, Any]) -> str:
        """Why the logprobs are not shown to be those of the sampling distribution; empty if they are."""
        tops: list[dict[str, float]] = []
        for temperature in (1.0, server_checks.TEMPERATURE):
            body = {**probe, **_NO_PENALTIES, "temperature": temperature, "top_p": 1.0}
            try:
                answer = await self._post(body | {"top_logprobs": server_checks.TOP_LOGPROBS})
            except EngineError as error:
                return f"{self.url} does not report the logprobs of its most likely tokens: {error}"
            with parsing(self.url, answer):
                tops.append(_top_logprobs(answer["choices"][0]))
        try:
            server_checks.check_logprobs(self.url, *tops)
        except EngineError as error:
            return str(error)
        return ""

    async def _streams_all(self, probe: Mapping[str, Any]) -> bool:
        """Whether a stream reports as much of a turn as a whole response."""
        try:
            answer = await self._post_streamed(probe, lambda tokens: None)
        except EngineError:
            return False
        with parsing(self.url, answer):
            return _capture_level(answer) is self._capture

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        async with self._request("POST", _ROUTE, body, self._turn_timeout) as response:
            data = await response.read()
        with parsing(self.url + _ROUTE, data):
            answer = exact_json.loads(data)
            if not isinstance(answer["choices"][0]["message"], dict):
                raise TypeError("no chat completion")
            return dict(answer)

    async def _post_streamed(self, body: Mapping[str, Any], on_tokens: Callable[[int], None]) -> dict[str, Any]:
        """The whole response, read as a stream; `on_tokens` is called as tokens arrive."""
        assembler, route = StreamAssembler(), self.url + _ROUTE
        async with self._request("POST", _ROUTE, {**body, **_STREAM}, self._stream_timeout) as response:
            if response.content_type != "text/event-stream":
                raise EngineError(f"{route}: expected an event stream, got {response.content_type}")
            async for line in self._lines(response):
                data = line[5:].strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    break
                if data:
                    with parsing(route, data):
                        event = exact_json.loads(data)
                        if error := event_error(route, event, data):
                            raise error
                        on_tokens(assembler.feed(event))
        if not assembler.finished:
            raise EngineUnreachable(f"{route}: the stream closed before the turn finished")
        return assembler.answer()

    def _timeout_error(self, url: str, error: TimeoutError) -> EngineError:
        """A provider that is slow is not lost: the turn alone fails."""
        return EngineError(f"{url} has not answered in time")

    async def sample(self, request: SampleRequest) -> Sample:
        if request.request is None:
            raise EngineError("a chat server needs messages")
        with request.suspended():
            await self._gate.wait()
        turn = ActiveTurn(request, self._version)
        task = turn.task = asyncio.create_task(self._answer(request, self._body(request, request.request)))
        self._active.add(turn)
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
            self._active.discard(turn)
        if task.cancelled():
            return _aborted()
        answer = task.result()
        with parsing(self.url, answer):
            sample = self._read(answer, turn)
        return check_sample(sample, request, self.info.vocabulary)

    async def _answer(self, request: SampleRequest, body: dict[str, Any]) -> dict[str, Any]:
        """The server's response. It counts `max_tokens` against a context that it does not report beforehand: a refusal
        for that alone does not mean that the prompt is too long, and the turn is retried with the room there is."""
        try:
            return await self._call(request, body)
        except ContextExceeded as refused:
            room = remaining_tokens(refused)
            if room is not None and not 0 < room < request.max_tokens:
                raise
            if room is not None:
                return await self._call(request, body | {"max_tokens": room})
            await self._call(request, body | {"max_tokens": 1})
            raise EngineError(
                f"the server rejected max_tokens={request.max_tokens} although the prompt fits; lower "
                f"session.sampling.max_tokens ({refused})"
            ) from refused

    async def _call(self, request: SampleRequest, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._streams:
            return await self._post_streamed(body, request.tokens_arrived)
        request.not_streamed()
        return await self._post(body)

    def _body(self, request: SampleRequest, asked: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [message_json(message) for message in asked.messages],
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            **_NO_PENALTIES,
            **self._extra,
        }
        if request.top_k > 0 and "top_k" in body:
            body["top_k"] = request.top_k
        if asked.tools:
            body["tools"] = [tool.as_function() for tool in asked.tools]
        if request.stop_strings:
            body["stop"] = list(request.stop_strings)
        if request.seed is not None:
            body["seed"] = request.seed
        if asked.template_args:
            body["chat_template_kwargs"] = asked.template_args
        return body

    def _read(self, answer: Mapping[str, Any], turn: ActiveTurn) -> Sample:
        choice = answer["choices"][0]
        reason = choice.get("finish_reason")
        if reason not in _FINISH:
            raise ValueError(f"the finish reason {reason!r} is not one of {', '.join(_FINISH)}")
        if (finish := _FINISH[reason]) is Finish.ABORT:
            return _aborted()
        reported = _logprobs(choice)
        ids, prompt, flags = _NONE, _NONE, ["rendered_elsewhere"]
        if self._capture is CaptureLevel.TOKENS:
            size = self.info.vocabulary
            ids = np.asarray(token_ids(choice.get("token_ids"), size), np.int32)
            given = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
            prompt = np.asarray(token_ids(given, size), np.int32)
            if not len(ids) or not len(prompt):
                raise ValueError(f"it holds {len(prompt)} prompt ids and {len(ids)} sampled ids")
        elif self._capture is CaptureLevel.LOGPROBS and self._tokenizer is not None:
            known = [self._tokenizer.id_of_text(token) for token, _ in reported]
            # Tokens that the server does not report, other than the end of turn, leave a gap in the row.
            sampled = token_count((answer.get("usage") or {}).get("completion_tokens") or 0, "completion_tokens")
            if all(id is not None for id in known) and len(known) + 1 >= sampled:
                ids = np.asarray(known, np.int32)
                flags.append("ids_from_text")
        flags += self._sampling_flags(turn)
        logprobs = np.asarray([value for _, value in reported], np.float32)
        if len(logprobs) != len(ids):
            if self._capture is CaptureLevel.TOKENS:
                raise ValueError(f"it holds {len(ids)} sampled ids and {len(logprobs)} logprobs")
            ids, logprobs = _NONE, np.empty(0, np.float32)
            flags.append("no_ids")
        return Sample(
            ids,
            logprobs,
            stamp_versions(len(ids), turn.version),
            finish,
            prompt_tokens=len(prompt),
            cached_tokens=_cached(answer),
            flags=tuple(flags),
            prompt=prompt,
            reply=_reply(choice["message"], finish),
        )

    def _sampling_flags(self, turn: ActiveTurn) -> list[str]:
        """What a trainer must know of how the turn was sampled."""
        request, flags = turn.request, []
        sent_top_k = request.top_k > 0 and "top_k" in self._extra
        truncated = request.top_p < 1.0 or sent_top_k
        if request.top_k > 0 and not sent_top_k:
            flags.append(NOT_SENT)
        if truncated:
            flags.append(TRUNCATED)
        # Greedy turns have the logprobs of temperature 1.
        if self._unproven and (truncated or request.temperature not in (0.0, 1.0)):
            flags.append(UNPROVEN_LOGPROBS)
        if turn.version != self._version:
            flags.append(MIXED_VERSIONS)
        return flags

    async def announce(self, version: int | None) -> int:
        """Turns that begin from here on have this version; those in flight are flagged, since they may be of both."""
        if version is None or version < self._version:
            reason = (
                "reports no version of its weights: announce a number" if version is None else "only gets newer weights"
            )
            raise EngineError(f"{self.url} {reason} (it is at {self._version})")
        self._version = version
        return version

    async def same_weights(self) -> bool:
        return False

    async def update_weights(self, folder: Path, version: int) -> None:
        raise EngineError("a chat server's weights cannot be replaced from here: pause, replace them there, resume")


def _aborted() -> Sample:
    """A turn that is sampled from scratch later: such a server cannot continue half a reply."""
    return Sample(_NONE, np.empty(0, np.float32), _NONE, Finish.ABORT, 0, prompt=_NONE)


def _top_logprobs(choice: Mapping[str, Any]) -> dict[str, float]:
    """The logprobs of the most likely tokens at the first position, by their text."""
    content = (choice.get("logprobs") or {}).get("content") or [{}]
    return {str(one["token"]): float(one["logprob"]) for one in content[0].get("top_logprobs") or ()}


def _capture_level(answer: Mapping[str, Any]) -> CaptureLevel:
    choice = answer["choices"][0]
    has_prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    if choice.get("token_ids") and has_prompt and _logprobs(choice):
        return CaptureLevel.TOKENS
    return CaptureLevel.LOGPROBS if _logprobs(choice) else CaptureLevel.TEXT


def _logprobs(choice: Mapping[str, Any]) -> list[tuple[str, float]]:
    content = (choice.get("logprobs") or {}).get("content") or []
    return [(str(token.get("token", "")), logprob(token.get("logprob"))) for token in content]


def _cached(answer: Mapping[str, Any]) -> int:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return token_count(details.get("cached_tokens") or 0, "cached_tokens")


def message_json(message: Message) -> dict[str, Any]:
    """A neutral message in the format of OpenAI's chat completions."""
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
