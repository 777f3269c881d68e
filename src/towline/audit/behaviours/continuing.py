"""Behaviours that must leave a conversation one chain: the history comes back in another form, but unchanged in meaning."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from towline.audit import content
from towline.audit.behaviours.registry import SAMPLED, behaviour
from towline.audit.clients import REASONING_FIELDS, WireJson
from towline.audit.engine import ScriptedReply
from towline.audit.simulation import Expected, SimulatedHarness

REMINDER = r"\s*<system-reminder>.*?</system-reminder>"
BILLING = r"x-anthropic-billing-header: [^\n]*\n"


def without_reasoning(message: WireJson) -> WireJson:
    """The message without readable or sealed reasoning."""
    return {name: value for name, value in message.items() if name not in REASONING_FIELDS}


@behaviour(free=True)
async def verbatim(harness: SimulatedHarness) -> Expected:
    """Sends every reply back unchanged."""
    thread = harness.thread()
    await thread.work(3)
    await thread.finish()
    thread.user(content.sentence(harness.random))
    await thread.finish()
    return Expected()


@behaviour("text_round_trips", split=0.0)
async def canonical(harness: SimulatedHarness) -> Expected:
    """Sends back replies that any server would encode to the sampled ids: the control for the `merged` builder."""
    thread = harness.thread()
    if harness.can("call_round_trips"):
        await thread.work(2, reasoning=False, text=False)
    await thread.finish(reasoning=False)
    for _ in range(2):
        thread.user(content.sentence(harness.random))
        await thread.finish(reasoning=False)
    return Expected(plain="never")


@behaviour(free=True, split=1.0, captures=SAMPLED)
async def other_tokens(harness: SimulatedHarness) -> Expected:
    """Sends back text whose sampled tokens are not the tokenizer's canonical ones."""
    thread = harness.thread()
    await thread.work(3)
    await thread.finish()
    return Expected()


@behaviour("tools", free=True)
async def reserialised(harness: SimulatedHarness) -> Expected:
    """Re-serialises arguments: other key order, whitespace and escapes."""

    def restyled(arguments: str) -> str:
        value = json.loads(arguments)
        turned = dict(reversed(value.items()))
        style = harness.random.randrange(4)
        if style == 0:
            return json.dumps(turned, ensure_ascii=True)
        if style == 1:
            return json.dumps(turned, ensure_ascii=False, separators=(",", ":"))
        return json.dumps(value, indent=style, sort_keys=True)

    def echo(message: WireJson) -> WireJson:
        calls = [
            {**call, "function": {**call["function"], "arguments": restyled(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or ()
        ]
        return {**message, "tool_calls": calls} if calls else message

    thread = harness.thread(echo=echo)
    await thread.work(4)
    await thread.finish()
    return Expected()


@behaviour("reasoning", free=True)
async def reasoning_echoed(harness: SimulatedHarness) -> Expected:
    """Sends reasoning back: readable, under another field name, inside the text, or only sealed."""

    def echo(message: WireJson) -> WireJson:
        thought = message.get("reasoning_content")
        if not thought:
            return message
        rest = without_reasoning(message)
        place = harness.random.choice(("reasoning", "reasoning_content", "text", "signature"))
        if place == "signature" and message.get("signature"):
            return {**rest, "signature": message["signature"]}
        if place == "text":
            return {**rest, "content": f"<think>\n{thought}\n</think>\n\n{rest['content'] or ''}"}
        return {**rest, "reasoning" if place == "signature" else place: thought}

    thread = harness.thread(echo=echo)
    await thread.work(3, reasoning=True)
    await thread.finish(reasoning=True)
    return Expected()


@behaviour("reasoning")
async def reasoning_dropped(harness: SimulatedHarness) -> Expected:
    """Drops all reasoning; under `retain` it stays in context. A plain server would show a different prompt."""
    thread = harness.thread(echo=without_reasoning)
    await thread.work(3, reasoning=True)
    await thread.finish(reasoning=True)
    return Expected(plain="always")


@behaviour(free=True)
async def truncated(harness: SimulatedHarness) -> Expected:
    """Gets a truncated reply and continues."""
    thread = harness.thread()
    for line in (harness.step(), harness.answer()):
        line.free = False
        message = await thread.reply(line, max_tokens=harness.random.randint(2, 7))
        thread.follow(message)
    await thread.work(1)
    await thread.finish()
    return Expected(flags=("forced_close",))


@behaviour("tools", free=True)
async def call_ids_altered(harness: SimulatedHarness) -> Expected:
    """Rewrites call ids."""

    def echo(message: WireJson) -> WireJson:
        calls = [{**call, "id": f"{call['id'][:4]}_{call['id'][4:]}"} for call in message.get("tool_calls") or ()]
        return {**message, "tool_calls": calls} if calls else message

    thread = harness.thread(echo=echo)
    await thread.work(3, calls=2 if harness.can("parallel") else 1)
    await thread.finish()
    return Expected()


@behaviour(free=True, dialects=("chat", "responses", "messages"))
async def content_flips(harness: SimulatedHarness) -> Expected:
    """Puts a cache marker on the newest message, which makes its content a list; in the next request it is text again."""

    def shape(history: list[WireJson]) -> list[WireJson]:
        marked = dict(history[-1])
        part: dict[str, Any] = {"type": "text", "text": marked["content"], "cache_control": {"type": "ephemeral"}}
        marked["content"] = [part]
        return [*history[:-1], marked]

    thread = harness.thread(shape=shape)
    await thread.work(3)
    await thread.finish()
    return Expected()


@behaviour("tools")
async def content_null(harness: SimulatedHarness) -> Expected:
    """Sends the content beside calls as null, as an empty string, or omits it."""

    def echo(message: WireJson) -> WireJson:
        if message.get("content"):
            return message
        rest = {name: value for name, value in message.items() if name != "content"}
        return harness.random.choice((rest, {**rest, "content": None}, {**rest, "content": ""}))

    thread = harness.thread(echo=echo)
    await thread.work(4, text=False)
    await thread.finish()
    return Expected()


@behaviour("tools", "parallel", free=True)
async def results_out_of_order(harness: SimulatedHarness) -> Expected:
    """Sends the results of parallel calls in another order."""
    thread = harness.thread()
    for count in (2, 3, 1):
        thread.follow(await thread.reply(harness.step(calls=count)), backwards=True)
    await thread.finish()
    return Expected()


@behaviour(free=True, dialects=("chat", "responses", "messages"))
async def fields_differ(harness: SimulatedHarness) -> Expected:
    """Adds and drops fields without meaning, and sends the system prompt as a developer message."""

    def echo(message: WireJson) -> WireJson:
        dropped = {name: value for name, value in message.items() if name != "refusal"}
        return {**dropped, "annotations": [], "provider": {"trace": harness.random.random()}}

    def shape(history: list[WireJson]) -> list[WireJson]:
        role, names = harness.random.choice((("system", {}), ("developer", {"name": "somebody"})))
        shaped = {"system": {"role": role}, "user": names}
        return [{**message, **shaped.get(message["role"], {})} for message in history]

    thread = harness.thread(echo=echo, shape=shape)
    await thread.work(3)
    await thread.finish()
    return Expected()


@behaviour("tools", "text_beside_call")
async def reply_in_two(harness: SimulatedHarness) -> Expected:
    """Sends the text and the calls of a reply back as two messages."""

    def shape(history: list[WireJson]) -> list[WireJson]:
        sent = []
        for message in history:
            if message.get("tool_calls") and message.get("content"):
                sent.append({"role": "assistant", "content": message["content"]})
                message = {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}
            sent.append(message)
        return sent

    thread = harness.thread(shape=shape)
    await thread.work(3, text=True)
    await thread.finish()
    return Expected()


@behaviour("tools", "closes")
async def call_malformed(harness: SimulatedHarness) -> Expected:
    """Gets a malformed call as text, reports it to the model, and continues."""
    thread = harness.thread()
    line = harness.step(text=False, reasoning=False)
    line.garble = True
    message = await thread.reply(line)
    harness.check(not message.get("tool_calls"), "an incomplete call reached the harness as a call")
    harness.check(bool(message.get("content")), "a malformed call did not reach the harness as text")
    thread.user("This call cannot be read.")
    await thread.work(2)
    await thread.finish()
    return Expected()


@behaviour("closes", "other_ends")
async def other_end(harness: SimulatedHarness) -> Expected:
    """Gets replies that ended with another end-of-turn id than the template's own; the sampled id is kept."""
    thread = harness.thread()
    for _ in range(2):
        line = harness.step()
        line.other_end = True
        thread.follow(await thread.reply(line))
    await thread.finish()
    return Expected()


@behaviour(free=True)
async def special_text(harness: SimulatedHarness) -> Expected:
    """Reads a file that contains the model's special tokens as text."""
    return await _read_special_text(harness)


@behaviour("plain_special_text", free=True, captures=SAMPLED)
async def special_text_plain(harness: SimulatedHarness) -> Expected:
    """Reads such a file where special tokens are encoded as plain text."""
    return await _read_special_text(harness)


async def _read_special_text(harness: SimulatedHarness) -> Expected:
    special = sorted(harness.target.codec.tokenizer.special, key=len)
    thread = harness.thread()
    for _ in range(3):
        thread.follow(await thread.reply(harness.step()))
        spelled = " ".join(harness.random.sample(special, 2))
        end = harness.target.codec.tokenizer.eos_token
        thread.history[-1]["content"] += f"\nbefore {spelled} between {end}assistant: {end}\nafter"
    await thread.finish()
    return Expected()


@behaviour()
async def stop_string(harness: SimulatedHarness) -> Expected:
    """Uses a stop sequence, and continues."""
    thread = harness.thread()
    for _ in range(2):
        line = harness.answer(reasoning=False)
        line.text = f"{content.sentence(harness.random)} <END> {content.sentence(harness.random)}"
        message = await thread.reply(line, stop=["<END>"])
        harness.check("<END>" not in message["content"], "the stop string is part of the text")
        thread.user("And?")
    await thread.finish()
    return Expected(flags=("forced_close",))


@behaviour(free=True)
async def unsampled_replies(harness: SimulatedHarness) -> Expected:
    """Starts with few-shot examples: assistant messages that the policy never sampled."""
    thread = harness.thread()
    for _ in range(2):
        answer = {"role": "assistant", "content": content.sentence(harness.random)}
        thread.history += [answer, {"role": "user", "content": content.sentence(harness.random)}]
    await thread.work(2)
    await thread.finish()
    return Expected()


@behaviour(free=True, captures=SAMPLED)
async def sampled_freely(harness: SimulatedHarness) -> Expected:
    """Lets the model sample freely, without a script."""
    thread = harness.thread()
    for _ in range(4):
        thread.follow(await thread.reply(ScriptedReply(free=True)))
    return Expected()


@behaviour("system", settings={"noise": [BILLING]}, free=True)
async def noise(harness: SimulatedHarness) -> Expected:
    """Changes a line of its system prompt in every request; the session's settings declare it as noise."""

    def shape(history: list[WireJson]) -> list[WireJson]:
        line = f"x-anthropic-billing-header: cch={harness.random.getrandbits(32):08x};\n"
        return [{**history[0], "content": line + history[0]["content"]}, *history[1:]]

    thread = harness.thread(shape=shape)
    await thread.work(3)
    await thread.finish()
    return Expected()


@behaviour(settings={"noise": [REMINDER]}, free=True)
async def reminder_moves(harness: SimulatedHarness) -> Expected:
    """Keeps a date reminder only in the newest user message."""

    def shape(history: list[WireJson]) -> list[WireJson]:
        newest = max(index for index, message in enumerate(history) if message["role"] == "user")
        day = harness.random.randint(1, 28)
        text = f"{history[newest]['content']}\n<system-reminder>It is 2026-11-{day:02}.</system-reminder>"
        return [*history[:newest], {**history[newest], "content": text}, *history[newest + 1 :]]

    thread = harness.thread(shape=shape)
    for _ in range(2):
        await thread.work(1)
        await thread.finish()
        thread.user(content.sentence(harness.random))
    await thread.finish()
    return Expected()


@behaviour("notes", settings={"vanishing": "keep"}, free=True, captures=SAMPLED)
async def vanishing_kept(harness: SimulatedHarness) -> Expected:
    """Ends every prompt with a note that is missing from the next one; the session keeps it."""
    thread = harness.thread(shape=lambda history: [*history, _note(harness)])
    await thread.work(3)
    await thread.finish()
    return Expected(flags=("vanished_kept",))


@behaviour("prefill")
async def prefill(harness: SimulatedHarness) -> Expected:
    """Prefills the model's answer."""
    thread = harness.thread()
    await thread.work(1)
    for _ in range(2):
        start = content.sentence(harness.random, 2, 3)[:-1]
        line = harness.line(f" {content.sentence(harness.random)}")
        (choice,) = await thread.ask(line, messages=[*thread.history, {"role": "assistant", "content": start}])
        whole = start + choice["message"]["content"]
        thread.take({**choice, "message": {"role": "assistant", "content": whole}})
        thread.user(content.sentence(harness.random))
    await thread.finish()
    return Expected()


@behaviour("prefill")
async def reply_resumed(harness: SimulatedHarness) -> Expected:
    """Has a truncated reply continued."""
    thread = harness.thread()
    line = replace(harness.line(" ".join(content.sentence(harness.random) for _ in range(3))), split=0.0)
    (choice,) = await thread.ask(line, max_tokens=12)
    start = {"role": "assistant", "content": choice["message"]["content"]}
    rest = replace(harness.line(f" {content.sentence(harness.random)}"), split=0.0)
    (choice,) = await thread.ask(rest, messages=[*thread.history, start])
    whole = start["content"] + choice["message"]["content"]
    thread.take({**choice, "message": {"role": "assistant", "content": whole}})
    thread.user(content.sentence(harness.random))
    await thread.finish()
    return Expected()


@behaviour("tools", "keeps_reasoning", settings={"policy": "as_sent"})
async def reasoning_kept_as_sent(harness: SimulatedHarness) -> Expected:
    """Sends all reasoning back under `as_sent`: no fork."""
    thread = harness.thread()
    await thread.work(3, reasoning=True)
    return Expected()


@behaviour("tools", "keeps_reasoning", settings={"policy": "template"})
async def reasoning_dropped_template(harness: SimulatedHarness) -> Expected:
    """Drops reasoning that the template would have shown, under `template`: the model keeps what the template keeps."""
    thread = harness.thread(echo=without_reasoning)
    await thread.work(3, reasoning=True)
    return Expected()


def _note(harness: SimulatedHarness) -> WireJson:
    return {"role": "user", "content": f"(Note {harness.random.randint(1, 999)}: the workspace is clean.)"}
