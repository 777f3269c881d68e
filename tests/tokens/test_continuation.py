"""Every row of the graph's table: what the harness does, what the graph does, and that every token is accounted for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conversations import BASH, READ, TOOLS, Say, Talk, call, real, result, system, templated, user

from towline.conversation import Hints, Message, ToolCall
from towline.schema import ContextPolicy, ForkReason, TurnRole
from towline.tokens.continuation import Vanishing
from towline.tokens.template import SentinelCodec

MAIN, SUBAGENT, COMPACTION = TurnRole.MAIN, TurnRole.SUBAGENT, TurnRole.COMPACTION
SIDE, DISCARDED = TurnRole.SIDE, TurnRole.DISCARDED
TASK = "Fix the failing test in parser.py."
LOOK = Say("", (call("bash", command="ls -la /src"),), "Let me look around first.")
BOTH = Say("Reading both.", (call("bash", command="git log"), call("read", path="parser.py")), "Two at once.")
DONE = Say("The test passes now.", (), "Everything is there.")
BARE = Say("", (call("bash", command="ls -la /src"),))

CODECS = [("real", "qwen3"), ("real", "qwen2_5"), ("templated", "glm4moe"), ("templated", "qwen3_5_think")]
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
def test_goes_on_however_it_is_restyled(codec: SentinelCodec, change) -> None:
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


def test_dropped_reasoning_under_each_policy() -> None:
    for codec in (real("qwen3"), templated("glm4moe")):
        for policy, reasons in (
            (ContextPolicy.RETAIN, [None] * 3),
            (ContextPolicy.AS_SENT, [None, ForkReason.REASONING_DROPPED, ForkReason.REASONING_DROPPED]),
            (ContextPolicy.TEMPLATE, [None] * 3),
        ):
            talk = Talk(codec, policy=policy)
            first, second, third = three_turns(talk, silent)
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
        first, second, third = three_turns(talk)
        fourth = talk.ask([*third.history, user("And the docs?")], LOOK)
        fifth = talk.ask(fourth.answered("docs"), DONE)
        assert talk.reasons == [None, None, None, later, None]
        assert fifth.node.parent is fourth.node
        assert talk.chains == (1 if later is None else 2)
        if later is not None:
            assert fourth.prompt == talk.plain(fourth.request, fourth.node)
        assert ("look around" in talk.text(fourth.prompt)) == (later is None)


@pytest.mark.parametrize("policy", list(ContextPolicy))
def test_replies_without_reasoning_never_fork(codec: SentinelCodec, policy: ContextPolicy) -> None:
    talk = Talk(codec, policy=policy)
    first = talk.ask([system(), user(TASK)], BARE)
    second = talk.ask(first.answered("parser.py"), replace(BOTH, think=None))
    third = talk.ask(second.answered("abc", "def"), "Done.")
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
    first, second, third = three_turns(talk)
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
    talk.ask([system("Make a title."), user("So far: it passes.")], "A title", tools=())
    again = talk.ask([system(), user("So far: it still passes.")], DONE)
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
    first, second, third = three_turns(talk)
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
        assert same.node.reason is ForkReason.UNMATCHED
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
    # n > 1: as many turns of one request, and the harness goes on from one of them.
    wide = [talk.ask(going.history + [user("Which?")], f"Number {n}.") for n in range(3)]
    best = talk.ask(wide[1].history + [user("Good.")], "Yes.")
    assert best.node.parent is wide[1].node
    assert [w.node.reason for w in wide] == [None, ForkReason.SIBLING, ForkReason.SIBLING]
    assert talk.chains == 4
    assert set(talk.roles) == {MAIN}


def test_twins_are_settled_by_call_ids_and_by_reasoning() -> None:
    talk = Talk(real("qwen3"))
    twins = [talk.ask([system(), user(TASK)], replace(LOOK, think=f"Thought {n}.")) for n in range(3)]
    for twin in (twins[1], twins[0], twins[2]):
        following = talk.ask(silent(restyled(twin.answered("x"))), replace(DONE, think=f"More {twin.node.index}."))
        assert following.node.parent is twin.node
        assert f"Thought {twin.node.index}." in talk.text(following.prompt)
        # The last reply has no call of its own to settle it: the ids before it do.
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


def test_aborted_turn_is_no_sibling_and_no_parent() -> None:
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
    for asked in (twin, other, flying):
        talk.finish(asked, DONE)
    assert talk.chains == 3
    assert talk.roles == [MAIN] * 4


@pytest.mark.parametrize("policy", list(ContextPolicy))
@pytest.mark.parametrize("leading", [[system(), user(TASK)], [user(TASK)]])
def test_vanishing_notes(policy: ContextPolicy, leading: list[Message]) -> None:
    for vanishing, chains in ((Vanishing.FORK, 3), (Vanishing.KEEP, 1)):
        talk = Talk(real("qwen3"), vanishing=vanishing, policy=policy)
        history = leading
        turns = []
        for step, say in enumerate((BARE, replace(BOTH, think=None), "Done.")):
            turn = talk.ask([*history, user(f"Note {step}: be quick.")], say)
            turns.append(turn)
            history = [*history, turn.reply, *(result(c, "ok") for c in turn.calls)]
        fork = ForkReason.VANISHED_MESSAGE if vanishing is Vanishing.FORK else None
        assert talk.reasons == [None, fork, fork]
        assert talk.chains == chains
        assert talk.roles == [MAIN] * 3
        shown = talk.text(turns[-1].prompt)
        assert ("Note 0" in shown, "Note 2" in shown) == (vanishing is Vanishing.KEEP, True)
        assert contains(turns[2].prompt, turns[0].sampled)
        if vanishing is Vanishing.KEEP:
            assert "vanished_kept" in turns[1].node.flags
