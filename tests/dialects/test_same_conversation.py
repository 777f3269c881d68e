"""The same conversation in the four dialects gives the same neutral messages, and the same token rows."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.dialects import wire_clients as telling
from towline.conversation import Finish, Media, Message, Reply, Role, Tool, ToolCall
from towline.dialects.base import Dialect, ReadCache
from towline.dialects.registry import all_dialects
from towline.tokens.codec import ModelCodec, RenderContext
from towline.tokens.continuation.planner import Planner
from towline.tokens.graph import fingerprint
from towline.tokens.graph.graph import Graph, GraphNode
from towline.tokens.graph.tool_results import order_tool_results
from towline.tokens.loading import load_codec

TOOLS = (
    Tool("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}}),
    Tool(
        "edit",
        "Edits a file.",
        {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}},
    ),
)
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=20).filter(str.strip)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["command", "path", "n", "deep"]),
    st.one_of(TEXT, st.integers(-(2**40), 2**40), st.booleans(), st.none(), st.lists(st.integers(0, 9), max_size=3)),
    max_size=3,
)


@pytest.fixture(scope="module")
def codec(assets: Path) -> ModelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


@st.composite
def pictures(draw: st.DrawFn, text: str, *, behind: bool = False) -> tuple[Media, ...]:
    """Zero, one or two images in the text, or after it."""
    seen = draw(st.lists(st.binary(min_size=1, max_size=6), max_size=2, unique=True))
    places = sorted(draw(st.integers(0, len(text))) for _ in seen)
    return tuple(
        Media("image", sha256(data).hexdigest(), f"data:image/png;base64,{b64encode(data).decode()}", place)
        for data, place in zip(seen, [len(text)] * len(seen) if behind else places, strict=True)
    )


@st.composite
def said(draw: st.DrawFn, role: Role, **fields: str) -> Message:
    """What a user or a tool says, with images in it."""
    text = draw(TEXT)
    return Message(role, text, media=draw(pictures(text, behind=role == "tool")), **fields)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Questions and results with images, replies with and without calls, results out of order; it ends on a question or on
    results."""
    messages = [Message("system", draw(TEXT))] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 4))):
        messages.append(draw(said("user")))
        for step in range(draw(st.integers(0, 2))):
            count = draw(st.integers(1, 3))
            calls = tuple(
                ToolCall(f"call{turn:02d}{step:03d}{n:03d}", draw(st.sampled_from(TOOLS)).name, draw(ARGUMENTS))
                for n in range(count)
            )
            reasoning = draw(st.none() | TEXT)
            messages.append(Message("assistant", draw(st.just("") | TEXT), reasoning, calls))
            results = [draw(said("tool", tool_call_id=call.id, name=call.name)) for call in calls]
            messages += draw(st.permutations(results))
        messages.append(Message("assistant", draw(TEXT), draw(st.none() | TEXT)))
    return messages[:-1]


def read(
    dialect: Dialect, messages: list[Message], known: ReadCache
) -> tuple[list[Message], tuple[Tool, ...], ReadCache]:
    request, after = dialect.read(telling.calls_of(dialect.name, messages, TOOLS), known)
    order_tool_results(request.messages)
    return request.messages, request.tools, after


@given(conversations())
def test_the_same_messages_whatever_the_dialect(conversation: list[Message]) -> None:
    expected = list(conversation)
    order_tool_results(expected)
    for dialect in all_dialects():
        messages, tools, _ = read(dialect, conversation, ReadCache())
        assert messages == expected, dialect.name
        assert fingerprint.root_key(tools, {}) == fingerprint.root_key(TOOLS, {}), dialect.name


@given(conversation=conversations())
@settings(max_examples=15)
def test_the_same_rows_whatever_the_dialect(codec: ModelCodec, conversation: list[Message]) -> None:
    rows = [rows_of(dialect, codec, conversation) for dialect in all_dialects()]
    assert all(row == rows[0] for row in rows)


def rows_of(dialect: Dialect, codec: ModelCodec, conversation: list[Message]) -> list[list[int]]:
    """The prompt of every turn, when each reply of the conversation is sampled and sent back in this dialect."""
    graph, planner, frame, known = Graph(), Planner(codec), RenderContext(TOOLS), ReadCache()
    prompts = []
    for place in [i for i, m in enumerate(conversation) if m.role == "assistant"] + [len(conversation)]:
        request, known = dialect.read(telling.calls_of(dialect.name, conversation[:place], TOOLS), known)
        order_tool_results(request.messages)
        plan = planner.plan(graph, request, "key", frame, planner.hashes(request.messages))
        length = (plan.parent.end if plan.parent else 0) + len(plan.suffix)
        node = GraphNode(
            f"n{place}", len(graph.nodes), "key", plan.parent, plan.suffix, length, plan.request_hash, plan.request_hash,
            message_count=place, reason=plan.reason, new=plan.new, delivered=True,
        )  # fmt: skip
        graph.add(node)
        prompts.append(graph.open_prompt(node).tolist())
        assert ("image_not_shown" in plan.flags) == any(message.media for message in plan.new)
        assert codec.tokenizer.decode(plan.suffix).count("[image]") == sum(
            len(message.media) + message.text.count("[image]") for message in plan.new
        )
        if place == len(conversation):
            break
        said = conversation[place]
        written = codec.write(said.text, said.reasoning, said.tool_calls, frame)
        node.sampled = np.asarray(written, np.int32)
        node.logprobs = np.zeros(len(written), np.float32)
        node.versions = np.zeros(len(written), np.int32)
        node.finish = Finish.STOP
        node.reply = Reply(said.text, said.reasoning, said.tool_calls)
        graph.finish(node)
        assert plan.reason is None
    return prompts
