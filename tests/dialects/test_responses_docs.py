"""The table of the responses dialect in the docs is true, and it leaves nothing out that the official client knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import orjson
import pytest
from openai.types.responses import ResponseInputContentParam, ResponseInputItemParam, ToolParam, response_create_params

from support.dialects.responses_bodies import (
    COMPUTER,
    DIALECT,
    RICH,
    USER,
    messages,
    read,
)
from towline.conversation import Answer, Reply, Usage
from towline.errors import BadRequest

DOCS = Path(__file__).parents[2] / "docs" / "dialects" / "responses.md"


def documented(section: str) -> dict[str, str]:
    """What the tables of a section say of each name."""
    text = DOCS.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in text.splitlines() if line.startswith("| `")]
    found = {name.strip("`"): verdict for name, verdict in rows}
    assert len(found) == len(rows)
    return found


def types_of(union: Any) -> set[str]:
    """The values of `type` in a union of the client's models."""
    hints = [get_type_hints(member)["type"] for member in get_args(union)]
    return {value for hint in hints for value in _literals(hint)}


def _literals(hint: Any) -> Iterator[str]:
    for inner in get_args(hint):
        yield from [inner] if isinstance(inner, str) else _literals(inner)


FIELDS: dict[str, Any] = {
    **RICH,
    "conversation": "c",
    "prompt": {"id": "p"},
    "generate": False,
    "truncation": "auto",
    "background": True,
    "service_tier": "flex",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "context_management": [{"type": "compaction"}],
    "moderation": {"model": "m"},
    "access_programs": {"cyber": "standard"},
    "image": {"context_compression": "auto"},
    "client_metadata": {"a": "b"},
    "enable_thinking": True,
    "reasoning_effort": "low",
    "tool_choice": "none",
}


def test_the_docs_cover_every_field() -> None:
    verdicts = documented("Fields")
    assert verdicts.keys() >= response_create_params.ResponseCreateParamsBase.__annotations__.keys() | {"stream"}
    assert verdicts.keys() == FIELDS.keys()
    for name, verdict in verdicts.items():
        if verdict == "refused":
            with pytest.raises(BadRequest) as caught:
                read(**{name: FIELDS[name]})
            assert caught.value.param == name
            continue
        request, _ = read(**{name: FIELDS[name]})
        assert (name in request.ignored) == (verdict == "ignored")
        if verdict == "carried":
            body = orjson.loads(DIALECT.write(request, Answer("0a", 1, "m", [Reply("a")], Usage(1, 1))).body)
            assert body[name] == FIELDS[name]


def test_the_docs_cover_every_item_and_part() -> None:
    examples = {item.get("type", "message"): item for item in RICH["input"]}
    verdicts = documented("Items of `input`")
    assert verdicts.keys() == types_of(ResponseInputItemParam)
    for kind, verdict in verdicts.items():
        if verdict == "refused":
            with pytest.raises(BadRequest):
                read(input=[USER, {"type": kind, "id": "x"}])
            continue
        body = {"input": [USER, examples.get(kind, {"type": kind, "id": "msg_0ax0"})]}
        said = {"type": "message", "role": "assistant", "content": "of the answer 0a"}
        request, _ = read(**DIALECT.with_references(body, {"0a": [said]}.get))
        seen = len(request.messages) == 2 or len(request.tools) == 1
        assert (seen, request.ignored) == ((True, ()) if verdict == "used" else (False, (f"input[1]:{kind}",)))

    parts = {part["type"]: part for item in RICH["input"] for part in item.get("content", [])}
    parts |= {"refusal": {"type": "refusal", "refusal": "no"}, "computer_screenshot": COMPUTER}
    for kind, verdict in documented("Parts of content").items():
        assert verdict == "used"
        (found,) = messages({"role": "user", "content": [parts[kind]]})
        assert found.text or found.media
    assert documented("Parts of content").keys() >= types_of(ResponseInputContentParam)


def test_the_docs_cover_every_type_of_tool() -> None:
    examples = {tool["type"]: tool for tool in [*RICH["tools"][:4], {"type": "custom", "name": "p"}]}
    verdicts = documented("Types of `tools`")
    dated = {"web_search_2025_08_26", "web_search_preview_2025_03_11"}
    assert verdicts.keys() == types_of(ToolParam) - dated
    for kind in verdicts.keys() | dated:
        request, _ = read(tools=[examples.get(kind, {"type": kind})])
        used = verdicts.get(kind) == "used"
        assert (len(request.tools), request.ignored) == ((1, ()) if used else (0, (f"tools[0]:{kind}",)))
