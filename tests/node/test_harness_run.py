"""Loop detection: the same call with the same result, counted along one conversation."""

from __future__ import annotations

import numpy as np

from towline.conversation import Finish, Message, Reply, ToolCall
from towline.node.harness_run import count_repetitions
from towline.tokens.graph.graph import GraphNode


def turn(parent: GraphNode | None, results: list[str], calls: list[ToolCall]) -> GraphNode:
    index = 0 if parent is None else parent.index + 1
    new = [Message("tool", text, tool_call_id=f"c{index}{n}") for n, text in enumerate(results)]
    return GraphNode(
        id=f"t{index}",
        index=index,
        key="",
        parent=parent,
        suffix=np.array([1], np.int32),
        prompt_length=1,
        request_hash=b"",
        new=new or [Message("user", "go")],
        reply=Reply("", None, tuple(calls)),
        finish=Finish.STOP,
    )


def call(number: int, **arguments: object) -> ToolCall:
    return ToolCall(f"id{number}", "bash", dict(arguments))


def test_equal_calls_with_equal_results_are_counted() -> None:
    node = turn(None, [], [call(0, command="ls", cwd="/")])
    assert count_repetitions(node) == 0
    for number in range(1, 6):
        # Ids and the order of arguments mean nothing.
        node = turn(node, ["same"], [call(number, cwd="/", command="ls")])
        assert count_repetitions(node) == number


def test_another_result_another_call_or_a_plain_reply_ends_the_count() -> None:
    first = turn(None, [], [call(0, command="ls")])
    second = turn(first, ["one"], [call(1, command="ls")])
    assert count_repetitions(turn(second, ["two"], [])) == 1
    assert count_repetitions(turn(second, ["one"], [])) == 2
    third = turn(second, ["one"], [call(2, command="pwd")])
    assert count_repetitions(turn(third, ["one"], [])) == 1
    spoken = turn(second, ["one"], [])
    assert count_repetitions(turn(spoken, [], [])) == 0


def sent(*messages: Message, origin: GraphNode | None = None) -> GraphNode:
    """A turn that is a root: its request holds everything."""
    node = turn(None, [], [])
    node.new, node.message_count, node.origin = list(messages), len(messages), origin
    return node


def step(number: int, result: str = "same", command: str = "ls") -> tuple[Message, Message]:
    said = Message("assistant", "", None, (call(number, command=command),))
    return said, Message("tool", result, tool_call_id=f"id{number}")


def test_turns_that_are_all_roots_are_counted_too() -> None:
    steps = [message for number in range(4) for message in step(number)]
    assert count_repetitions(sent(Message("user", "go"), *steps)) == 4
    assert count_repetitions(sent(Message("user", "go"), *steps, *step(9, "other"))) == 1
    assert (
        count_repetitions(sent(Message("user", "go"), *steps, Message("assistant", "Hm."), Message("user", "?"))) == 0
    )
    # One message may hold the calls of several turns.
    merged = Message("assistant", "", None, tuple(call(number, command="ls") for number in range(3)))
    results = [Message("tool", "same", tool_call_id=f"id{number}") for number in range(3)]
    assert count_repetitions(sent(Message("user", "go"), merged, *results)) == 3


def test_results_that_were_cleared_later_count_as_they_were() -> None:
    node = sent(Message("user", "go"), *step(0))
    for number in range(1, 4):
        cleared = [message for earlier in range(number) for message in step(earlier, "[cleared]")]
        node = sent(Message("user", "go"), *cleared, *step(number), origin=node)
        assert count_repetitions(node) == number + 1
