"""What conversations a target can have: what its family documents, and its template shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from towline.audit.content import TOOLS
from towline.audit.formats import Format, FormatCall
from towline.audit.oracle import HfMessage, Oracle, Refusal

_SIMPLE = "It is quite simple."
_DONE = "All of it is done."


@dataclass(frozen=True, slots=True)
class Abilities:
    """What conversations a target can have."""

    system: bool = False
    tools: bool = False
    """The family documents how calls are written, and the template shows calls and results."""
    parallel: bool = False
    """Several calls in a turn."""
    text_beside_call: bool = False
    reasoning: bool = False
    """The family documents how reasoning is written."""
    keeps_reasoning: bool = False
    """The template shows the reasoning of a turn behind its tool results."""
    strips_reasoning: bool = False
    """The template takes reasoning out once a user message follows."""
    notes: bool = False
    """A user message may follow a result, or another user message."""
    prefill: bool = False
    closes: bool = False
    """The end of a turn belongs to the turn."""
    opens: bool = False
    """The end of a turn is what opens the next message."""
    other_ends: bool = False
    """There are several end-of-turn ids that a model can sample."""
    plain_special_text: bool = False
    """Text that spells a special token stays text."""
    text_round_trips: bool = False
    """A canonical answer is re-rendered to the ids it was sampled as."""
    call_round_trips: bool = False


def probe(
    oracle: Oracle, format: Format, ends: Iterable[str], *, other_ends: bool, plain_special_text: bool
) -> Abilities:
    """Ask the template. `ends` are the tokens that end a message; the last two are settings of the target."""
    asked = _Probe(oracle, format)
    user, more, called, both, results = asked.user, asked.more, asked.called, asked.both, asked.results
    tools = format.calls and asked.shown([user, called, results[0]], "ls 1", "result 1")
    beside = {**called, "content": "Now this."}
    reasoning = format.think is not None
    thought: HfMessage = {"role": "assistant", "content": _DONE, "reasoning": _SIMPLE}
    closes = asked.closes(ends)
    return Abilities(
        system=oracle.shows([{"role": "system", "content": "Be brief."}, user], "Be brief."),
        tools=tools,
        parallel=tools and format.parallel and asked.shown([user, both, *results], "ls 1", "ls 2", "result 2"),
        text_beside_call=tools and format.beside and asked.shown([user, beside, results[0]], "Now this.", "ls 1"),
        reasoning=reasoning,
        keeps_reasoning=reasoning
        and tools
        and asked.shown([user, {**called, "reasoning": _SIMPLE}, results[0]], _SIMPLE),
        strips_reasoning=reasoning
        and oracle.shows([user, thought], _SIMPLE, generation=False)
        and not oracle.shows([user, thought, more], _SIMPLE),
        notes=oracle.shows([user, more], more["content"])
        and (not tools or asked.shown([user, called, results[0], more], more["content"])),
        prefill=asked.prefills(),
        closes=closes,
        opens=not closes,
        other_ends=other_ends,
        plain_special_text=plain_special_text,
        text_round_trips=asked.round_trips({"role": "assistant", "content": _DONE}, [more], ()),
        call_round_trips=tools and asked.round_trips(called, results[:1], TOOLS),
    )


class _Probe:
    def __init__(self, oracle: Oracle, format: Format):
        self.oracle = oracle
        self.format = format
        self.user: HfMessage = {"role": "user", "content": "Please do it."}
        self.more: HfMessage = {"role": "user", "content": "Go on, do."}
        calls = [
            {"id": f"abcdefgh{n}", "name": "bash", "arguments": {"command": f"ls {n}", "timeout": n}} for n in (1, 2)
        ]
        self.both: HfMessage = {"role": "assistant", "content": "", "tool_calls": calls}
        self.called: HfMessage = {"role": "assistant", "content": "", "tool_calls": calls[:1]}
        self.results: list[HfMessage] = [
            {"role": "tool", "content": f"result {n}", "tool_call_id": call["id"], "name": "bash"}
            for n, call in enumerate(calls, 1)
        ]

    def shown(self, messages: Sequence[HfMessage], *texts: str) -> bool:
        return all(self.oracle.shows(messages, text, TOOLS) for text in texts)

    def prefills(self) -> bool:
        start = {"role": "assistant", "content": "The answer begins"}
        try:
            return self.oracle.continued([self.user, start]).endswith("The answer begins")
        except Refusal:
            return False

    def closes(self, ends: Iterable[str]) -> bool:
        """Whether an end-of-turn token stands behind an answer before anything follows it."""
        try:
            text = self.oracle.render([self.user, {"role": "assistant", "content": _DONE}], generation=False)
        except Refusal:
            return False
        return any(end in text[text.rfind(_DONE) :] for end in ends)

    def round_trips(self, reply: HfMessage, new: Sequence[HfMessage], tools: Sequence[dict[str, object]]) -> bool:
        """Whether the next prompt of a plain server starts with the ids before."""
        calls = [FormatCall(c["name"], c["arguments"], c["id"]) for c in reply.get("tool_calls", ())]
        oracle, format = self.oracle, self.format
        system: HfMessage = {"role": "system", "content": "Be brief."}
        # Mistral's template shows the system prompt with the last user message.
        asked = [system, self.user] if oracle.shows([system, self.user], "Be brief.") else [self.user]
        try:
            prompt = oracle.render(asked, tools)
            after = oracle.encode(oracle.render([*asked, reply, *new], tools))
        except Refusal:
            return False
        opened = prompt.rstrip().endswith("<think>")
        before = oracle.encode(prompt)
        before += oracle.encode(format.text(None, reply["content"], calls, opened=opened, as_shown=True))
        end = oracle.id_of(format.ending(calls))
        return end is not None and after[: len(before) + 1] == [*before, end]
