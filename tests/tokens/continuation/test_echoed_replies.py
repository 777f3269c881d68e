"""Replies that a harness appends text to: their tokens stay as sampled, in as few rows as possible."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.tokens.conversations import Say, Talk, call, real, system, templated, user
from towline.conversation import Message
from towline.runs.formats import row_messages
from towline.schema import ContextPolicy, ForkReason, Reward, Trajectory, TurnRole
from towline.tokens.continuation.echoed_replies import appended_text
from towline.trainers import nemo_gym, verifiers
from towline.trainers.packing import split_rows

TASK = "Fix the failing test."
CODECS = ("qwen3", "glm4moe", "llama3", "gptoss", "phi3")


def played(*edits: str, codec: str = "qwen3", policy: ContextPolicy = ContextPolicy.RETAIN, think: str = "") -> Talk:
    """A turn for each edit of its reply, and one more."""
    talk = Talk(real(codec) if codec == "qwen3" else templated(codec), policy=policy, instruction=TASK)
    history = [user(TASK)]
    for number, edit in enumerate((*edits, "")):
        turn = talk.ask(history, Say(f"Thought {number}: look at number {number * 7}.", (), think or None))
        reply = turn.reply
        texts = {"append": f"{reply.text}\n<end_code>", "glue": f"{reply.text}!", "replace": f"Other words {number}."}
        said = [] if edit == "drop" else [replace(reply, text=texts.get(edit, reply.text))]
        history = [*turn.request, *said, user(f"Observation {number}.")]
    return talk


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("think", ["", "Hmm, a thought."])
def test_appended_replies_are_one_row(codec: str, think: str) -> None:
    talk = played(*["append"] * 5, codec=codec, think=think)
    made = talk.trajectory()
    assert talk.reasons == [None, *[ForkReason.HISTORY_EDITED] * 5]
    assert len(made.traces) == 1
    assert [turn.unended for turn in made.turns] == [1] * 5 + [0]
    assert made.report.untrained_tokens == {"end_of_turn": 5}
    text = talk.text(made.traces[0].token_ids)
    assert all(text.index(f"Thought {n}") < text.index("<end_code>", text.index(f"Thought {n}")) for n in range(5))
    # What a plain server shows otherwise, it shows otherwise without any edit too.
    plain = played(*["verbatim"] * 5, codec=codec, think=think)
    for edited, kept in zip(talk.nodes, plain.nodes, strict=True):
        assert talk.text(talk.sent[edited]).replace("\n<end_code>", "") == plain.text(plain.sent[kept])


@given(
    st.lists(st.sampled_from(("verbatim", "append", "glue", "replace", "drop")), min_size=1, max_size=6),
    st.sampled_from(list(ContextPolicy)),
    st.sampled_from(CODECS),
    st.sampled_from(("", "Hmm.")),
)
def test_arbitrary_edits_of_replies(edits: list[str], policy: ContextPolicy, codec: str, think: str) -> None:
    talk = played(*edits, policy=policy, codec=codec, think=think)
    made = talk.trajectory()
    assert set(talk.roles) == {TurnRole.MAIN}
    if policy is ContextPolicy.RETAIN:
        assert len(made.traces) == 1 + sum(edit in ("replace", "drop") for edit in edits)
        assert sum(bool(turn.difference) for turn in made.turns) == sum(edit != "verbatim" for edit in edits)
    assert Trajectory.from_json(made.to_json()) == made


def test_messages_that_are_not_appended_replies() -> None:
    talk = Talk(real("qwen3"))
    spoken = talk.ask([user(TASK)], "One word.").node
    called = talk.ask([user("Go.")], Say("Look.", (call("bash", command="ls"),))).node
    loose = talk.ask([user("Well?")], Say("One word.  \n")).node
    codec = talk.codec
    kept, added = appended_text(spoken, Message("assistant", "One word. Two words."), codec)
    assert (kept, added) == (len(spoken.sampled) - 1, " Two words.")
    assert appended_text(loose, Message("assistant", "One word. Two"), codec)[1] == " Two"
    for other in ("One", "One word.", "Two. One word.", "one word. Two"):
        assert appended_text(spoken, Message("assistant", other), codec) == (0, "")
    assert appended_text(spoken, Message("user", "One word. Two words."), codec) == (0, "")
    assert appended_text(called, Message("assistant", "Look. And see."), codec) == (0, "")


def test_a_turn_that_is_continued_both_ways_is_trained_whole() -> None:
    talk = Talk(real("qwen3"), instruction=TASK)
    first = talk.ask([system(), user(TASK)], "One word.")
    written = replace(first.reply, text="One word. And more.")
    talk.ask([*first.request, written, user("A?")], "A.")
    talk.ask([*first.history, user("B?")], "B.")
    made = talk.trajectory()
    assert [turn.unended for turn in made.turns] == [0, 0, 0]
    assert [sorted(set(t.turn_ids[t.loss_mask == 1].tolist())) for t in made.traces] == [[1], [0, 2]]


def test_a_row_is_one_conversation() -> None:
    made = played("append", "append").trajectory().with_reward(Reward(value=1.0, evaluator="answer"))
    (row,) = split_rows(made)
    expected = [
        ("user", TASK),
        ("assistant", "Thought 0: look at number 0."),
        ("user", "Observation 0."),
        ("assistant", "Thought 1: look at number 7."),
        ("user", "Observation 1."),
        ("assistant", "Thought 2: look at number 14."),
    ]
    assert [(said.role, said.text) for said in row_messages(made, row.trace)] == expected
    assert [said.trained for said in row_messages(made, row.trace)] == [False, True] * 3
    nodes = verifiers.trace_fields(made)["nodes"]
    assert [(node["message"]["role"], node["message"]["content"]) for node in nodes] == expected
    items = nemo_gym.output_items(row)
    assert [item["content"][0]["text"] if item["role"] == "assistant" else item["content"] for item in items] == [
        text for _, text in expected[1:]
    ]


def test_a_row_that_claims_too_many_tokens_is_refused() -> None:
    made = played("append", "append").trajectory()
    for change in ({"unended": 0}, {"unended": 2}):
        turns = [made.turns[0].model_copy(update=change), *made.turns[1:]]
        with pytest.raises(ValueError, match="whole and as it was sampled"):
            Trajectory.model_validate(made.__dict__ | {"turns": turns})
    # Trained next to the path, but after another prompt.
    suffix = made.turns[1].suffix.copy()
    suffix[0] += 1
    turns = [made.turns[0], made.turns[1].model_copy(update={"suffix": suffix}), made.turns[2]]
    with pytest.raises(ValueError, match="context it was not sampled in"):
        Trajectory.model_validate(made.__dict__ | {"turns": turns})
