"""One turn at the engine: sample it, through pauses and weight updates, and read the reply from its ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from towline import exact_json
from towline.conversation import Finish, Message, Reply, TokenLogprob, Tool, ToolCall
from towline.engines.base import Engine, Ids, Sample, SampleRequest
from towline.engines.validation import check_sample
from towline.errors import EngineError
from towline.tokens.codec import Codec
from towline.tokens.graph import Node

_FRUITLESS = 100
"""Aborts in a row without a token before the engine is given up on."""
_TAIL = 64
_HARMLESS = 65_536
"""Characters that are encoded in no time, whatever they are."""
_PIECE = 16_384
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


async def sample(
    engine: Engine,
    request: SampleRequest,
    vocabulary: int = 0,
    usable: Callable[[], Awaitable[None]] | None = None,
) -> Sample:
    """A whole turn. What an abort cuts short goes on from its prompt plus its tokens so far, once the engine is ready.

    `vocabulary`: how many ids there are, for engines that do not say. `usable`: waits until the engine may be asked.
    """
    parts: list[Sample] = []
    current, fruitless = request, 0
    while True:
        if usable is not None:
            with request.waiting():
                await usable()
        part = check_sample(await engine.sample(current), current, engine.info.vocabulary or vocabulary)
        parts.append(part)
        if part.finish is not Finish.ABORT:
            return _joined(parts)
        fruitless = 0 if len(part.ids) else fruitless + 1
        if fruitless > _FRUITLESS:
            raise EngineError("the engine keeps aborting the turn before its first token")
        so_far = np.concatenate([p.ids for p in parts])
        left = request.max_tokens - len(so_far)
        if left <= 0:
            return replace(_joined(parts), finish=Finish.LENGTH)
        with request.waiting():
            await engine.ready()
        forced = request.forced[len(so_far) :] if request.forced is not None else None
        current = replace(request, prompt=np.concatenate([request.prompt, so_far]), max_tokens=left, forced=forced)


def _joined(parts: Sequence[Sample]) -> Sample:
    if len(parts) == 1:
        return parts[0]
    return Sample(
        ids=np.concatenate([p.ids for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
        versions=np.concatenate([p.versions for p in parts]),
        finish=parts[-1].finish,
        prompt_tokens=parts[0].prompt_tokens,
        cached_tokens=parts[0].cached_tokens,
        stop_string=parts[-1].stop_string,
        flags=tuple(dict.fromkeys(["resumed", *(flag for part in parts for flag in part.flags)])),
        prompt=next((part.prompt for part in parts if part.prompt is not None), None),
        reply=parts[-1].reply,
    )


def read_reply(
    codec: Codec, prompt: Ids, sampled: Sample, tools: Sequence[Tool], turn: int, before: Node | None = None
) -> tuple[Reply, dict[str, str]]:
    """The reply, and which ids the model itself gave to calls whose ids were minted.

    `before` is the turn whose unfinished reply this one goes on with: what was opened there, reasoning above all, is still
    open here, so the two are read together, and the reply is what is new.
    """
    if before is not None and sampled.reply is None and (said := before.reply) is not None:
        begun = _begun(before)
        whole, native = read_reply(
            codec,
            begun.prompt(),
            replace(sampled, ids=np.concatenate([before.tokens()[begun.prompt_length :], sampled.ids])),
            tools,
            turn,
        )
        text, reasoning = _whole_reply(before)
        if not said.tool_calls and whole.text.startswith(text) and (whole.reasoning or "").startswith(reasoning):
            rest = (whole.reasoning or "")[len(reasoning) :]
            return replace(whole, text=whole.text[len(text) :], reasoning=rest or None), native
    if sampled.reply is not None:
        made = sampled.reply
        ours = (replace(call, id=mint(turn, n, short=codec.short_call_ids)) for n, call in enumerate(made.tool_calls))
        return replace(made, tool_calls=tuple(ours)), {}
    ids = sampled.ids
    body = ids[:-1] if len(ids) and int(ids[-1]) in codec.stop_ids else ids
    text = codec.tokenizer.decode(body.tolist())
    if sampled.stop_string is not None and (cut := text.find(sampled.stop_string)) >= 0:
        text = text[:cut]
    parsed = codec.parse(text, codec.tokenizer.decode(prompt[-_TAIL:].tolist()), tools)
    custom = {tool.name for tool in tools if tool.custom}
    calls, native = [], {}
    for place, call in enumerate(parsed.calls):
        id = mint(turn, place, short=codec.short_call_ids)
        if call.native_id:
            native[id] = call.native_id
        calls.append(_call(id, call.name, call.arguments, call.name in custom))
    return (
        Reply(parsed.text, parsed.reasoning, tuple(calls), sampled.finish, sampled.stop_string, parsed.malformed),
        native,
    )


def _begun(node: Node) -> Node:
    """The turn that began the reply which `node` goes on with."""
    while node.resumes and node.parent is not None:
        node = node.parent
    return node


def _whole_reply(node: Node) -> tuple[str, str]:
    """Text and reasoning of a reply, from its beginning."""
    text, reasoning = "", ""
    turn: Node | None = node
    while turn is not None and turn.reply is not None:
        text, reasoning = turn.reply.text + text, (turn.reply.reasoning or "") + reasoning
        turn = turn.parent if turn.resumes else None
    return text, reasoning


def _call(id: str, name: str, arguments: dict[str, object] | str, custom: bool) -> ToolCall:
    """A freeform tool's input is sampled as the one argument that the template declared for it."""
    if custom and isinstance(arguments, dict):
        given = arguments.get("input")
        return ToolCall(id, name, given if isinstance(given, str) else exact_json.dumps(arguments).decode(), True)
    return ToolCall(id, name, arguments, custom)


def mint(turn: int, place: int, *, short: bool) -> str:
    """A call id that names its turn: alphanumeric, since some harnesses strip the rest; nine characters where asked."""
    digits = ""
    value = turn
    while value or not digits:
        value, rest = divmod(value, 36)
        digits = _DIGITS[rest] + digits
    if short:
        return f"c{digits[-5:]:0>5}{place % 1000:03d}"
    return f"call{digits:0>5}{place:03d}"


def token_logprobs(codec: Codec, ids: Ids, logprobs: Sequence[float]) -> list[TokenLogprob]:
    texts = [codec.tokenizer.decode([int(id)]) for id in ids]
    return [TokenLogprob(t, float(p), t.encode("utf-8", "replace")) for t, p in zip(texts, logprobs, strict=True)]


def reasoning_tokens(codec: Codec, ids: Ids, reply: Reply) -> int:
    """How many sampled tokens are reasoning, where its end is a token of its own."""
    if not reply.reasoning:
        return 0
    end = codec.tokenizer.id_of("</think>")
    places = np.flatnonzero(ids == (-1 if end is None else end))
    return int(places[0]) + 1 if len(places) else 0


def far_exceeds(codec: Codec, messages: Sequence[Message], tools: Sequence[Tool], context: int) -> bool:
    """Whether these are certainly more than `context` tokens, for the price of encoding about that many.

    Text cut into pieces gives a few tokens more than as a whole; a quarter is more than that can come to.
    """
    texts = [text for message in messages for text in _texts(message)]
    texts += [text for tool in tools for text in _strings([tool.name, tool.description, tool.parameters])]
    if sum(map(len, texts)) <= max(context, _HARMLESS):
        return False
    count = 0
    for text in texts:
        for start in range(0, len(text), _PIECE):
            count += len(codec.tokenizer.encode(text[start : start + _PIECE]))
            if count > context + context // 4 + len(texts):
                return True
    return False


def _texts(message: Message) -> Iterator[str]:
    yield message.text
    if message.reasoning:
        yield message.reasoning
    for call in message.tool_calls:
        yield from _strings([call.name, call.arguments])


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, however deep."""
    values = [value]
    while values:
        item = values.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            values += [*item, *item.values()]
        elif isinstance(item, list):
            values += item
