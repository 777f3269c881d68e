"""Every row of the graph's table: what the harness does, what the graph does, and that every token is accounted for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from support.tokens.conversations import (
    BASH,
    TOOLS,
    Say,
    Talk,
    call,
    real,
    result,
    system,
    template_source,
    templated,
    user,
)
from towline.conversation import Hints, Message, ToolCall
from towline.schema import ContextPolicy, ForkReason, TurnRole
from towline.tokens.codec import RenderContext
from towline.tokens.continuation.plan import VanishingPolicy
from towline.tokens.templates.sentinel import SentinelCodec

MAIN, SUBAGENT, COMPACTION = TurnRole.MAIN, TurnRole.SUBAGENT, TurnRole.COMPACTION
SIDE, DISCARDED = TurnRole.SIDE, TurnRole.DISCARDED
TASK = "Fix the failing test in parser.py."
LOOK = Say("", (call("bash", command="ls -la /src"),), "Let me look around first.")
BOTH = Say("Reading both.", (call("bash", command="git log"), call("read", path="parser.py")), "Two at once.")
DONE = Say("The test passes now.", (), "Everything is there.")
BARE = Say("", (call("bash", command="ls -la /src"),))

CODECS = [
    ("real", "qwen3"),
    ("real", "qwen2_5"),
    ("real", "llama3_2"),
    ("templated", "glm4moe"),
    ("templated", "qwen3_5_think"),
]
CODECS += [("templated", "deepseekv3"), ("templated", "gptoss"), ("templated", "nemotron_3_nano")]


@pytest.fixture(params=CODECS, ids=[name for _, name in CODECS])
def codec(request: pytest.FixtureRequest) -> SentinelCodec:
    kind, name = request.param
    return real(name) if kind == "real" else templated(name)


def silent(messages: list[Message]) -> list[Message]:
    """The history of a harness that drops reasoning."""
    return [replace(message, reasoning=None) for message in messages]


def restyled(messages: list[Message]) -> list[Message]:
    """The history of a harness that writes arguments, spaces and ids its own way."""
    out = []
    for message in messages:
        calls = tuple(
            replace(c, id=f"{c.id[:4]}_{c.id[4:]}", arguments=dict(reversed(list(c.arguments.items()))))
            for c in message.tool_calls
        )
        id = message.tool_call_id and f"{message.tool_call_id[:4]}_{message.tool_call_id[4:]}"
        out.append(replace(message, text=f"{message.text}\r\n", tool_calls=calls, tool_call_id=id))
    return out


def three_turns(talk: Talk, change=lambda messages: messages):
    """Look, read two files at once, answer."""
    first = talk.ask([system(), user(TASK)], LOOK)
    second = talk.ask(change(first.answered("parser.py\ntest_parser.py")), BOTH)
    third = talk.ask(change(second.answered("abc123 wip", "def parse(): ...")), DONE)
    return first, second, third


@pytest.mark.parametrize("change", [list, silent, restyled, lambda m: silent(restyled(m))])
def test_continues_however_the_harness_reformats_it(codec: SentinelCodec, change) -> None:
    talk = Talk(codec)
    three_turns(talk, change)
    assert talk.reasons == [None] * 3
    assert talk.chains == 1
    assert talk.roles == [MAIN] * 3
    trace = talk.trajectory().traces[0]
    assert int(trace.loss_mask.sum()) == sum(len(node.sampled) for node in talk.nodes)


def contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))


def test_truncated_turn_is_closed(codec: SentinelCodec) -> None:
    talk = Talk(codec)
    first = talk.ask([system(), user(TASK)], replace(DONE, cut=9))
    second = talk.ask([*first.history, user("Go on.")], DONE)
    third = talk.ask([*second.history, user("Thanks.")], "Welcome.")
    assert talk.reasons == [None] * 3
    assert talk.chains == 1
    assert [node.forced for node in talk.nodes] == [0, 1, 0]
    assert second.node.suffix[0] not in first.sampled
    assert "forced_close" in second.node.flags
    report = talk.trajectory().report
    assert report.forced_closes == 1
    trace = talk.trajectory().traces[0]
    assert trace.loss_mask[len(first.prompt) + len(first.sampled)] == 0
    assert third.node.parent is second.node


def test_cleared_result_branches_at_the_last_intact_turn(codec: SentinelCodec) -> None:
    talk = Talk(codec)
    first, second, third = three_turns(talk)
    edited = [*third.history, user("And now the docs.")]
    edited[3] = replace(edited[3], text="[cleared]")
    fourth = talk.ask(edited, "Done too.")
    fifth = talk.ask([*fourth.history, user("Good.")], "Bye.")
    assert talk.reasons == [None, None, None, ForkReason.HISTORY_EDITED, None]
    assert fourth.node.parent is first.node
    assert fourth.node.origin is third.node
    assert fifth.node.parent is fourth.node
    assert contains(fourth.prompt, second.sampled)
    assert contains(fourth.prompt, third.sampled)
    assert "spliced_replies" in fourth.node.flags
    assert fourth.node.forced == 0
    made = talk.trajectory()
    assert len(made.traces) == 2
    assert talk.roles == [MAIN] * 5
    assert set(made.traces[1].turn_ids[made.traces[1].loss_mask == 1].tolist()) == {3, 4}


def test_edited_first_message_keeps_what_was_sampled(codec: SentinelCodec) -> None:
    talk = Talk(codec)
    first, second, third = three_turns(talk)
    edited = [*third.history, user("And now the docs.")]
    edited[1] = user(TASK + " Quickly.")
    fourth = talk.ask(edited, "Done too.")
    assert fourth.node.reason is ForkReason.HISTORY_EDITED
    assert fourth.node.parent is None
    assert not fourth.node.origin_inferred
    assert all(contains(fourth.prompt, turn.sampled) for turn in (first, second, third))
    assert talk.chains == 2
    assert talk.roles == [MAIN] * 4


def test_equal_replies_are_spliced_at_their_own_positions() -> None:
    talk = Talk(real("qwen3"))
    turn = talk.ask([system(), user(TASK)], Say("OK.", (), "Thought 0."))
    turns = [turn]
    for number in range(1, 5):
        turn = talk.ask([*turn.history, user(f"Step {number}.")], Say("OK.", (), f"Thought {number}."))
        turns.append(turn)
    edited = [*turn.history, user("And now?")]
    edited[1] = user("Something else.")
    last = talk.ask(edited, DONE)
    assert last.node.reason is ForkReason.HISTORY_EDITED
    assert re.findall(r"Thought (\d)", talk.text(last.prompt)) == list("01234")
    # A harness that says the same itself has edited nothing.
    inserted = talk.ask([*last.history, user("?"), Message("assistant", "OK."), user("Go on.")], "Yes.")
    assert inserted.node.parent is last.node
    assert inserted.node.reason is None


def test_dropped_reasoning_under_each_policy() -> None:
    for codec in (real("qwen3"), templated("glm4moe")):
        for policy, reasons in (
            (ContextPolicy.RETAIN, [None] * 3),
            (ContextPolicy.AS_SENT, [None, ForkReason.REASONING_DROPPED, ForkReason.REASONING_DROPPED]),
            (ContextPolicy.TEMPLATE, [None] * 3),
        ):
            talk = Talk(codec, policy=policy)
            first, _, third = three_turns(talk, silent)
            assert talk.reasons == reasons
            assert talk.chains == len([r for r in reasons if r]) + 1
            assert talk.roles == [MAIN] * 3
            if policy is ContextPolicy.AS_SENT:
                assert third.prompt == talk.plain(third.request, third.node)
                assert third.node.root is first.node
                assert "look around" not in talk.text(third.prompt)
            else:
                assert "look around" in talk.text(third.prompt)


def test_kept_reasoning_under_each_policy() -> None:
    """Qwen3 strips reasoning from history when the user speaks again; before that, nothing is rewritten."""
    for policy, later in (
        (ContextPolicy.RETAIN, None),
        (ContextPolicy.AS_SENT, ForkReason.TEMPLATE_REWRITE),
        (ContextPolicy.TEMPLATE, ForkReason.TEMPLATE_REWRITE),
    ):
        talk = Talk(real("qwen3"), policy=policy)
        *_, third = three_turns(talk)
        fourth = talk.ask([*third.history, user("And the docs?")], LOOK)
        fifth = talk.ask(fourth.answered("docs"), DONE)
        assert talk.reasons == [None, None, None, later, None]
        assert fifth.node.parent is fourth.node
        assert talk.chains == (1 if later is None else 2)
        if later is not None:
            assert fourth.prompt == talk.plain(fourth.request, fourth.node)
        assert ("look around" in talk.text(fourth.prompt)) == (later is None)


def test_edits_under_each_policy() -> None:
    """After an edit the policy holds as before: what the template would strip is shown stripped, or as it was sampled."""
    for policy in ContextPolicy:
        talk = Talk(real("qwen3"), policy=policy)
        *_, third = three_turns(talk)
        edited = [*third.history, user("And now the docs.")]
        edited[1] = user(TASK + " Quickly.")
        fourth = talk.ask(edited, "Done too.")
        assert fourth.node.reason is ForkReason.HISTORY_EDITED
        assert contains(fourth.prompt, third.sampled) == (policy is ContextPolicy.RETAIN)
        if policy is not ContextPolicy.RETAIN:
            assert fourth.prompt == talk.plain(fourth.request, fourth.node)
        # The last reply alone is enough to be rewritten.
        talk = Talk(real("qwen3"), policy=policy)
        first = talk.ask([user(TASK)], DONE)
        second = talk.ask([*first.history, user("And?")], DONE)
        assert second.node.reason is (None if policy is ContextPolicy.RETAIN else ForkReason.TEMPLATE_REWRITE)


REWRITING = ("deepseekv3", "nemotron_3_nano")
"""Their history does not begin as their generation prompt does."""


@pytest.mark.parametrize("policy", list(ContextPolicy))
def test_replies_without_reasoning(codec: SentinelCodec, policy: ContextPolicy) -> None:
    """Nothing to drop: only a template that shows its own opening differently forks, and only where that counts."""
    talk = Talk(codec, policy=policy)
    first = talk.ask([system(), user(TASK)], BARE)
    second = talk.ask(first.answered("parser.py"), Say("Reading on.", (call("read", path="parser.py"),)))
    third = talk.ask(second.answered("abc"), "Done.")
    rewritten = policy is not ContextPolicy.RETAIN and codec.template.source in map(template_source, REWRITING)
    assert talk.reasons[1] == (ForkReason.TEMPLATE_REWRITE if rewritten else None)
    if rewritten:
        assert second.prompt == talk.plain(second.request, second.node)
    else:
        assert talk.reasons == [None] * 3
        assert third.node.parent is second.node


def test_compaction() -> None:
    talk = Talk(real("qwen3"), instruction=TASK)
    window = [Hints(session="a", window="0"), Hints(session="a", window="1")]
    first = talk.ask([system(), user(TASK)], LOOK, hints=window[0])
    second = talk.ask(first.answered("parser.py"), BARE, hints=window[0])
    # Codex: an ordinary request without tools, then a short history with the summary.
    summary = talk.ask([*second.answered("x"), user("Summarise.")], "So far: nothing.", tools=(), hints=window[0])
    fourth = talk.ask([system(), user(TASK), user("So far: nothing.")], BARE, hints=window[1])
    fifth = talk.ask(fourth.answered("x"), DONE, hints=window[1])
    assert talk.reasons == [None, None, ForkReason.TOOLS_CHANGED, ForkReason.COMPACTION, None]
    assert talk.roles == [MAIN, MAIN, COMPACTION, COMPACTION, COMPACTION]
    assert summary.node.origin is second.node
    assert contains(summary.prompt, first.sampled)
    assert contains(summary.prompt, second.sampled)
    assert fourth.node.origin is summary.node
    assert not fourth.node.origin_inferred
    assert talk.chains == 3
    assert fifth.node.parent is fourth.node


def test_compaction_without_a_window() -> None:
    talk = Talk(real("qwen3"), instruction=TASK)
    *_, third = three_turns(talk)
    title = talk.ask([system("Make a title."), user(TASK)], "A title", tools=())
    # Claude Code: the instruction is appended, with the same tools; then a short history.
    summary = talk.ask([*third.history, user("Summarise.")], "So far: it passes.")
    after = talk.ask([system(), user("So far: it passes.")], DONE)
    assert summary.node.parent is third.node
    assert after.node.reason is ForkReason.COMPACTION
    assert after.node.origin is summary.node
    assert after.node.origin_inferred
    assert title.node.reason is ForkReason.SIDE
    assert talk.roles == [MAIN, MAIN, MAIN, SIDE, MAIN, COMPACTION]
    # A side call in between does not hide what was compacted.
    after = talk.ask([*after.history, user("More.")], DONE)
    talk.ask([system("Make a title."), user("So far: it passes.")], "A title", tools=())
    again = talk.ask([system(), user("So far: it still passes."), user("Go on.")], DONE)
    assert again.node.reason is ForkReason.COMPACTION


def test_other_tools_and_other_system_prompts_are_roots() -> None:
    talk = Talk(real("qwen3"), instruction=TASK)
    first, second, third = three_turns(talk)
    tools = talk.ask([*third.history, user("Go on.")], "With one tool.", tools=(BASH,))
    asked = talk.ask([system("Other."), *third.history[1:], user("Go on.")], "Otherwise.")
    fresh = talk.ask([system("Quite other."), user("Something else")], "Yes.")
    assert talk.reasons[3:] == [ForkReason.TOOLS_CHANGED, ForkReason.SYSTEM_CHANGED, ForkReason.SYSTEM_CHANGED]
    assert [n.parent for n in talk.nodes[3:]] == [None] * 3
    for turn in (tools, asked):
        assert all(contains(turn.prompt, earlier.sampled) for earlier in (first, second, third))
    assert talk.chains == 4
    assert talk.roles[3:] == [MAIN, SUBAGENT, SUBAGENT]
    assert fresh.node.origin_inferred


def test_side_calls() -> None:
    talk = Talk(real("qwen3"), instruction=TASK)
    # OpenCode's title comes first and quotes the task.
    title = talk.ask([system("Make a title."), user(TASK)], "A title", tools=())
    three_turns(talk)
    commit = talk.ask([system(), user("Write a commit message.")], "Fix parser", model="small")
    assert title.node.reason is None
    assert commit.node.reason in (ForkReason.COMPACTION, ForkReason.UNMATCHED, ForkReason.SIDE)
    assert talk.roles[:4] == [SIDE, MAIN, MAIN, MAIN]
    assert talk.chains == len({r for r in talk.roles if r is not SIDE})
    talk.trajectory(trained=[MAIN, SUBAGENT, COMPACTION, SIDE])


def test_sub_agents_by_header() -> None:
    for mine, theirs in (
        (Hints(session="a"), Hints(session="a", agent="b")),
        (Hints(session="a"), Hints(session="b", parent_session="a")),
    ):
        talk = Talk(real("qwen3"), instruction=TASK)
        first = talk.ask([system(), user(TASK)], LOOK, hints=mine)
        sub = talk.ask([system("You search."), user("Find it.")], BARE, hints=theirs)
        second = talk.ask(first.answered("x"), BARE, hints=mine)
        found = talk.ask(sub.answered("here"), "It is here.", hints=theirs)
        same = talk.ask([system(), user("Find the other.")], "There.", hints=replace(theirs, agent="c"))
        third = talk.ask(second.answered("It is here."), DONE, hints=mine)
        assert [n.parent for n in talk.nodes] == [None, None, first.node, sub.node, None, second.node]
        assert talk.roles == [MAIN, SUBAGENT, MAIN, SUBAGENT, SUBAGENT, MAIN]
        assert same.node.reason is ForkReason.SUBAGENT
        assert talk.chains == 3
        assert found.node.root is sub.node
        assert third.node.root is first.node


def test_siblings() -> None:
    talk = Talk(real("qwen3"))
    first = talk.ask([system(), user(TASK)], LOOK)
    again = talk.ask([system(), user(TASK)], Say("", (call("bash", command="pwd"),)))
    assert again.node.reason is ForkReason.SIBLING
    assert again.node.origin is first.node
    assert again.prompt == first.prompt
    assert talk.chains == 2
    talk.ask(first.answered("x"), DONE)
    going = talk.ask(again.answered("y"), DONE)
    assert going.node.parent is again.node
    assert talk.chains == 2
    # n > 1: n turns of one request, and the harness continues one of them.
    wide = [talk.ask([*going.history, user("Which?")], f"Number {n}.") for n in range(3)]
    best = talk.ask([*wide[1].history, user("Good.")], "Yes.")
    assert best.node.parent is wide[1].node
    assert [w.node.reason for w in wide] == [None, ForkReason.SIBLING, ForkReason.SIBLING]
    assert talk.chains == 4
    assert set(talk.roles) == {MAIN}


def test_ties_are_broken_by_call_ids_and_reasoning() -> None:
    talk = Talk(real("qwen3"))
    twins = [talk.ask([system(), user(TASK)], replace(LOOK, think=f"Thought {n}.")) for n in range(3)]
    for twin in (twins[1], twins[0], twins[2]):
        following = talk.ask(silent(restyled(twin.answered("x"))), replace(DONE, think=f"More {twin.node.index}."))
        assert following.node.parent is twin.node
        assert f"Thought {twin.node.index}." in talk.text(following.prompt)
        # The last reply has no call id to break the tie: the ids before it do.
        later = talk.ask(silent([*following.history, user("Thanks.")]), "Welcome.")
        assert later.node.parent is following.node
    plain = Talk(real("qwen3"))
    first = plain.ask([system(), user(TASK)], replace(DONE, think="One way."))
    plain.ask([system(), user(TASK)], replace(DONE, think="Another way."))
    assert plain.ask([*first.history, user("Thanks.")], "Welcome.").node.parent is first.node


def test_undelivered_turns_are_discarded() -> None:
    talk = Talk(real("qwen3"))
    lost = talk.ask([system(), user(TASK)], DONE, deliver=False)
    first = talk.ask([system(), user(TASK)], LOOK)
    second = talk.ask(first.answered("x"), DONE)
    assert talk.roles == [DISCARDED, MAIN, MAIN]
    made = talk.trajectory()
    assert made.report.discarded_tokens == len(lost.sampled)
    assert [t.turn_ids[t.turn_ids >= 0].min() for t in made.traces] == [first.node.index]
    assert second.node.parent is first.node


def test_an_aborted_turn_is_neither_sibling_nor_parent() -> None:
    talk = Talk(real("qwen3"))
    first = talk.ask([system(), user(TASK)], LOOK)
    dead = talk.ask(first.answered("x"), abort=True)
    second = talk.ask(first.answered("x"), DONE)
    assert second.node.reason is None
    assert second.node.parent is first.node
    assert second.prompt == dead.prompt
    assert talk.chains == 1
    assert talk.roles == [MAIN, DISCARDED, MAIN]
    root = Talk(real("qwen3"))
    root.ask([system(), user(TASK)], abort=True)
    assert root.ask([system(), user(TASK)], DONE).node.reason is None
    assert root.roles == [DISCARDED, MAIN]


def test_turns_in_flight() -> None:
    talk = Talk(real("qwen3"))
    first = talk.ask([system(), user(TASK)], LOOK)
    flying = talk.start(first.answered("x"))
    other = talk.start(first.answered("y"))
    twin = talk.start(first.answered("x"))
    assert other.node.reason is ForkReason.HISTORY_EDITED
    assert twin.node.reason is ForkReason.SIBLING
    assert talk.chains == 1
    talk.finish(twin, DONE)
    # Its origin is not there yet: a trajectory of a session that runs has no turns in flight.
    assert [turn.origin for turn in talk.trajectory().turns] == [None, None]
    for asked in (other, flying):
        talk.finish(asked, DONE)
    assert talk.chains == 3
    assert talk.roles == [MAIN] * 4


@pytest.mark.parametrize("policy", list(ContextPolicy))
@pytest.mark.parametrize("leading", [[system(), user(TASK)], [user(TASK)]])
def test_vanishing_notes(policy: ContextPolicy, leading: list[Message]) -> None:
    for vanishing, chains in ((VanishingPolicy.FORK, 3), (VanishingPolicy.KEEP, 1)):
        talk = Talk(real("qwen3"), vanishing=vanishing, policy=policy)
        history = leading
        turns = []
        for step, say in enumerate((BARE, replace(BOTH, think=None), "Done.")):
            turn = talk.ask([*history, user(f"Note {step}: be quick.")], say)
            turns.append(turn)
            history = [*history, turn.reply, *(result(c, "ok") for c in turn.calls)]
        fork = ForkReason.VANISHED_MESSAGE if vanishing is VanishingPolicy.FORK else None
        assert talk.reasons == [None, fork, fork]
        assert talk.chains == chains
        assert talk.roles == [MAIN] * 3
        shown = talk.text(turns[-1].prompt)
        assert ("Note 0" in shown, "Note 2" in shown) == (vanishing is VanishingPolicy.KEEP, True)
        assert contains(turns[2].prompt, turns[0].sampled)
        if vanishing is VanishingPolicy.KEEP:
            assert "vanished_kept" in turns[1].node.flags


# How a turn ended


@pytest.mark.parametrize("renderer", ["auto", "sentinel"])
def test_an_end_token_that_opens_the_next_message_must_match(renderer: str) -> None:
    """GLM ends a turn with the opening of the next message: a wrong one is removed, everything before it stays."""
    codec = templated("glm4moe", renderer=renderer)
    assert (codec.name == "sentinel") == (renderer == "sentinel")
    observation = codec.tokenizer.id_of("<|observation|>")
    for wrong in ("<|user|>", "<|endoftext|>"):
        talk = Talk(codec)
        first = talk.ask([system(), user(TASK)], LOOK)
        assert first.sampled[-1] == observation
        second = talk.ask(first.answered("parser.py"), replace(LOOK, end=wrong))
        third = talk.ask(second.answered("again"), LOOK)
        fourth = talk.ask(third.answered("and again"), DONE)
        assert talk.reasons == [None, None, ForkReason.STOP_MISMATCH, None]
        assert third.node.parent is first.node
        assert third.node.origin is second.node
        kept = second.prompt + second.sampled[:-1]
        assert third.prompt[: len(kept) + 1] == [*kept, observation]
        assert third.node.forced == 0
        assert fourth.node.parent is third.node
        assert [len(set(t.turn_ids[t.loss_mask == 1])) for t in talk.trajectory().traces] == [2, 2]
        assert talk.roles == [MAIN] * 4
        # At the very beginning too, and when the user speaks after a call.
        talk = Talk(codec)
        first = talk.ask([user(TASK)], replace(LOOK, end=wrong))
        second = talk.ask(first.answered("parser.py"), DONE)
        assert second.prompt[: len(first.prompt) + len(first.sampled)] == first.prompt + first.sampled[:-1] + [
            observation
        ]
        assert second.node.root is first.node


def test_an_end_token_that_only_closes_stays_as_sampled() -> None:
    """Llama's `<|eom_id|>`, gpt-oss's `<|return|>` and `<|call|>`, anybody's `<|endoftext|>`."""
    for name, say, end, shown in (
        ("llama3_1", BARE, "<|eom_id|>", "<|eot_id|>"),
        ("gptoss", DONE, "<|return|>", "<|end|>"),
        ("gptoss", BARE, "<|call|>", "<|call|>"),
        ("qwen3", LOOK, "<|endoftext|>", "<|im_end|>"),
    ):
        for renderer in ("auto", "sentinel"):
            codec = templated(name, renderer=renderer)
            talk = Talk(codec)
            first = talk.ask([system(), user(TASK)], replace(say, end=end))
            new = [result(c, "parser.py") for c in first.calls] or [user("And?")]
            second = talk.ask([*first.history, *new], "Done.")
            assert second.node.parent is first.node
            assert second.node.reason is None
            assert second.node.forced == 0
            whole = talk.plain(second.request, second.node)
            seam = [codec.tokenizer.id_of(shown), *second.node.suffix.tolist()]
            assert whole[-len(seam) :] == seam
            assert talk.chains == 1


def test_spliced_reply_with_the_wrong_end_loses_only_that() -> None:
    codec = templated("glm4moe")
    talk = Talk(codec)
    first, second, third = three_turns(talk)
    wrong = Say("", (call("bash", command="make docs"),), "Now the docs.", end="<|user|>")
    fourth = talk.ask([*third.history, user("And now?")], wrong)
    edited = [*fourth.history, result(fourth.calls[0], "x")]
    edited[3] = replace(edited[3], text="[cleared]")
    fifth = talk.ask(edited, DONE)
    assert fifth.node.parent is first.node
    assert fifth.node.reason is ForkReason.HISTORY_EDITED
    assert contains(fifth.prompt, [*fourth.sampled[:-1], codec.tokenizer.id_of("<|observation|>")])
    assert contains(fifth.prompt, second.sampled)
    # A reply that was cut short is closed again, which is no forced close of the turn that shows it.
    talk = Talk(codec)
    first = talk.ask([user(TASK)], replace(DONE, cut=6))
    second = talk.ask([*first.history, user("Go on.")], LOOK)
    edited = second.answered("x")
    edited[0] = user("Something else.")
    third = talk.ask(edited, DONE)
    assert contains(third.prompt, first.sampled)
    assert (second.node.forced, third.node.forced) == (1, 0)
    branch = [*third.history, user("More.")]
    cut = talk.ask(branch, replace(DONE, cut=6))
    after = talk.ask([*cut.history, user("And?")], "Yes.")
    edited = [*after.history, user("?")]
    edited[-3] = user("Otherwise.")
    last = talk.ask(edited, "No.")
    assert last.node.parent is cut.node
    assert last.node.forced == 1
    edited[-5] = user("Quite otherwise.")
    last = talk.ask(edited, "No.")
    assert last.node.parent is third.node
    assert contains(last.prompt, cut.sampled)
    assert (last.node.forced, last.node.flags) == (0, ["spliced_replies"])


# Prefills


def test_prefill_that_was_not_sampled(codec: SentinelCodec) -> None:
    talk = Talk(codec)
    opened = Message("assistant", "The answer is")
    asked = [system(), user("What is 2 + 2?")]
    end = codec.write("x", None, (), RenderContext(TOOLS))[-1]
    first = talk.ask([*asked, opened], Say(ids=[*codec.tokenizer.encode(" 4."), end]))
    assert talk.text(first.prompt).endswith("The answer is")
    assert first.reply.text == "The answer is 4."
    second = talk.ask([*asked, Message("assistant", "The answer is 4."), user("Thanks.")], "Welcome.")
    assert second.node.parent is first.node
    third = talk.ask([*second.history, user("Again."), opened], Say(ids=[end]))
    assert third.node.parent is second.node
    assert talk.text(third.prompt).endswith("The answer is")
    assert talk.reasons == [None] * 3
    assert talk.chains == 1
    # Calls cannot be continued: the template closes them.
    closed = Message("assistant", "", None, (ToolCall("call_1", "bash", {"command": "ls"}),))
    fourth = talk.ask([*asked, closed], "Done.")
    assert fourth.node.prefill is None
    assert "ls" in talk.text(fourth.prompt)


def test_prefill_with_our_own_reply() -> None:
    talk = Talk(real("qwen3"))
    first = talk.ask([system(), user(TASK)], Say("Counting further and further.", cut=4))
    second = talk.ask(first.history, Say(" and so on."))
    assert second.node.parent is first.node
    assert second.prompt == first.prompt + first.sampled
    assert second.reply.text == first.reply.text + " and so on."
    third = talk.ask([system(), user(TASK), second.reply, user("Thanks.")], "Welcome.")
    assert third.node.parent is second.node
    assert talk.reasons == [None] * 3
    assert talk.chains == 1
    # A reply that had ended is opened again: another branch, with all but its end.
    fourth = talk.ask(third.history, Say(" Indeed."))
    assert fourth.node.reason is ForkReason.PREFILL
    assert fourth.node.parent is second.node
    assert fourth.prompt == third.prompt + third.sampled[:-1]
    assert fourth.reply.text == third.reply.text + " Indeed."
    assert [m.role for m in fourth.node.new] == ["user", "assistant"]
    fifth = talk.ask([*third.request, fourth.reply, user("Bye.")], "Bye.")
    assert fifth.node.parent is fourth.node
    assert talk.chains == 2
    assert talk.roles == [MAIN] * 5
    # After an edit, a reply that was written in two pieces is shown whole.
    edited = [*fifth.history, user("More.")]
    edited[0] = system("Other words.")
    edited[1] = user("Edited.")
    sixth = talk.ask(edited, "Yes.")
    assert second.reply.text in talk.text(sixth.prompt)
    assert talk.text(sixth.prompt).count("Indeed.") == 1


def test_forced_close_survives_a_branch() -> None:
    """A turn that replaces another keeps the flags of its prompt."""
    talk = Talk(templated("glm4moe"))
    first = talk.ask([user(TASK)], replace(DONE, cut=5))
    second = talk.ask([*first.history, user("<|user|> Go on.")], replace(LOOK, end="<|user|>"))
    third = talk.ask(second.answered("x"), DONE)
    assert (second.node.forced, second.node.special_text) == (1, 1)
    assert third.node.reason is ForkReason.STOP_MISMATCH
    assert (third.node.forced, third.node.special_text) == (1, 1)
    assert third.node.parent is first.node
    again = talk.ask(second.answered("x"), DONE)
    assert again.node.reason is ForkReason.SIBLING
    assert (again.node.forced, again.node.special_text, again.node.flags) == (1, 1, third.node.flags)


# What harnesses do to messages


def test_foreign_replies_are_context(codec: SentinelCodec) -> None:
    talk = Talk(codec)
    shots = [system(), user("2 + 2?"), Message("assistant", "FOUR"), user(TASK)]
    first = talk.ask(shots, BARE)
    second = talk.ask([*first.answered("x"), Message("assistant", "INSERTED"), user("Go on.")], "Done.")
    third = talk.ask([*second.history, user("Bye.")], "Bye.")
    assert [n.parent for n in talk.nodes] == [None, first.node, second.node]
    assert talk.reasons == [None] * 3
    text = talk.text(third.prompt)
    assert text.index("FOUR") < text.index("INSERTED")
    trace = talk.trajectory().traces[0]
    assert int(trace.loss_mask.sum()) == sum(len(n.sampled) for n in talk.nodes)


def test_split_reply() -> None:
    talk = Talk(real("qwen3"))
    first = talk.ask([system(), user(TASK)], BOTH)
    words = Message("assistant", first.reply.text, first.reply.reasoning)
    singly = [Message("assistant", "", None, (c,)) for c in first.calls]
    results = [result(c, "ok") for c in first.calls]
    second = talk.ask([*first.request, words, *singly, *results], "Done.")
    third = talk.ask([*first.request, words, *singly, *results, second.reply, user("Bye.")], "Bye.")
    assert talk.reasons == [None] * 3
    assert third.node.parent is second.node
    assert talk.chains == 1


def test_results_out_of_order_and_twice() -> None:
    talk = Talk(real("qwen3"))
    first = talk.ask([system(), user(TASK)], BOTH)
    one, two = (result(c, t) for c, t in zip(first.calls, ("ONE", "TWO"), strict=True))
    second = talk.ask([*first.history, two, one], DONE)
    again = talk.ask([*first.history, one, two], DONE)
    assert again.node.reason is ForkReason.SIBLING
    assert again.prompt == second.prompt
    assert talk.text(second.prompt).index("ONE") < talk.text(second.prompt).index("TWO")
    twice = talk.ask([*first.history, two, one, two], DONE)
    assert twice.node.reason is ForkReason.HISTORY_EDITED
    assert twice.node.parent is first.node


def test_noise() -> None:
    """What counts as noise may change on every call; the model keeps seeing it as it was, and the turn says so."""
    patterns = (r"x-billing: \w+", r"<date>.*?</date>")
    talk = Talk(real("qwen3"), noise=patterns)

    def asked(n: int) -> list[Message]:
        return [system(f"x-billing: {n}abc\nYou are an agent."), user(f"{TASK}<date>{n}</date>")]

    first = talk.ask(asked(1), LOOK)
    second = talk.ask([*asked(2), *first.answered("x")[2:]], BOTH)
    steady = talk.ask([*asked(1), *second.answered("a", "b")[2:]], DONE)
    assert talk.reasons == [None] * 3
    assert "1abc" in talk.text(steady.prompt)
    assert "2abc" not in talk.text(steady.prompt)
    assert [turn.node.flags for turn in (first, second, steady)] == [[], ["noise_ignored"], []]
    assert talk.trajectory().turns[1].flags == ["noise_ignored"]
    changed = talk.ask([system("x-billing: 1abc\nYou are another."), *asked(1)[1:]], DONE)
    assert changed.node.reason is ForkReason.SYSTEM_CHANGED
    assert talk.ask(asked(7), DONE).node.reason is ForkReason.SIBLING
    plain = Talk(real("qwen3"))
    start = plain.ask(asked(1), LOOK)
    assert plain.ask([*asked(2), *start.answered("x")[2:]], BOTH).node.reason is ForkReason.SYSTEM_CHANGED


def test_a_reply_is_spliced_only_after_its_own_opening() -> None:
    """Under other template arguments a prompt may open the reply differently: what was sampled does not fit there."""
    talk = Talk(real("qwen3"))
    *_, third = three_turns(talk)
    again = Say("Certainly.", (call("bash", command="make test"),))
    thoughtless = talk.ask([*third.history, user("Go on.")], again, args={"enable_thinking": False})
    assert thoughtless.node.reason is ForkReason.TOOLS_CHANGED
    assert thoughtless.prompt == talk.plain(thoughtless.request, thoughtless.node)
    back = talk.ask(thoughtless.answered("ok"), "Yes.")
    assert back.node.parent is third.node
    assert contains(back.prompt, third.sampled)
    assert not contains(back.prompt, thoughtless.sampled)
