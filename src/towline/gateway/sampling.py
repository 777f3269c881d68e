"""One turn at the engine: its sampling parameters and role, its sampling through pauses and weight updates, its reply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

import numpy as np

from towline.common import exact_json
from towline.common.untrusted.patterns import compile_pattern
from towline.config import RoleRule, SamplingSettings
from towline.conversation import Answer, Finish, Message, Reply, Request, Sampling, TokenLogprob, Tool, ToolCall, Usage
from towline.engines.base import Engine, Ids, Sample, SampleRequest
from towline.engines.validation import check_sample
from towline.errors import EngineError
from towline.tokens.codec import ModelCodec
from towline.tokens.graph.graph import GraphNode

_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))
_MIN_TEMPERATURE = 1e-6
"""A lower temperature means 0, and a lower top-p means this value: greedy sampling either way, as with providers."""


def requested_sampling(request: Request) -> dict[str, Any]:
    """The sampling that the harness requested, as JSON values, so that it compares equal after a restart too."""
    sampling = request.sampling
    values = {name: value for name in _SAMPLING_FIELDS if (value := getattr(sampling, name)) not in (None, (), {}, [])}
    if request.sampling.stop:
        values["stop"] = list(request.sampling.stop)
    if request.tool_choice is not None:
        values["tool_choice"] = request.tool_choice
    return values


def sampling_parameters(
    fixed: SamplingSettings, request: Request, *, trained: bool = True
) -> tuple[float, float, int, list[str]]:
    """Temperature, top-p and top-k of the turn, and which of the harness's requests are overridden.

    A turn that is not trained is sampled as the harness requests, whatever the mode.
    """
    wanted = request.sampling
    overridden = list(wanted.other)
    if request.tool_choice not in (None, "auto") and (request.tools or request.tool_choice != "none"):
        overridden.append("tool_choice")
    if fixed.mode == "harness" or not trained:
        temperature = fixed.temperature if wanted.temperature is None else wanted.temperature
        top_p = fixed.top_p if wanted.top_p is None else max(wanted.top_p, _MIN_TEMPERATURE)
        top_k = fixed.top_k if wanted.top_k is None else wanted.top_k
        return temperature if temperature >= _MIN_TEMPERATURE else 0.0, top_p, top_k, overridden
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(wanted, name)
        if value is not None and value != getattr(fixed, name):
            overridden.append(name)
    return fixed.temperature, fixed.top_p, fixed.top_k, overridden


def role_from_rules(rules: Sequence[RoleRule], request: Request) -> str:
    """The role from `session.roles`: that of the first rule that matches the request; empty if none does."""
    return next((rule.role.value for rule in rules if _rule_matches(rule, request)), "")


def _rule_matches(rule: RoleRule, request: Request) -> bool:
    if rule.model is not None and not fnmatchcase(request.model, rule.model):
        return False
    if rule.system is not None:
        leading = takewhile(lambda message: message.role == "system", request.messages)
        if not compile_pattern(rule.system).search("\n".join(message.text for message in leading)):
            return False
    if rule.tools is None:
        return True
    if not rule.tools:
        return not request.tools
    return any(fnmatchcase(tool.name, rule.tools) for tool in request.tools)


_MAX_EMPTY_ABORTS = 100
"""Aborts in a row without a token after which the turn fails."""
_TAIL = 64
_CHEAP_CHARS = 65_536
"""Any text up to this many characters is encoded without a noticeable delay."""
_CHUNK_CHARS = 16_384
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


async def sample_turn(
    engine: Engine,
    request: SampleRequest,
    vocabulary: int = 0,
    usable: Callable[[], Awaitable[None]] | None = None,
) -> Sample:
    """Sample a whole turn. After an abort it continues from its prompt plus its tokens so far, once the engine is ready.

    `vocabulary`: the number of ids, for engines that do not report it. `usable`: waits until the engine is available.
    """
    parts: list[Sample] = []
    current, empty_aborts = request, 0
    while True:
        if usable is not None:
            with request.suspended():
                await usable()
        part = check_sample(await engine.sample(current), current, engine.info.vocabulary or vocabulary)
        parts.append(part)
        if part.finish is not Finish.ABORT:
            return _joined(parts)
        empty_aborts = 0 if len(part.ids) else empty_aborts + 1
        if empty_aborts > _MAX_EMPTY_ABORTS:
            raise EngineError("the engine keeps aborting the turn before its first token")
        so_far = np.concatenate([p.ids for p in parts])
        left = request.max_tokens - len(so_far)
        if left <= 0:
            return replace(_joined(parts), finish=Finish.LENGTH)
        with request.suspended():
            await engine.ready()
        forced = request.forced[len(so_far) :] if request.forced is not None else None
        current = replace(request, prompt=np.concatenate([request.prompt, so_far]), max_tokens=left, forced=forced)


def _joined(parts: Sequence[Sample]) -> Sample:
    if len(parts) == 1:
        return parts[0]
    # A server that renders by itself starts the turn over: only its last part has a prompt.
    prompted = parts[0] if parts[-1].prompt is None else parts[-1]
    return Sample(
        ids=np.concatenate([p.ids for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
        versions=np.concatenate([p.versions for p in parts]),
        finish=parts[-1].finish,
        prompt_tokens=prompted.prompt_tokens,
        cached_tokens=prompted.cached_tokens,
        mixed_cache=sum(part.mixed_cache for part in parts),
        stop_string=parts[-1].stop_string,
        flags=tuple(dict.fromkeys(["resumed", *(flag for part in parts for flag in part.flags)])),
        prompt=prompted.prompt,
        reply=parts[-1].reply,
    )


def read_reply(
    codec: ModelCodec, prompt: Ids, sampled: Sample, tools: Sequence[Tool], turn: int, before: GraphNode | None = None
) -> tuple[Reply, dict[str, str]]:
    """The reply, and by minted call id the id that the model itself sampled. Stop sequences are cut off here.

    `before` is the turn whose unfinished reply this one continues: what was opened there (reasoning, say) is still open
    here, so both are parsed together, and the reply is what is new.
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
        ours = (
            replace(call, id=mint_call_id(turn, n, short=codec.short_call_ids))
            for n, call in enumerate(made.tool_calls)
        )
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
        id = mint_call_id(turn, place, short=codec.short_call_ids)
        if call.native_id:
            native[id] = call.native_id
        calls.append(_call(id, call.name, call.arguments, call.name in custom))
    return (
        Reply(parsed.text, parsed.reasoning, tuple(calls), sampled.finish, sampled.stop_string, parsed.malformed),
        native,
    )


def _begun(node: GraphNode) -> GraphNode:
    """The turn that began the reply which `node` continues."""
    while node.resumes and node.parent is not None:
        node = node.parent
    return node


def _whole_reply(node: GraphNode) -> tuple[str, str]:
    """Text and reasoning of a reply from its beginning."""
    text, reasoning = "", ""
    turn: GraphNode | None = node
    while turn is not None and turn.reply is not None:
        text, reasoning = turn.reply.text + text, (turn.reply.reasoning or "") + reasoning
        turn = turn.parent if turn.resumes else None
    return text, reasoning


def _call(id: str, name: str, arguments: dict[str, object] | str, custom: bool) -> ToolCall:
    """A tool call. The input of a freeform tool is sampled as the one argument that the template declares for it."""
    if custom and isinstance(arguments, dict):
        given = arguments.get("input")
        return ToolCall(id, name, given if isinstance(given, str) else exact_json.dumps(arguments).decode(), True)
    return ToolCall(id, name, arguments, custom)


def mint_call_id(turn: int, place: int, *, short: bool) -> str:
    """A call id that encodes its turn: alphanumeric, because some harnesses strip the rest; `short`: nine characters."""
    digits = ""
    value = turn
    while value or not digits:
        value, rest = divmod(value, 36)
        digits = _DIGITS[rest] + digits
    if short:
        return f"c{digits[-5:]:0>5}{place % 1000:03d}"
    return f"call{digits:0>5}{place:03d}"


def answer(codec: ModelCodec, id: str, model: str, nodes: Sequence[GraphNode]) -> Answer:
    """The answer for the dialect to write, from the finished turns of a request."""
    first = nodes[0]
    replies = [(node, node.reply) for node in nodes if node.reply is not None]
    return Answer(
        id=id,
        created=int(first.meta["started"]),
        model=model,
        replies=[reply for _, reply in replies],
        usage=Usage(
            prompt=first.prompt_length,
            sampled=sum(len(node.sampled) for node in nodes),
            cached=int(first.meta.get("cached_tokens", 0)),
            reasoning=sum(reasoning_tokens(codec, node.sampled, reply) for node, reply in replies),
        ),
        logprobs=lambda choice: token_logprobs(codec, nodes[choice].sampled, nodes[choice].logprobs.tolist()),
    )


def token_logprobs(codec: ModelCodec, ids: Ids, logprobs: Sequence[float]) -> list[TokenLogprob]:
    texts = [codec.tokenizer.decode([int(id)]) for id in ids]
    return [TokenLogprob(t, float(p), t.encode("utf-8", "replace")) for t, p in zip(texts, logprobs, strict=True)]


def reasoning_tokens(codec: ModelCodec, ids: Ids, reply: Reply) -> int:
    """How many sampled tokens are reasoning, if its end is a token of its own."""
    if not reply.reasoning:
        return 0
    end = codec.tokenizer.id_of("</think>")
    places = np.flatnonzero(ids == (-1 if end is None else end))
    return int(places[0]) + 1 if len(places) else 0


def exceeds_context(codec: ModelCodec, messages: Sequence[Message], tools: Sequence[Tool], context: int) -> bool:
    """Whether these are certainly more than `context` tokens, at the cost of encoding about that many.

    Text encoded in chunks has slightly more tokens than as a whole; a margin of a quarter covers that.
    """
    texts = [text for message in messages for text in _texts(message)]
    texts += [text for tool in tools for text in _strings([tool.name, tool.description, tool.parameters])]
    if sum(map(len, texts)) <= max(context, _CHEAP_CHARS):
        return False
    count = 0
    for text in texts:
        for start in range(0, len(text), _CHUNK_CHARS):
            count += len(codec.tokenizer.encode(text[start : start + _CHUNK_CHARS]))
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
    """Every string in a JSON value, at any depth."""
    values = [value]
    while values:
        item = values.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            values += [*item, *item.values()]
        elif isinstance(item, list):
            values += item
