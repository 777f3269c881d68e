"""From graphs to rows: three builders, every trained turn once, and rows that are what was sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.tokens.conversations import TOOLS, Asked, Say, Talk, call, real, system, templated, user
from towline.conversation import Message
from towline.errors import FidelityError
from towline.schema import BuilderName, ContextPolicy, ForkReason, Trajectory, TurnRole
from towline.tokens.continuation.plan import PromptMode, VanishingPolicy
from towline.tokens.graph import graph as graph_module
from towline.tokens.traces.builders import distinct_tokens
from towline.tokens.traces.plain_difference import differences

EXACT, MERGED, PER_TURN = BuilderName.EXACT, BuilderName.MERGED, BuilderName.PER_TURN
TASK = "Fix the failing test."
LOOK = Say("", (call("bash", command="ls -la"),), "Let me look.")
BOTH = Say("Two at once.", (call("bash", command="git log"), call("read", path="parser.py")), "I need both.")


def conversation(talk: Talk, *, canonical: bool = False, think: bool = True, keep: bool = True) -> list[Asked]:
    """A call, two calls, an answer, and a question more."""

    def said(say: Say) -> Say:
        return replace(say, canonical=canonical, think=say.think if think else None)

    def sent(messages: list[Message]) -> list[Message]:
        return messages if keep else [replace(message, reasoning=None) for message in messages]

    first = talk.ask([system(), user(TASK)], said(LOOK))
    second = talk.ask(sent(first.answered("parser.py")), said(BOTH))
    third = talk.ask(sent(second.answered("abc", "def parse(): ...")), said(Say("It works.", (), "Good.")))
    fourth = talk.ask(sent([*third.history, user("Sure?")]), said(Say("Quite.", (), "Hm.")))
    return [first, second, third, fourth]


def rows(made: Trajectory) -> list[list[int]]:
    return [trace.token_ids.tolist() for trace in made.traces]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_nothing_drifts(name: str) -> None:
    """Spelled as an encoder would and echoed in full, re-rendering changes nothing: `merged` is `exact`."""
    exact, plain = Talk(real(name)), Talk(real(name), capture=PromptMode.PLAIN)
    turns = conversation(exact, canonical=True, think=False)
    again = conversation(plain, canonical=True, think=False)
    assert [turn.prompt for turn in turns] == [turn.prompt for turn in again]
    expected = [turns[-1].prompt + turns[-1].sampled]
    assert rows(exact.trajectory(EXACT)) == rows(exact.trajectory(MERGED)) == rows(plain.trajectory(MERGED)) == expected
    merged = plain.trajectory(MERGED).traces[0]
    one = exact.trajectory().traces[0]
    for column in ("loss_mask", "logprobs", "policy_versions", "turn_ids"):
        assert np.array_equal(getattr(one, column), getattr(merged, column))
    # Without a parent there is nothing to share: a plain capture gives one row per turn.
    assert rows(plain.trajectory(EXACT)) == rows(plain.trajectory(PER_TURN)) == rows(exact.trajectory(PER_TURN))
    assert rows(plain.trajectory(PER_TURN)) == [turn.prompt + turn.sampled for turn in turns]


def test_drift_is_hidden_by_stitching() -> None:
    """Where reasoning is dropped the merged row looks exact, but its turns were sampled under other prompts."""
    exact, plain = Talk(real("qwen3")), Talk(real("qwen3"), capture=PromptMode.PLAIN)
    conversation(exact, keep=False)
    turns = conversation(plain, keep=False)
    assert plain.reasons == [None] * 4
    stitched = plain.trajectory(MERGED).traces[0]
    assert rows(plain.trajectory(MERGED)) == rows(exact.trajectory())
    last = turns[-1]
    start = int(np.flatnonzero(stitched.turn_ids == last.node.index)[0])
    assert stitched.token_ids[start:].tolist() == last.sampled
    assert stitched.token_ids[:start].tolist() != last.prompt
    assert "Let me look." in plain.text(stitched.token_ids)
    assert "Let me look." not in plain.text(last.prompt)


@pytest.mark.parametrize("name", ["glm4moe", "gptoss", "llama3_1", "nemotron_3_nano", "qwen3_8"])
def test_seams_of_other_families(name: str) -> None:
    for capture in PromptMode:
        talk = Talk(templated(name), capture=capture)
        first = talk.ask([system(), user(TASK)], Say("", (call("bash", command="ls"),)))
        second = talk.ask(first.answered("<|im_end|> x"), "It works.")
        third = talk.ask([*second.history, user("Sure?")], "Quite.")
        made = talk.trajectory(MERGED)
        assert len(made.traces) == 1
        text = talk.text(made.traces[0].token_ids)
        assert text.count("It works.") == text.count("Quite.") == text.count("Sure?") == 1
        assert text.count("<|im_end|> x") == 1
        assert made.report.trained_tokens == sum(len(t.sampled) for t in (first, second, third))


def test_a_reply_that_the_template_writes_as_several_messages() -> None:
    """gpt-oss: reasoning is a message of its own, shown until the answer; the end of a turn is `<|end|>` in
    history. However that changes what is rendered, each reply is in the row once, and nothing is in it twice."""
    talk = Talk(templated("gptoss"), capture=PromptMode.PLAIN)
    say = Say("", (call("bash", command="ls"),), think="I must look.")
    first = talk.ask([system(), user(TASK)], say)
    second = talk.ask(first.answered("a.py"), Say("It works.", think="It was there."))
    third = talk.ask([*second.history, user("Sure?")], Say("", (call("bash", command="cat"),), think="Better look."))
    fourth = talk.ask(third.answered("print()"), Say("Quite.", think="There it is."))
    made = talk.trajectory(MERGED)
    assert len(made.traces) == 1
    text = talk.text(made.traces[0].token_ids)
    said = ("I must look.", "a.py", "It was there.", "It works.", "Sure?", "Better look.", "print()", "There it is.")
    assert [text.count(one) for one in (*said, "Quite.")] == [1] * 9
    assert made.report.trained_tokens == sum(len(turn.sampled) for turn in (first, second, third, fourth))


def test_truncated_turns_in_merged_rows() -> None:
    talk = Talk(real("qwen2_5"), capture=PromptMode.PLAIN)
    first = talk.ask([user(TASK)], Say("One two three four five.", cut=5))
    second = talk.ask([*first.history, user("Go on.")], "Six.")
    made = talk.trajectory(MERGED)
    assert len(made.traces) == 1
    trace = made.traces[0]
    end = talk.codec.tokenizer.id_of("<|im_end|>")
    assert trace.token_ids[len(first.prompt) + len(first.sampled)] == end
    assert trace.token_ids.tolist()[-len(second.sampled) :] == second.sampled
    assert made.traces[0].truncated is False


def test_plain_captures_fork_for_the_same_reasons() -> None:
    talk = Talk(real("qwen3"), capture=PromptMode.PLAIN)
    turns = conversation(talk)
    edited = [*turns[-1].history, user("More.")]
    edited[3] = replace(edited[3], text="[cleared]")
    talk.ask(edited, "Yes.")
    talk.ask([*turns[1].answered("x", "y")], "Other.")
    talk.ask([*turns[0].request], LOOK)
    talk.ask([system("Other."), user("x")], "Yes.")
    assert talk.reasons[4:] == [
        ForkReason.HISTORY_EDITED,
        ForkReason.HISTORY_EDITED,
        ForkReason.SIBLING,
        ForkReason.SYSTEM_CHANGED,
    ]
    for builder, count in ((MERGED, 5), (PER_TURN, 8), (EXACT, 8)):
        assert len(talk.trajectory(builder).traces) == count


def test_each_row_says_where_it_came_from() -> None:
    talk = Talk(real("qwen3"))
    first, second, third, fourth = conversation(talk)
    sibling = talk.ask(second.answered("abc", "def parse(): ..."), "Differently.")
    other = talk.ask([system("Other."), user("Search.")], "Found.")
    made = talk.trajectory()
    assert [t.fork_reason for t in made.traces] == [None, ForkReason.SIBLING, ForkReason.SYSTEM_CHANGED]
    assert [t.parent_trace for t in made.traces] == [None, "s-0", "s-1"]
    assert [t.role for t in made.traces] == [TurnRole.MAIN, TurnRole.MAIN, TurnRole.SUBAGENT]
    assert [int(t.loss_mask.sum()) for t in made.traces] == [
        sum(len(t.sampled) for t in (first, second, third, fourth)),
        len(sibling.sampled),
        len(other.sampled),
    ]
    assert made.report.chains == 3
    assert made.report.turns == 6
    assert made.report.conversations == 2
    assert made.report.forks == {"sibling": 1, "system_changed": 1}
    assert made.report.distinct_tokens == len({tuple(row[: end + 1]) for row in rows(made) for end in range(len(row))})
    assert made.report.row_tokens == sum(map(len, rows(made)))


def test_roles_that_are_not_trained() -> None:
    talk = Talk(real("qwen3"), instruction=TASK)
    conversation(talk)
    talk.ask([system("Title."), user(TASK)], "A title.", tools=())
    assert len(talk.trajectory().traces) == 1
    aside = talk.trajectory(trained=[TurnRole.SIDE])
    assert [t.role for t in aside.traces] == [TurnRole.SIDE]
    for builder in BuilderName:
        nothing = talk.trajectory(builder, trained=[TurnRole.SUBAGENT])
        assert nothing.traces == []
        assert nothing.error == "no token of a trained role was sampled"
        empty = Talk(real("qwen3")).trajectory(builder)
        assert empty.error == "no model call was captured"


# Everything at once

DEEDS = ["go on", "go on", "edit", "again", "fly", "land", "abort", "lose", "compact", "note", "foreign", "prefill"]
DEEDS += ["other tools", "no thinking", "noise"]


@given(st.data())
def test_every_token_of_a_random_session_is_accounted_for(data: st.DataObject) -> None:
    """Whatever a harness does in whatever order: `Talk` checks the invariant at each call, the trajectory the rest."""
    name = data.draw(st.sampled_from(["qwen3", "glm4moe", "qwen3_5_think"]))
    talk = Talk(
        templated(name, renderer=data.draw(st.sampled_from(["auto", "sentinel"]))),
        policy=data.draw(st.sampled_from(list(ContextPolicy))),
        vanishing=data.draw(st.sampled_from(list(VanishingPolicy))),
        capture=data.draw(st.sampled_from([PromptMode.EXACT, PromptMode.EXACT, PromptMode.PLAIN])),
        noise=[r"\[\d+\]"],
    )
    number = iter(range(10_000))

    def say() -> Say:
        count = data.draw(st.integers(0, 2))
        calls = tuple(call("bash", command=f"command {next(number)}") for _ in range(count))
        cut = data.draw(st.sampled_from([0, 0, 0, 4]))
        think = data.draw(st.sampled_from([None, "A thought.", "Another thought."]))
        return Say(data.draw(st.sampled_from(["Yes.", "No, certainly not."])), calls, think, cut)

    def going_on(turn: Asked) -> list[Message]:
        history = turn.answered() if turn.calls else [*turn.history, user(f"More {next(number)}.")]
        if data.draw(st.booleans()):
            history = [replace(message, reasoning=None) for message in history]
        return history

    turns = [talk.ask([system(), user(TASK)], say())]
    flying: list[Asked] = []
    for _ in range(data.draw(st.integers(1, 6))):
        turn = data.draw(st.sampled_from(turns))
        what = data.draw(st.sampled_from(DEEDS))
        if what == "go on":
            turns.append(talk.ask(going_on(turn), say()))
        elif what == "note":
            turns.append(talk.ask([*going_on(turn), user(f"Note {next(number)}.")], say()))
            turns[-1].request.pop()
        elif what == "foreign":
            turns.append(talk.ask([*going_on(turn), Message("assistant", "Yes."), user("And?")], say()))
        elif what == "prefill" and not turn.calls:
            turns.append(talk.ask(turn.history, say()))
        elif what == "other tools":
            turns.append(talk.ask(going_on(turn), say(), tools=TOOLS[:1]))
        elif what == "no thinking":
            turns.append(talk.ask(going_on(turn), say(), args={"enable_thinking": False}))
        elif what == "noise":
            messages = going_on(turn)
            messages[0] = system(f"[{next(number)}]{system().text}")
            turns.append(talk.ask(messages, say()))
        elif what == "edit":
            messages = going_on(turn)
            place = data.draw(st.integers(0, len(messages) - 2))
            if messages[place].role != "assistant":
                messages[place] = replace(messages[place], text="[edited]")
            turns.append(talk.ask(messages, say()))
        elif what == "again":
            turns.append(talk.ask(turn.request, say()))
        elif what == "fly":
            flying.append(talk.start(going_on(turn)))
        elif what == "land" and flying:
            turns.append(talk.finish(flying.pop(), say()))
        elif what == "abort":
            talk.ask(going_on(turn), abort=True)
        elif what == "lose":
            talk.ask(going_on(turn), say(), deliver=False)
        elif what == "compact":
            turns.append(talk.ask([system(), user(f"Summary {next(number)}.")], say()))
    for builder in BuilderName:
        made = talk.trajectory(builder)
        trained = [turn for turn in made.turns if turn.role in made.trained_roles]
        assert made.report.trained_tokens == sum(len(turn.sampled) for turn in trained)


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_distinct_tokens_are_the_edges_of_a_trie(rows: list[list[int]]) -> None:
    edges = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    assert distinct_tokens([np.asarray(row, np.int32) for row in rows]) == len(edges)


def test_distinct_tokens_of_large_ids() -> None:
    one = np.asarray([1, 70_000, 3], np.int32)
    two = np.asarray([1, 300, 3], np.int32)
    assert distinct_tokens([one, two, one]) == 5
    assert distinct_tokens([]) == 0


# What a plain server would have shown


def difference(talk: Talk, turn: Asked, plain: list[int]) -> float | None:
    made = talk.trajectory(plain_prompts={turn.node: np.asarray(plain, np.int32)})
    return made.report.plain_difference


def test_share_that_a_plain_server_would_show_differently() -> None:
    kept = Talk(real("qwen3"))
    last = conversation(kept, canonical=True, think=False)[-1]
    assert difference(kept, last, kept.plain(last.request, last.node)) == 0
    assert kept.trajectory().report.plain_difference is None
    dropped = Talk(real("qwen3"))
    turns = conversation(dropped, canonical=True, keep=False)
    last = turns[-1]
    plain = dropped.plain(last.request, last.node)
    share = difference(dropped, last, plain)
    # Nothing is new in the plain prompt, so what ours has more is what differs.
    assert share == (len(last.prompt) - len(plain)) / (len(last.prompt) + len(plain))
    assert 0.02 < share < 0.5


def test_turns_that_a_plain_server_would_show_differently() -> None:
    """Each difference has the turn that brought it, on whichever side the tokens are."""
    talk = Talk(real("qwen3", renderer="sentinel"))
    turn = talk.ask([system(), user(TASK)], Say("One answer.", canonical=True))
    turns = [turn]
    for number in range(4):
        turn = talk.ask([*turn.history, user(f"Question {number} of several.")], Say("One answer.", canonical=True))
        turns.append(turn)
    last, plain = turns[-1], talk.plain(turns[-1].request, turns[-1].node)
    assert plain == last.prompt
    extra = talk.codec.tokenizer.encode("<think>\n\n</think>\n\n")
    seen = {other.node.index: other.node for other in turns}

    def report(prompt: list[int]) -> tuple[float, int, list[str]]:
        made = talk.trajectory(plain_prompts={last.node: np.asarray(prompt, np.int32)}).report
        assert made.plain_difference is not None
        return made.plain_difference, made.plain_different, made.plain_different_turns

    assert report(plain) == (0, 0, [])
    for index in (1, 2, 4):
        # A generation prompt that is longer, shorter or other than ours.
        place = seen[index].prompt_length
        share = len(extra) / (len(plain) * 2 + len(extra))
        assert report(plain[:place] + extra + plain[place:]) == (share, 1, [seen[index].id])
        assert report(plain[: place - 1] + plain[place:])[1:] == (1, [seen[index].id])
        assert report([*plain[: place - 1], 1, *plain[place:]]) == (2 / (2 * len(plain)), 1, [seen[index].id])
    # A reply that a plain server would spell otherwise, and a system prompt.
    place = seen[2].end - 2
    assert report([*plain[:place], 1, 2, *plain[place + 1 :]])[1:] == (1, [seen[2].id])
    assert report([*plain[:2], 1, *plain[2:]])[1:] == (1, [seen[0].id])
    both = [*plain[:2], 1, *plain[2:place], 1, 2, *plain[place + 1 :]]
    assert report(both)[1:] == (2, [seen[0].id, seen[2].id])
    assert report([])[1] == 5


@given(st.data())
def test_difference_counts_skipped_tokens(data: st.DataObject) -> None:
    """Pieces of at least a row in common, in any arrangement of what only one side has."""
    fresh = iter(range(1, 10_000))

    def piece(least: int) -> list[int]:
        return [next(fresh) for _ in range(data.draw(st.integers(least, 20)))]

    ours: list[int] = []
    theirs: list[int] = []
    alone = missed = 0
    for _ in range(data.draw(st.integers(0, 5))):
        common, mine, other = piece(8), piece(0), piece(0)
        ours += common + mine
        theirs += common + other
        alone += len(mine)
        missed += len(other)
    last = piece(0)
    found = differences(np.asarray(ours + last, np.int32), np.asarray(theirs + last, np.int32))
    assert (sum(span.ours for span in found), sum(span.theirs for span in found)) == (alone, missed)


# Controls: with a check switched off, the next one catches it


def corrupt(talk: Talk, turn: Asked, place: int) -> None:
    assert turn.node.buffer is not None
    turn.node.buffer._data[place] += 1


def test_a_corrupt_seam_is_caught_at_the_call() -> None:
    talk = Talk(real("qwen3"))
    first = talk.ask([system(), user(TASK)], LOOK)
    corrupt(talk, first, first.node.end - 2)
    with pytest.raises(FidelityError, match="not what that turn saw and sampled"):
        talk.start(first.answered("x"))


@pytest.mark.parametrize("builder", list(BuilderName))
def test_a_corrupt_buffer_is_caught_at_build(monkeypatch: pytest.MonkeyPatch, builder: BuilderName) -> None:
    """The invariant switched off at the calls: what the engine was sent is still compared with the rows."""
    talk = Talk(real("qwen3"))
    first = talk.ask([system(), user(TASK)], LOOK)
    talk.trajectory(builder)
    monkeypatch.setattr(graph_module, "check_seam", lambda *_: None)
    corrupt(talk, first, 3)
    wrong = talk.graph.nodes[0].tokens().tolist()
    talk.sent[first.node] = wrong[: first.node.prompt_length]
    talk.ask(first.answered("x"), "Done.")
    with pytest.raises(FidelityError, match="sampled under another prompt"):
        talk.trajectory(builder)


def test_a_corrupt_buffer_is_caught_on_release() -> None:
    """A branch that no request continues releases its buffer, which is checked first."""
    talk = Talk(real("qwen3"))
    first = talk.ask([system(), user(TASK)], LOOK)
    corrupt(talk, first, 3)
    for number in range(7):
        talk.ask([system(), user(f"Another task {number}.")], "Yes.")
    with pytest.raises(FidelityError, match="turn t0 was sampled under another prompt"):
        talk.start([system(), user("One more.")])


def test_a_buffer_is_passed_to_one_child_only() -> None:
    talk = Talk(real("qwen3"))
    first = talk.ask([system(), user(TASK)], LOOK)
    flying = [talk.start(first.answered(text)) for text in ("a", "b", "c")]
    prompts = [list(turn.prompt) for turn in flying]
    for turn in reversed(flying):
        talk.finish(turn, f"Answer {turn.node.index}.")
    for turn, prompt in zip(flying, prompts, strict=True):
        assert talk.sent[turn.node] == prompt == turn.node.prompt().tolist()
        assert turn.node.tokens().tolist() == prompt + turn.sampled
    live = [node for node in talk.nodes if node.buffer is not None]
    assert len(live) == len({id(node.buffer) for node in live}) == 3
    long = flying[0]
    for _ in range(30):
        long = talk.ask([*long.history, user("More.")], "Yes.")
    assert sum(node.buffer is not None for node in talk.nodes) <= 8
    talk.trajectory()
