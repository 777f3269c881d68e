"""What leaves a conversation one chain: however a harness writes its history back, nothing that was said has changed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from towline.audit import content
from towline.audit.behaviours.registry import SAMPLED, behaviour
from towline.audit.play import Expected, Play
from towline.audit.script import Line
from towline.audit.tongues import REASONING, Wired

REMINDER = r"\s*<system-reminder>.*?</system-reminder>"
BILLING = r"x-anthropic-billing-header: [^\n]*\n"


def without_reasoning(message: Wired) -> Wired:
    """Neither in the open nor sealed."""
    return {name: value for name, value in message.items() if name not in REASONING}


@behaviour(free=True)
async def verbatim(play: Play) -> Expected:
    """Sends every reply back as it came."""
    thread = play.thread()
    await thread.work(3)
    await thread.finish()
    thread.user(content.sentence(play.random))
    await thread.finish()
    return Expected()


@behaviour("text_round_trips", split=0.0)
async def canonical(play: Play) -> Expected:
    """Sends back replies that any server would render and encode to what was sampled: the control for stitching."""
    thread = play.thread()
    if play.can("call_round_trips"):
        await thread.work(2, reasoning=False, text=False)
    await thread.finish(reasoning=False)
    for _ in range(2):
        thread.user(content.sentence(play.random))
        await thread.finish(reasoning=False)
    return Expected(plain="never")


@behaviour(free=True, split=1.0, captures=SAMPLED)
async def other_tokens(play: Play) -> Expected:
    """Sends back text whose sampled tokens are not those that an encoder would choose."""
    thread = play.thread()
    await thread.work(3)
    await thread.finish()
    return Expected()


@behaviour("tools", free=True)
async def reserialised(play: Play) -> Expected:
    """Writes arguments anew: other key order, other spaces, escapes."""

    def restyled(arguments: str) -> str:
        value = json.loads(arguments)
        turned = dict(reversed(value.items()))
        style = play.random.randrange(4)
        if style == 0:
            return json.dumps(turned, ensure_ascii=True)
        if style == 1:
            return json.dumps(turned, ensure_ascii=False, separators=(",", ":"))
        return json.dumps(value, indent=style, sort_keys=True)

    def echo(message: Wired) -> Wired:
        calls = [
            {**call, "function": {**call["function"], "arguments": restyled(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or ()
        ]
        return {**message, "tool_calls": calls} if calls else message

    thread = play.thread(echo=echo)
    await thread.work(4)
    await thread.finish()
    return Expected()


@behaviour("reasoning", free=True)
async def reasoning_echoed(play: Play) -> Expected:
    """Sends reasoning back: in the open, under another name, inside the text, or sealed alone where it was sealed."""

    def echo(message: Wired) -> Wired:
        thought = message.get("reasoning_content")
        if not thought:
            return message
        rest = without_reasoning(message)
        place = play.random.choice(("reasoning", "reasoning_content", "text", "signature"))
        if place == "signature" and message.get("signature"):
            return {**rest, "signature": message["signature"]}
        if place == "text":
            return {**rest, "content": f"<think>\n{thought}\n</think>\n\n{rest['content'] or ''}"}
        return {**rest, "reasoning" if place == "signature" else place: thought}

    thread = play.thread(echo=echo)
    await thread.work(3, reasoning=True)
    await thread.finish(reasoning=True)
    return Expected()


@behaviour("reasoning")
async def reasoning_dropped(play: Play) -> Expected:
    """Drops all reasoning; under `retain` it stays in context. A plain server would show something else."""
    thread = play.thread(echo=without_reasoning)
    await thread.work(3, reasoning=True)
    await thread.finish(reasoning=True)
    return Expected(plain="always")


@behaviour(free=True)
async def truncated(play: Play) -> Expected:
    """Gets a reply that ran into its limit, and goes on."""
    thread = play.thread()
    for line in (play.step(), play.answer()):
        line.free = False
        message = await thread.reply(line, max_tokens=play.random.randint(2, 7))
        thread.follow(message)
    await thread.work(1)
    await thread.finish()
    return Expected(flags=("forced_close",))


@behaviour("tools", free=True)
async def call_ids_altered(play: Play) -> Expected:
    """Writes call ids in its own way."""

    def echo(message: Wired) -> Wired:
        calls = [{**call, "id": f"{call['id'][:4]}_{call['id'][4:]}"} for call in message.get("tool_calls") or ()]
        return {**message, "tool_calls": calls} if calls else message

    thread = play.thread(echo=echo)
    await thread.work(3, calls=2 if play.can("parallel") else 1)
    await thread.finish()
    return Expected()


@behaviour(free=True, dialects=("chat", "responses", "messages"))
async def content_flips(play: Play) -> Expected:
    """Marks the newest message for a cache, which makes its content a list; in the next request it is a string again."""

    def shape(history: list[Wired]) -> list[Wired]:
        marked = dict(history[-1])
        part: dict[str, Any] = {"type": "text", "text": marked["content"], "cache_control": {"type": "ephemeral"}}
        marked["content"] = [part]
        return [*history[:-1], marked]

    thread = play.thread(shape=shape)
    await thread.work(3)
    await thread.finish()
    return Expected()


@behaviour("tools")
async def content_null(play: Play) -> Expected:
    """Sends the content beside calls as null, as an empty string, or not at all."""

    def echo(message: Wired) -> Wired:
        if message.get("content"):
            return message
        rest = {name: value for name, value in message.items() if name != "content"}
        return play.random.choice((rest, {**rest, "content": None}, {**rest, "content": ""}))

    thread = play.thread(echo=echo)
    await thread.work(4, text=False)
    await thread.finish()
    return Expected()


@behaviour("tools", "parallel", free=True)
async def results_out_of_order(play: Play) -> Expected:
    """Answers parallel calls in another order than they were made."""
    thread = play.thread()
    for count in (2, 3, 1):
        thread.follow(await thread.reply(play.step(calls=count)), backwards=True)
    await thread.finish()
    return Expected()


@behaviour(free=True, dialects=("chat", "responses", "messages"))
async def fields_differ(play: Play) -> Expected:
    """Adds and drops fields that mean nothing, and calls the system prompt a developer's."""

    def echo(message: Wired) -> Wired:
        dropped = {name: value for name, value in message.items() if name != "refusal"}
        return {**dropped, "annotations": [], "provider": {"trace": play.random.random()}}

    def shape(history: list[Wired]) -> list[Wired]:
        role, names = play.random.choice((("system", {}), ("developer", {"name": "somebody"})))
        shaped = {"system": {"role": role}, "user": names}
        return [{**message, **shaped.get(message["role"], {})} for message in history]

    thread = play.thread(echo=echo, shape=shape)
    await thread.work(3)
    await thread.finish()
    return Expected()


@behaviour("tools", "text_beside_call")
async def reply_in_two(play: Play) -> Expected:
    """Sends the text and the calls of a reply back as two messages."""

    def shape(history: list[Wired]) -> list[Wired]:
        sent = []
        for message in history:
            if message.get("tool_calls") and message.get("content"):
                sent.append({"role": "assistant", "content": message["content"]})
                message = {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}
            sent.append(message)
        return sent

    thread = play.thread(shape=shape)
    await thread.work(3, text=True)
    await thread.finish()
    return Expected()


@behaviour("tools", "closes")
async def call_malformed(play: Play) -> Expected:
    """Gets a call that cannot be read as text, complains about it, and goes on."""
    thread = play.thread()
    line = play.step(text=False, reasoning=False)
    line.garble = True
    message = await thread.reply(line)
    play.check(not message.get("tool_calls"), "a call without its end reached the harness as a call")
    play.check(bool(message.get("content")), "a call that cannot be read did not reach the harness as text")
    thread.user("This call cannot be read.")
    await thread.work(2)
    await thread.finish()
    return Expected()


@behaviour("closes", "other_ends")
async def other_end(play: Play) -> Expected:
    """Gets replies that ended on another end-of-turn id than the template's own; what was sampled stays."""
    thread = play.thread()
    for _ in range(2):
        line = play.step()
        line.other_end = True
        thread.follow(await thread.reply(line))
    await thread.finish()
    return Expected()


@behaviour(free=True)
async def special_text(play: Play) -> Expected:
    """Reads a file that spells the model's own special tokens."""
    return await _read_special_text(play)


@behaviour("plain_special_text", free=True, captures=SAMPLED)
async def special_text_plain(play: Play) -> Expected:
    """Reads such a file where it stays plain text."""
    return await _read_special_text(play)


async def _read_special_text(play: Play) -> Expected:
    special = sorted(play.target.codec.tokenizer.special, key=len)
    thread = play.thread()
    for _ in range(3):
        thread.follow(await thread.reply(play.step()))
        spelled = " ".join(play.random.sample(special, 2))
        end = play.target.codec.tokenizer.eos_token
        thread.history[-1]["content"] += f"\nbefore {spelled} between {end}assistant: {end}\nafter"
    await thread.finish()
    return Expected()


@behaviour()
async def stop_string(play: Play) -> Expected:
    """Stops a reply at a string of its own, and goes on."""
    thread = play.thread()
    for _ in range(2):
        line = play.answer(reasoning=False)
        line.text = f"{content.sentence(play.random)} <END> {content.sentence(play.random)}"
        message = await thread.reply(line, stop=["<END>"])
        play.check("<END>" not in message["content"], "the stop string is part of the text")
        thread.user("And?")
    await thread.finish()
    return Expected(flags=("forced_close",))


@behaviour(free=True)
async def unsampled_replies(play: Play) -> Expected:
    """Starts with examples: assistant messages that no model of ours ever sampled."""
    thread = play.thread()
    for _ in range(2):
        answer = {"role": "assistant", "content": content.sentence(play.random)}
        thread.history += [answer, {"role": "user", "content": content.sentence(play.random)}]
    await thread.work(2)
    await thread.finish()
    return Expected()


@behaviour(free=True, captures=SAMPLED)
async def sampled_freely(play: Play) -> Expected:
    """Talks to the model as it is, without a script."""
    thread = play.thread()
    for _ in range(4):
        thread.follow(await thread.reply(Line(free=True)))
    return Expected()


@behaviour("system", settings={"noise": [BILLING]}, free=True)
async def noise(play: Play) -> Expected:
    """Puts a line into its system prompt that changes on every call, and that the session's settings name."""

    def shape(history: list[Wired]) -> list[Wired]:
        line = f"x-anthropic-billing-header: cch={play.random.getrandbits(32):08x};\n"
        return [{**history[0], "content": line + history[0]["content"]}, *history[1:]]

    thread = play.thread(shape=shape)
    await thread.work(3)
    await thread.finish()
    return Expected()


@behaviour(settings={"noise": [REMINDER]}, free=True)
async def reminder_moves(play: Play) -> Expected:
    """Keeps a reminder of the date in the newest user message only."""

    def shape(history: list[Wired]) -> list[Wired]:
        newest = max(index for index, message in enumerate(history) if message["role"] == "user")
        day = play.random.randint(1, 28)
        text = f"{history[newest]['content']}\n<system-reminder>It is 2026-11-{day:02}.</system-reminder>"
        return [*history[:newest], {**history[newest], "content": text}, *history[newest + 1 :]]

    thread = play.thread(shape=shape)
    for _ in range(2):
        await thread.work(1)
        await thread.finish()
        thread.user(content.sentence(play.random))
    await thread.finish()
    return Expected()


@behaviour("notes", settings={"vanishing": "keep"}, free=True, captures=SAMPLED)
async def vanishing_kept(play: Play) -> Expected:
    """Ends every prompt with a note that is gone from the next; the session keeps it."""
    thread = play.thread(shape=lambda history: [*history, _note(play)])
    await thread.work(3)
    await thread.finish()
    return Expected(flags=("vanished_kept",))


@behaviour("prefill")
async def prefill(play: Play) -> Expected:
    """Begins the model's answer for it."""
    thread = play.thread()
    await thread.work(1)
    for _ in range(2):
        start = content.sentence(play.random, 2, 3)[:-1]
        line = play.line(f" {content.sentence(play.random)}")
        (choice,) = await thread.ask(line, messages=[*thread.history, {"role": "assistant", "content": start}])
        whole = start + choice["message"]["content"]
        thread.take({**choice, "message": {"role": "assistant", "content": whole}})
        thread.user(content.sentence(play.random))
    await thread.finish()
    return Expected()


@behaviour("prefill")
async def reply_resumed(play: Play) -> Expected:
    """Has a reply that ran into its limit written on."""
    thread = play.thread()
    line = replace(play.line(" ".join(content.sentence(play.random) for _ in range(3))), split=0.0)
    (choice,) = await thread.ask(line, max_tokens=12)
    start = {"role": "assistant", "content": choice["message"]["content"]}
    rest = replace(play.line(f" {content.sentence(play.random)}"), split=0.0)
    (choice,) = await thread.ask(rest, messages=[*thread.history, start])
    whole = start["content"] + choice["message"]["content"]
    thread.take({**choice, "message": {"role": "assistant", "content": whole}})
    thread.user(content.sentence(play.random))
    await thread.finish()
    return Expected()


@behaviour("tools", "keeps_reasoning", settings={"policy": "as_sent"})
async def reasoning_kept_as_sent(play: Play) -> Expected:
    """Sends all reasoning back under `as_sent`: there is nothing to fork for."""
    thread = play.thread()
    await thread.work(3, reasoning=True)
    return Expected()


@behaviour("tools", "keeps_reasoning", settings={"policy": "template"})
async def reasoning_dropped_template(play: Play) -> Expected:
    """Drops reasoning that the template would have shown, under `template`: the model keeps what the template keeps."""
    thread = play.thread(echo=without_reasoning)
    await thread.work(3, reasoning=True)
    return Expected()


def _note(play: Play) -> Wired:
    return {"role": "user", "content": f"(Note {play.random.randint(1, 999)}: the workspace is clean.)"}
