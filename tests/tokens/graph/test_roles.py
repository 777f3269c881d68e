"""The role of each conversation, and turns that were never delivered."""

from __future__ import annotations

from support.tokens.conversations import Say, Talk, call, real, system, user
from towline.conversation import Hints
from towline.schema import ForkReason, TurnRole
from towline.tokens.graph.roles import assign_roles

MAIN, SUBAGENT, COMPACTION = TurnRole.MAIN, TurnRole.SUBAGENT, TurnRole.COMPACTION
SIDE, DISCARDED = TurnRole.SIDE, TurnRole.DISCARDED
TASK = "Fix the failing test."
LOOK = Say("", (call("bash", command="ls"),), "Let me look.")
LONG = "A long answer. " * 20


def talk(instruction: str = TASK) -> Talk:
    return Talk(real("qwen3"), instruction=instruction)


def test_nothing() -> None:
    assert assign_roles(talk().graph) == {}
    flying = talk()
    flying.start([user(TASK)])
    assert assign_roles(flying.graph) == {}


def test_main_is_the_conversation_with_the_instruction() -> None:
    one = talk()
    one.ask([system("Other."), user("Warm up.")], LONG)
    one.ask([system(), user(f"Please do this:\n{TASK}\nThanks.")], "Yes.")
    assert one.roles == [SUBAGENT, MAIN]
    # Without an instruction, or with one that no root has, the root with tools that sampled most.
    for instruction in ("", "Never said."):
        two = talk(instruction)
        two.ask([system("Title."), user(TASK)], LONG * 2, tools=())
        two.ask([system("Other."), user("Warm up.")], LONG)
        two.ask([system(), user(TASK)], "Yes.")
        assert two.roles == [SIDE, MAIN, SUBAGENT]


def test_conversations_that_only_quote_the_instruction() -> None:
    one = talk()
    one.ask([system("Make a title."), user(TASK)], LONG, tools=(), hints=Hints(session="a"))
    one.ask([system("You search."), user(TASK)], LONG, hints=Hints(session="b", parent_session="a"))
    first = one.ask([system(), user(TASK)], LOOK, hints=Hints(session="a"))
    one.ask(first.answered("x"), "Done.", hints=Hints(session="a"))
    assert one.roles == [SIDE, SUBAGENT, MAIN, MAIN]
    # Without tools anywhere, nothing is aside.
    bare = talk()
    bare.ask([system("Plan."), user(TASK)], "A plan.", tools=())
    bare.ask([system("Do."), user("A plan.")], LONG, tools=())
    assert bare.roles == [MAIN, SUBAGENT]


def test_undelivered_first_attempts_are_never_main() -> None:
    one = talk()
    one.ask([system(), user(TASK)], abort=True)
    one.ask([system(), user(TASK)], LONG, deliver=False)
    first = one.ask([system(), user(TASK)], LOOK)
    one.ask(first.answered("x"), "Done.")
    assert one.roles == [DISCARDED, DISCARDED, MAIN, MAIN]
    only = talk()
    only.ask([system(), user(TASK)], LONG, deliver=False)
    assert only.roles == [DISCARDED]
    assert only.trajectory().error == "no token of a trained role was sampled"


def test_a_continued_turn_counts_as_delivered() -> None:
    """A reply that the harness sends back was delivered, whatever the connection reported."""
    one = talk()
    first = one.ask([system(), user(TASK)], LOOK, deliver=False)
    second = one.ask(first.answered("x"), "Done.", deliver=False)
    assert one.roles == [MAIN, DISCARDED]
    assert second.node.parent is first.node


def test_a_call_without_tools_over_the_same_history() -> None:
    """The last one is main's answer; one that main continues without is a side call; one that the next root starts from is a
    summary."""
    one = talk()
    first = one.ask([system(), user(TASK)], LOOK)
    second = one.ask([*first.answered("x"), user("Memorise.")], "Memo.", tools=())
    assert second.node.reason is ForkReason.TOOLS_CHANGED
    assert one.roles == [MAIN, MAIN]
    one.ask(first.answered("x"), "Done.")
    assert one.roles == [MAIN, SIDE, MAIN]
    two = talk()
    first = two.ask([system(), user(TASK)], LOOK)
    two.ask([*first.answered("x"), user("Memorise.")], "Memo.", tools=())
    two.ask([system(), user("Memo.")], "Done.")
    assert two.roles == [MAIN, COMPACTION, COMPACTION]


def test_headers_take_precedence() -> None:
    one = talk()
    main, agent = Hints(session="a"), Hints(session="a", agent="x")
    first = one.ask([system(), user(TASK)], LOOK, hints=main)
    one.ask(first.answered("x"), "Done.", hints=main)
    sub = one.ask([system(), user("Search.")], LOOK, hints=agent, tools=())
    one.ask([*sub.answered("x"), user("Go on with that.")], LONG, hints=agent, tools=())
    shorter = one.ask([system(), user("Summary.")], "Yes.", hints=agent, tools=())
    assert shorter.node.reason is ForkReason.SIDE
    assert one.roles == [MAIN, MAIN, SUBAGENT, SUBAGENT, SUBAGENT]


def test_a_sub_agent_that_continues_its_parents_history() -> None:
    one = talk()
    first = one.ask([system(), user(TASK)], LOOK, hints=Hints(session="a"))
    fork = one.ask([*first.answered("x"), user("You search.")], LOOK, hints=Hints(session="a", agent="b"))
    one.ask(first.answered("x"), "Done.", hints=Hints(session="a"))
    one.ask(fork.answered("y"), "Found.", hints=Hints(session="a", agent="b"))
    assert fork.node.parent is first.node
    assert one.roles == [MAIN, SUBAGENT, MAIN, SUBAGENT]
    assert [t.role for t in one.trajectory().traces] == [MAIN, SUBAGENT]


def test_another_model_name_changes_nothing() -> None:
    one = talk()
    first = one.ask([system(), user(TASK)], LOOK)
    one.ask([system("You search."), user("Find it.")], "There.", model="small")
    one.ask(first.answered("x"), "Done.", model="large")
    assert one.roles == [MAIN, SUBAGENT, MAIN]
    assert one.trajectory().report.untrained_tokens == {}


def test_later_steps_are_main() -> None:
    """A harness that cannot resume begins a new conversation with each step of a task."""
    one = talk()
    one.instruction = (TASK, "Now write the docs.")  # type: ignore[assignment]
    one.ask([system(), user(TASK)], LOOK)
    one.ask([system(), user("Now write the docs.")], "Written.")
    assert one.roles == [MAIN, MAIN]
    assert one.trajectory().turns[1].role_reason == "carries the instruction of a later step"
