"""Traffic patterns of harnesses, each with the roles, lineage, rows and last answer that docs/roles.md promises.

Every pattern goes through the real gateway: dialect, planner, graph, builders. Roles are written as one letter a turn.
Lineage is written as one word a turn: `-` for a root or the parent's index, then `<n` for an origin beside the parent,
`~n` for one that was inferred, and the reason. Rows are the turns that each row trains.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.gateway.gateway_rig import (
    BASH,
    EDIT,
    TOOLS,
    Body,
    Opened,
    Rig,
    Start,
    Wire,
    eventually,
    message_of,
    running_gateway,
    system,
    user,
)
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say, ScriptedEngine
from towline.gateway.model_routes import ModelRoute
from towline.schema import Trajectory
from towline.tokens.codec import ModelCodec
from towline.tokens.graph.roles import last_answer

TASK = "Fix the failing test in the parser."
RECORDED = Path(__file__).parents[1] / "tokens" / "recorded"
LETTERS = {"main": "m", "subagent": "a", "compaction": "c", "side": "s", "discarded": "d"}
SYSTEM = system("You are a coding agent.")
OTHER = system("You are another agent.")
TITLE = system("Write a title.")
SEARCH = "Search the tree for the parser."


@dataclass
class Expected:
    roles: str
    lineage: str
    rows: list[list[int]]
    answer: str
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Words that the notes hold, one for each note; in order."""


@dataclass
class Play:
    """A harness in the hands of a test."""

    rig: Rig
    session: Opened
    replies: dict[str, deque[Say]]

    async def ask(self, messages: list[Body], say: Say | str, **fields: Any) -> Body:
        """One call; the reply as the wire had it."""
        headers = fields.pop("headers", {})
        body = self._body(messages, say, fields)
        status, made = await self.rig.post(self.session, body, headers=headers)
        assert status == 200, made
        return message_of(made)

    async def lose(self, messages: list[Body], say: Say | str, **fields: Any) -> None:
        """One call whose client leaves before it gets its answer."""
        graph = self.rig.gateway.sessions[self.session.id].graph
        turn = len(graph.nodes)
        wire = await Wire.send(self.session, self._body(messages, say, fields))
        await eventually(lambda: len(graph.nodes) > turn, "the turn begins")
        wire.cut()
        await eventually(lambda: graph.nodes[turn].finish is not None, "the turn ends")

    def _body(self, messages: list[Body], say: Say | str, fields: dict[str, Any]) -> Body:
        said = Say(say) if isinstance(say, str) else say
        self.replies.setdefault(str(messages[-1].get("content")), deque()).append(said)
        body = {"model": "m", "messages": messages, "tools": TOOLS, **fields}
        return {name: value for name, value in body.items() if value != []}


def calls(*commands: str, text: str = "", name: str = "bash", key: str = "command") -> Say:
    return Say(text, None, [ToolCall("", name, {key: command}) for command in commands])


def answered(message: Body, *texts: str) -> list[Body]:
    """The message and a result for each of its calls."""
    texts = texts or ("ok",) * len(message["tool_calls"])
    results = zip(message["tool_calls"], texts, strict=True)
    return [message, *({"role": "tool", "tool_call_id": c["id"], "content": text} for c, text in results)]


Pattern = Callable[[Play], Awaitable[None]]
PATTERNS: dict[str, tuple[Pattern, Expected]] = {}


def pattern(roles: str, lineage: str, rows: list[list[int]], answer: str, **more: Any) -> Callable[[Pattern], Pattern]:
    def keep(play: Pattern) -> Pattern:
        PATTERNS[play.__name__] = (play, Expected(roles, lineage, rows, answer, **more))
        return play

    return keep


# Main, and what continues it


@pattern("mmm", "- 0 1", [[0, 1, 2]], "Fixed.")
async def verbatim(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    history += answered(await play.ask(history, calls("pytest")), "1 failed")
    await play.ask(history, "Fixed.")


@pattern("mmm", "- -<0:history_edited 1", [[0], [1, 2]], "Fixed.")
async def first_reply_edited(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    await play.ask(history, "I will look.")
    history += [{"role": "assistant", "content": "(other words)"}, user("Go on.")]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    await play.ask(history, "Fixed.")


@pattern("mmmm", "- 0 0:history_edited 2", [[0, 1], [2, 3]], "Fixed.")
async def middle_reply_edited(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    await play.ask(history, "I see a file.")
    history += [{"role": "assistant", "content": "(other words)"}, user("Go on.")]
    history += answered(await play.ask(history, calls("cat a.py")), "x = 1")
    await play.ask(history, "Fixed.")


@pattern("mmm", "- -<0:history_edited -<1:history_edited", [[0], [1], [2]], "Three.")
async def every_reply_replaced(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    for word in ("One.", "Two.", "Three."):
        await play.ask(history, word)
        history += [{"role": "assistant", "content": f"(not {word})"}, user(f"After {word}")]


@pattern(
    "mmm",
    "- -<0:history_edited -<1:history_edited",
    [[0, 1, 2]],
    "Thought 2: it is 6.",
    notes=("2 of ",),
)
async def line_appended_to_each_reply(play: Play) -> None:
    """One row: all but the ends of the turns stands in the context that it was sampled in."""
    history = [SYSTEM, user(TASK)]
    for number in range(3):
        reply = await play.ask(history, f"Thought {number}: it is {number * 3}.")
        history += [{**reply, "content": reply["content"] + "\n<end_code>"}, user(f"Observation {number}")]


@pattern("mmm", "- 0 1", [[0, 1, 2]], "Answer 2</code>")
async def stop_string_put_back(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    for number in range(3):
        stop = {"stop": ["</code>"]} if number < 2 else {}
        reply = await play.ask(history, f"Answer {number}</code>", **stop)
        history += [{**reply, "content": f"Answer {number}</code>"}, user(f"Observation {number}")]


@pattern("mmm", "- 0 -<1:history_edited", [[0, 1], [2]], "Fixed.")
async def tool_call_turns_merged(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    first = await play.ask(history, calls("ls"))
    second = await play.ask([*history, *answered(first, "a.py")], calls("pwd"))
    merged = {"role": "assistant", "content": "", "tool_calls": first["tool_calls"] + second["tool_calls"]}
    await play.ask([*history, *answered(merged, "a.py", "/src")], "Fixed.")


@pattern("mmm", "- 0 -<1:history_edited", [[0, 1], [2]], "Fixed.")
async def task_edited(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    history += answered(await play.ask(history, calls("pwd")), "/src")
    history[1] = user(f"{TASK} Be quick.")
    await play.ask(history, "Fixed.")


@pattern("mmm", "- -<0:history_edited 1", [[0], [1, 2]], "Fixed.")
async def user_messages_merged(play: Play) -> None:
    reply = await play.ask([SYSTEM, user(TASK), user("Be quick.")], "I will look at the parser.")
    history = [SYSTEM, user(f"{TASK}\n\nBe quick."), reply, user("Go on.")]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    await play.ask(history, "Fixed.")


@pattern("mm", "- -<0:history_edited", [[0], [1]], "I start with the docs.")
async def interrupted_after_the_first_reply(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    await play.ask(history, "I start with the parser.")
    await play.ask([*history, user("Stop. Start with the docs.")], "I start with the docs.")


@pattern("dm", "- -<0:history_edited", [[1]], "Yes.", notes=("discarded",))
async def interrupted_before_any_reply(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    await play.lose(history, Say("I start with the parser.", delay=0.2))
    await play.ask([*history, user("Stop. Do nothing.")], "Yes.")


@pattern("mmm", "- -<0:system_changed 1", [[0], [1, 2]], "It is 42.")
async def hand_off(play: Play) -> None:
    history = [user("What is 17 plus 25? " + TASK)]
    history += answered(await play.ask([SYSTEM, *history], calls("tutor", name="transfer", key="to")), "tutor")
    history += answered(await play.ask([OTHER, *history], calls("17+25"), tools=[EDIT]), "42")
    await play.ask([OTHER, *history], "It is 42.", tools=[EDIT])


@pattern("mmmm", "- -<0:system_changed 0 2", [[0, 2, 3], [1]], "All done.")
async def hand_off_and_back(play: Play) -> None:
    history = [user(TASK)]
    history += answered(await play.ask([SYSTEM, *history], calls("tutor", name="transfer", key="to")), "tutor")
    history += answered(await play.ask([OTHER, *history], calls("boss", name="back", key="to"), tools=[EDIT]), "boss")
    history += answered(await play.ask([SYSTEM, *history], calls("ls")), "a.py")
    await play.ask([SYSTEM, *history], "All done.")


@pattern("mm", "- -<0:system_changed", [[0], [1]], "Invoice 7 is 30 euros.")
async def transfer_that_quotes(play: Play) -> None:
    history = [user(TASK)]
    await play.ask([SYSTEM, *history], calls("billing", name="transfer_to_agent", key="agent_name"))
    quoted = user("For context: [desk] called tool `transfer_to_agent` with parameters: {'agent_name': 'billing'}")
    await play.ask([OTHER, *history, quoted], "Invoice 7 is 30 euros.", tools=[EDIT])


@pattern("mm", "- -~0:system_changed", [[0], [1]], "It is 42.")
async def hand_off_without_its_history(play: Play) -> None:
    await play.ask([SYSTEM, user(TASK)], calls("tutor", name="transfer", key="to"))
    await play.ask([OTHER, user(TASK)], "It is 42.", tools=[EDIT])


@pattern("mmm", "- 0 -~1:system_changed", [[0, 1], [2]], "It is 42.")
async def hand_off_with_its_history_in_one_message(play: Play) -> None:
    """OpenAI Agents with `nest_handoff_history`: the history is text in the assistant's name."""
    history = [user(TASK)]
    history += answered(await play.ask([SYSTEM, *history], calls("ls")), "a.py")
    await play.ask([SYSTEM, *history], calls("tutor", name="transfer", key="to"))
    text = f"For context, here is the conversation so far:\n1. user: {TASK}\n2. bash ls: a.py\n3. transfer to tutor"
    await play.ask([OTHER, {"role": "assistant", "content": text}], "It is 42.", tools=[EDIT])


@pattern("mm", "- -<0:system_changed", [[0], [1]], "Built as planned.")
async def pipeline_of_agents(play: Play) -> None:
    plan = await play.ask([SYSTEM, user(TASK)], "The plan: change one line.")
    await play.ask([OTHER, user(TASK), user(f"Plan: {plan['content']}")], "Built as planned.")


@pattern("mm", "- -<0:tools_changed", [[0], [1]], "It is fixed.")
async def last_answer_without_tools(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    await play.ask([*history, user("No more steps: answer.")], "It is fixed.", tools=[])


@pattern("mm", "- -<0:system_changed", [[0], [1]], "It is fixed.")
async def last_answer_under_another_prompt(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    await play.ask([OTHER, *history[1:], user("Answer in its place.")], "It is fixed.", tools=[])


@pattern("mmm", "- -<0:tools_changed 1", [[0], [1, 2]], "Fixed.")
async def tools_changed_in_mid_run(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls"), tools=[BASH]), "a.py")
    history += answered(await play.ask(history, calls("pwd")), "/src")
    await play.ask(history, "Fixed.")


@pattern("mmm", "- -<0:system_changed -<1:system_changed", [[0], [1], [2]], "Fixed.")
async def system_prompt_with_a_clock(play: Play) -> None:
    history = [user(TASK)]
    history += answered(await play.ask([system("It is 10:00."), *history], calls("ls")), "a.py")
    history += answered(await play.ask([system("It is 10:01."), *history], calls("pwd")), "/src")
    await play.ask([system("It is 10:02."), *history], "Fixed.")


@pattern("mmm", "- 0 1", [[0, 1, 2]], "Fixed.")
async def policy_under_two_names(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls"), model="large"), "a.py")
    history += answered(await play.ask(history, calls("pwd"), model="small"), "/src")
    await play.ask(history, "Fixed.", model="large")


@pattern("mam", "- -~0:system_changed 0", [[0, 2], [1]], "Fixed.")
async def sub_agent_under_another_name(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    first = await play.ask(history, calls("find the bug in the parser", name="task", key="prompt"), model="large")
    await play.ask([OTHER, user("find the bug in the parser")], "It is in line 3.", model="small")
    await play.ask([*history, *answered(first, "It is in line 3.")], "Fixed.", model="large")


@pattern("mmm", "- 0 1", [[0, 1, 2]], "And the docs.")
async def resume(play: Play) -> None:
    """The program starts again, sends its history in another style, and gets a further instruction."""
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    history += [await play.ask(history, "Fixed.")]
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} if m.get("content") else m for m in history]
    await play.ask([*parts, user("Now the docs.")], "And the docs.")


@pattern("mm", "- 0", [[0, 1]], "Fixed.")
async def retry(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    await play.lose(history, Say("", None, calls("ls").calls, delay=0.2))
    first = await play.ask(history, "never sampled", headers={"x-stainless-retry-count": "1"})
    await play.ask([*history, *answered(first, "a.py")], "Fixed.")


@pattern("mmm", "- -<0:sibling 1", [[0], [1, 2]], "Fixed.")
async def siblings(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    await play.ask(history, calls("ls"))
    second = await play.ask(history, calls("pwd"))
    await play.ask([*history, *answered(second, "/src")], "Fixed.")


@pattern("mm", "- -<0:vanished_message", [[0], [1]], "Fixed.")
async def vanished_note(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask([*history, user("(Nothing is pending.)")], calls("ls")), "a.py")
    await play.ask([*history, user("(Still nothing.)")], "Fixed.")


# Compaction


@pattern("mccc", "- -<0:tools_changed -<1:compaction 2", [[0], [1], [2, 3]], "Fixed.")
async def compaction_as_codex_does_it(play: Play) -> None:
    before, after = {"x-codex-window-id": "w:0"}, {"x-codex-window-id": "w:1"}
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls"), headers=before), "a.py")
    summary = await play.ask([*history, user("Summarise.")], "The parser is broken.", tools=[], headers=before)
    history = [SYSTEM, user(TASK), user(f"So far: {summary['content']}")]
    history += answered(await play.ask(history, calls("pwd"), headers=after), "/src")
    await play.ask(history, "Fixed.", headers=after)


@pattern("mmcc", "- 0 -~1:compaction 2", [[0, 1], [2, 3]], "Fixed.")
async def compaction_as_claude_code_does_it(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    summary = await play.ask([*history, user("Summarise.")], "The parser is broken, line 3.")
    history = [SYSTEM, user(f"This session continues another: {summary['content']}")]
    history += answered(await play.ask(history, calls("pwd")), "/src")
    await play.ask(history, "Fixed.")


@pattern("mmccc", "- 0 -~1:side -~2:compaction 3", [[0, 1], [2], [3, 4]], "Fixed.")
async def compaction_by_a_call_that_quotes_the_history(play: Play) -> None:
    """The summary is written under another prompt, from the history as text."""
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    history += answered(await play.ask(history, calls("cat a.py")), "x = 1")
    summary = await play.ask([TITLE, user("Summarise: ls, cat a.py")], "The parser is broken, line 3.", tools=[])
    history = [SYSTEM, user(f"So far: {summary['content']}")]
    history += answered(await play.ask(history, calls("pwd")), "/src")
    await play.ask(history, "Fixed.")


@pattern(
    "maaaaam",
    "- -~0:system_changed 1 -~2:side -~3:compaction 4 0",
    [[0, 6], [1, 2], [3], [4, 5]],
    "Fixed.",
    notes=("main trains",),
)
async def compacted_sub_agent(play: Play) -> None:
    """The sub-agent stays one, and so does the call for its summary."""
    history = [SYSTEM, user(TASK)]
    made = await play.ask(history, calls(SEARCH, name="task", key="prompt"))
    thread = [OTHER, user(SEARCH)]
    for command in ("ls", "cat a.py"):
        thread += answered(await play.ask(thread, calls(command), tools=[BASH]), f"ran {command}")
    summary = await play.ask([TITLE, user("Summarise: ls, cat a.py")], "The parser is in a.py.", tools=[])
    thread = [OTHER, user(f"So far: {summary['content']}")]
    thread += answered(await play.ask(thread, calls("pwd"), tools=[BASH]), "/src")
    await play.ask(thread, "It is in a.py.", tools=[BASH])
    await play.ask(history + answered(made, "It is in a.py."), "Fixed.")


@pattern("mmc", "- 0 -~1:compaction", [[0, 1], [2]], "I will look.")
async def summary_is_no_answer(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls", text="I will look.")), "a.py")
    summary = await play.ask([*history, user("Summarise.")], "The parser is broken, line 3.")
    await play.ask([SYSTEM, user(f"So far: {summary['content']}")], calls("pwd"))


# Sub-agents


@pattern(
    "maaaam",
    "- -~0:system_changed -~0:system_changed 1 2 0",
    [[0, 5], [1, 3], [2, 4]],
    "Both found.",
    notes=("main trains",),
)
async def parallel_sub_agents_without_headers(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    work = ("search the folder src/ for the bug", "search the folder lib/ for the bug")
    first = await play.ask(history, calls(*work, name="task", key="prompt"))
    threads = [[OTHER, user(prompt)] for prompt in work]
    for thread in threads:
        thread += answered(await play.ask(thread, calls(f"grep {thread[1]['content']}"), tools=[BASH]), "found")
    for thread in threads:
        await play.ask([*thread[:-1], {**thread[-1], "content": f"{thread[1]['content']}: x"}], "Here.", tools=[BASH])
    await play.ask([*history, *answered(first, "Here.", "Here.")], "Both found.")


@pattern(
    "maaaam",
    "- -~0:system_changed -~0:system_changed 1 2 0",
    [[0, 5], [1, 3], [2, 4]],
    "Both found.",
    notes=("main trains",),
)
async def parallel_sub_agents_with_the_same_task(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    made = await play.ask(history, calls(SEARCH, SEARCH, name="task", key="prompt"))
    asked = [OTHER, user(SEARCH)]
    first = asked + answered(await play.ask(asked, calls("ls a")), "a")
    second = asked + answered(await play.ask(asked, calls("ls b")), "b")
    await play.ask(first, "It is in a, I think.")
    await play.ask(second, "It is in b, I think.")
    await play.ask(history + answered(made, "a", "b"), "Both found.")


@pattern(
    "maamaam",
    "- -~0:system_changed 1 0 -~3:system_changed -<4:sibling 3",
    [[0, 3, 6], [1, 2], [4], [5]],
    "Found.",
)
async def sub_agent_started_twice_with_the_same_task(play: Play) -> None:
    """The second one samples its first turn twice."""
    history = [SYSTEM, user(TASK)]
    made = await play.ask(history, calls(SEARCH, name="task", key="prompt"))
    asked = [OTHER, user(SEARCH)]
    await play.ask(asked + answered(await play.ask(asked, calls("ls a")), "a"), "Nothing there.")
    history += answered(made, "Nothing there.")
    made = await play.ask(history, calls(SEARCH, name="task", key="prompt"))
    await play.ask(asked, "It is in a, I think.")
    await play.ask(asked, "It is in b, I think.")
    await play.ask(history + answered(made, "b"), "Found.")


@pattern("maam", "- -~0:subagent -~0:subagent 0", [[0, 3], [1], [2]], "Both found.")
async def sub_agents_under_the_same_prompt_and_tools(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    work = ("search the folder src/ for the bug", "search the folder lib/ for the bug")
    first = await play.ask(history, calls(*work, name="task", key="prompt"))
    await asyncio.gather(*(play.ask([SYSTEM, user(prompt)], "Here.") for prompt in work))
    await play.ask([*history, *answered(first, "Here.", "Here.")], "Both found.")


@pattern(
    "maaam",
    "- -~0:system_changed -~1:system_changed 1 0",
    [[0, 4], [1, 3], [2]],
    "Fixed.",
    notes=("main trains",),
)
async def sub_agent_of_a_sub_agent(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    first = await play.ask(history, calls("search the folder src/ for the bug", name="task", key="prompt"))
    inner = [OTHER, user("search the folder src/ for the bug")]
    second = await play.ask(inner, calls("read the file src/a.py line by line", name="task", key="prompt"))
    await play.ask([system("You read."), user("read the file src/a.py line by line")], "Line 3.")
    await play.ask([*inner, *answered(second, "Line 3.")], "In a.py.")
    await play.ask([*history, *answered(first, "In a.py.")], "Fixed.")


@pattern(
    "maaaam", "- -~0:system_changed 1 -~0:system_changed 3 0", [[0, 5], [1, 2], [3, 4]], "Both found.", notes=("main",)
)
async def several_sub_agents_of_one_call(play: Play) -> None:
    """The second one begins while a call of the first is open, and repeats no call's words: it is of the same kind."""
    history = [SYSTEM, user(TASK)]
    first = await play.ask(history, calls("all", name="research", key="what"))
    threads = [[OTHER, user(f"Your topic is {topic}.")] for topic in ("parsers", "printers")]
    for thread in threads:
        thread += answered(
            await play.ask(thread, calls(f"grep {thread[1]['content']}"), tools=[BASH]), f"{len(thread)}"
        )
        thread += answered(await play.ask(thread, calls("more"), tools=[BASH]), "x")
    await play.ask([*history, *answered(first, "Here.")], "Both found.")


@pattern("mmca", "- 0 -~1:compaction -~2:subagent", [[0, 1], [2], [3]], "Looking on.")
async def compaction_with_a_summary_taken_out(play: Play) -> None:
    """The summary stands within other words, and a sub-agent follows that has main's own prompt and tools."""
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    said = "<analysis>\nhm\n</analysis>\n<summary>\nThe parser is broken in line 3.\n</summary>"
    await play.ask([*history, user("Summarise.")], said)
    after = [SYSTEM, user("This session continues another.\nThe parser is broken in line 3.")]
    await play.ask(after, calls("x", name="task", key="prompt", text="Looking on."))
    await play.ask([SYSTEM, user("x")], "Found.")


@pattern("ma", "- -~0:unmatched", [[0], [1]], "A.", notes=("matches no conversation",))
async def two_conversations_before_any_reply(play: Play) -> None:
    """Nothing was compacted where nothing was said yet."""
    graph = play.rig.gateway.sessions[play.session.id].graph
    first = asyncio.ensure_future(play.ask([SYSTEM, user(TASK)], Say("A.", delay=0.3)))
    await eventually(lambda: graph.nodes, "the first turn begins")
    await play.ask([SYSTEM, user("Something else.")], "B.")
    await first


@pattern("mam", "- -~0:system_changed 0", [[0, 2], [1]], "Fixed.")
async def sub_agent_by_header(play: Play) -> None:
    session = {"x-claude-code-session-id": "s"}
    history = [SYSTEM, user(TASK)]
    first = await play.ask(history, calls("look around", name="task", key="prompt"), headers=session)
    agent = {**session, "x-claude-code-agent-id": "a"}
    await play.ask([OTHER, user("look around")], "Nothing.", headers=agent)
    await play.ask([*history, *answered(first, "Nothing.")], "Fixed.", headers=session)


@pattern("mam", "- -<0:system_changed 0", [[0, 2], [1]], "Fixed.")
async def memory_agent_beside_main(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    await play.ask([OTHER, *history[1:], user("What is worth remembering?")], "The parser is in a.py.")
    await play.ask(history, "Fixed.")


# Side calls


@pattern("smm", "- -~0:system_changed 1", [[1, 2]], "Fixed.", notes=("side",))
async def title_first(play: Play) -> None:
    await play.ask([TITLE, user(f"Title for: {TASK}")], "A failing test", tools=[])
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    await play.ask(history, "Fixed.")


@pattern("msm", "- -~0:side 0", [[0, 2]], "Fixed.", notes=("side",))
async def side_call_without_tools(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    await play.ask([TITLE, user("Title for: work on a.py")], "A parser", tools=[])
    await play.ask(history, "Fixed.")


@pattern("msm", "- -<0:tools_changed 0", [[0, 2]], "Fixed.", notes=("side",))
async def summary_beside_main(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    await play.ask([*history, user("Sum up for the log.")], "Listed files.", tools=[])
    await play.ask(history, "Fixed.")


@pattern("mms", "- 0 -<1:system_changed", [[0, 1]], "Fixed.", notes=("side",))
async def memory_after_the_answer(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    history += [await play.ask(history, "Fixed.")]
    await play.ask([TITLE, *history[1:], user("What is worth remembering?")], "A parser.", tools=[])


COMMIT = {"roles": [{"role": "side", "system": "commit messages"}]}


@pattern("msm", "- -~0:system_changed 0", [[0, 2]], "And more.", settings=COMMIT, notes=("side",))
async def commit_message_by_setting(play: Play) -> None:
    """Aider: no tools anywhere; only a setting can tell that a conversation is aside."""
    history = [SYSTEM, user(TASK)]
    history += [await play.ask(history, "Edited a.py.", tools=[])]
    await play.ask([system("You write commit messages."), user("diff a.py")], "fix: parser", tools=[], model="weak")
    await play.ask([*history, user("More.")], "And more.", tools=[])


@pattern(
    "mssm",
    "- -~0:side -~0:system_changed 0",
    [[0, 3]],
    "Fixed.",
    settings={"roles": [{"role": "side", "model": "weak*"}]},
    notes=("side",),
)
async def model_name_by_setting(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    await play.ask([TITLE, user("Name it.")], "A", tools=[], model="weak-1")
    await play.ask([OTHER, user("Check it.")], "B", model="weak-2")
    await play.ask(history, "Fixed.")


@pattern(
    "smm",
    "- -~0:system_changed 1",
    [[1, 2]],
    "Done.",
    settings={"roles": [{"role": "main", "tools": "edit"}, {"role": "side", "tools": "bash"}]},
    notes=("side",),
)
async def tools_by_setting(play: Play) -> None:
    await play.ask([SYSTEM, user(TASK)], "I only look.", tools=[BASH])
    history = [OTHER, user("Edit it.")]
    history += answered(await play.ask(history, calls("a.py", name="edit", key="path"), tools=[EDIT]), "ok")
    await play.ask(history, "Done.", tools=[EDIT])


@pattern("msm", "- -~0:side 0", [[0, 2]], "Fixed.", settings={"models": {"small*": "small"}})
async def frozen_model_aside(play: Play) -> None:
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    await play.ask([TITLE, user("Name it.")], "A", tools=[], model="small-1")
    await play.ask(history, "Fixed.")


@pattern("mmm", "- -<0:model_changed 0", [[0, 2]], "Fixed.", settings={"models": {"small*": "small"}})
async def frozen_model_in_mains_place(play: Play) -> None:
    """A turn of main that another engine sampled is main, and not trained."""
    history = [SYSTEM, user(TASK)]
    history += answered(await play.ask(history, calls("ls")), "a.py")
    history += answered(await play.ask(history, calls("pwd"), model="small-1"), "/src")
    await play.ask(history, "Fixed.")


def lineage(made: Trajectory) -> str:
    number = {turn.id: str(turn.index) for turn in made.turns}
    words = []
    for turn in made.turns:
        word = number[turn.parent] if turn.parent else "-"
        if turn.origin and turn.origin != turn.parent:
            word += ("~" if turn.origin_inferred else "<") + number[turn.origin]
        words.append(word + (f":{turn.reason}" if turn.reason else ""))
    return " ".join(words)


def rows(made: Trajectory) -> list[list[int]]:
    return [sorted({int(i) for i in trace.turn_ids[trace.loss_mask == 1]}) for trace in made.traces]


def roles(made: Trajectory) -> str:
    return "".join(LETTERS[turn.role] for turn in made.turns)


def check(made: Trajectory, expected: Expected) -> None:
    assert roles(made) == expected.roles, [(turn.index, turn.role_reason) for turn in made.turns]
    assert lineage(made) == expected.lineage
    assert sorted(rows(made)) == sorted(expected.rows)
    assert last_answer(made) == expected.answer
    assert all(turn.role_reason for turn in made.turns)
    notes = made.metadata.get("notes", [])
    assert len(notes) == len(expected.notes), notes
    for note, word in zip(notes, expected.notes, strict=True):
        assert word in note
    for turn in made.turns:
        assert bool(turn.difference) == (turn.reason in ("history_edited", "unmatched")), turn.difference


@pytest.mark.parametrize("name", PATTERNS)
async def test_pattern(name: str, start: Start, codec: ModelCodec) -> None:
    play, expected = PATTERNS[name]
    replies: dict[str, deque[Say]] = {}

    def script(request: Request) -> Say:
        return replies[request.messages[-1].text].popleft()

    small = ModelRoute(ScriptedEngine(codec, script), codec, "small")
    async with start(script, others={"small": small}) as rig:
        session = await rig.open(instruction=TASK, settings=expected.settings)
        await play(Play(rig, session, replies))
        made = await rig.seal(session)
    check(made, expected)


RECORDINGS = {
    "openai_agents_handoff": Expected("mmm", "- -<0:system_changed 1", [[0], [1, 2]], "17 + 25 is 42."),
    "openai_agents_tools": Expected(
        "maam",
        "- -~0:system_changed -~0:system_changed 0",
        [[1], [2], [0, 3]],
        "Spanish: Hola. French: Bonjour.",
    ),
    "google_adk_transfer": Expected("mmm", "- -<0:system_changed 1", [[0], [1, 2]], "Your invoice is 30 euros."),
    "deepagents": Expected(
        "maaaam",
        "- -~0:system_changed -~0:system_changed 1 2 0",
        [[1, 3], [2, 4], [0, 5]],
        "It rains in both cities.",
    ),
    "smolagents_code": Expected(
        "mmmm",
        "- -<0:history_edited -<1:history_edited -<2:system_changed",
        [[0, 1, 2], [3]],
        "The sum is 5050.",
        notes=("end_of_turn",),
    ),
    "smolagents_calls": Expected(
        "mmm",
        "- -<0:history_edited -<1:system_changed",
        [[0], [1], [2]],
        "Two files: a.txt and b.txt.",
    ),
    "goose": Expected(
        "smmmm",
        "- -~0:system_changed 1 -<2:history_edited -<3:history_edited",
        [[1, 2], [3], [4]],
        "There are no files.",
        notes=("side",),
    ),
}


@pytest.mark.parametrize("name", RECORDINGS)
async def test_recorded(name: str, start: Start) -> None:
    """What real programs sent, with the replies that they got."""
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    replies = deque(
        Say(r["text"], r["reasoning"], [ToolCall("", tool, arguments) for tool, arguments in r["calls"]])
        for r in (item["reply"] for item in recorded["calls"])
    )
    async with start(lambda _: replies.popleft()) as rig:
        session = await rig.open(instruction=recorded["instruction"])
        headers = {**session.headers, "x-goog-api-key": session.key}
        for item in recorded["calls"]:
            async with rig.web.post(session.root + item["path"], json=item["body"], headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
        made = await rig.seal(session)
    check(made, RECORDINGS[name])


async def test_rows_of_a_harness_that_appends_to_every_reply(start: Start) -> None:
    """Sixty turns, one row: tokens grow with the conversation, not with its square."""
    async with start(lambda request: Say(f"Thought: number {len(request.messages)} of many.\nCode: x += 1")) as rig:
        session = await rig.open(instruction=TASK)
        history = [SYSTEM, user(TASK)]
        for number in range(60):
            status, made = await rig.post(session, {"model": "m", "messages": history})
            assert status == 200, made
            said = message_of(made)["content"]
            history = [*history, {"role": "assistant", "content": f"{said}\n<end_code>"}, user(f"Observation {number}")]
        made = await rig.seal(session)
    report = made.report
    assert roles(made) == "m" * 60
    assert report.chains == 1
    assert report.row_over_distinct == 1.0
    assert report.row_tokens < 60 * 60
    assert report.untrained_tokens == {"end_of_turn": 59}
    assert report.trained_tokens == sum(len(turn.sampled) - turn.unended for turn in made.turns)


async def test_rows_after_a_restart(codec: ModelCodec, tmp_path: Path) -> None:
    """What the journal holds of such turns is enough to continue them, and to build the same row."""

    def script(request: Request) -> Say:
        return Say(f"Thought: number {len(request.messages)} of many.")

    history = [SYSTEM, user(TASK)]
    session: Opened | None = None
    for _ in range(2):
        async with running_gateway(codec, tmp_path, script) as rig:
            session = session or await rig.open(instruction=TASK, settings={"roles": [{"role": "main", "model": "m"}]})
            session.base_url = rig.running.base_url + "/v1"
            for _ in range(2):
                status, made = await rig.post(session, {"model": "m", "messages": history})
                assert status == 200, made
                said = f"{message_of(made)['content']}\n<end_code>"
                history = [*history, {"role": "assistant", "content": said}, user(f"Observation {len(history)}")]
            built = await rig.trajectory(session)
    assert rows(built) == [[0, 1, 2, 3]]
    assert [turn.role_reason for turn in built.turns] == ["setting roles"] * 4
    assert all(turn.difference for turn in built.turns[1:])
