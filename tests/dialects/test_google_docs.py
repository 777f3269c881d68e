"""The tables of the Google dialect in the docs are true, and they leave nothing out that the official client knows."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from google.genai import models, types

from support.dialects.google_wire import INLINE, USER, messages, model, read, result, text, user
from towline.conversation import Message, Request
from towline.errors import BadRequest

DOCS = Path(__file__).parents[2] / "docs" / "dialects" / "google.md"


def documented(section: str) -> dict[str, str]:
    """What the table of a section says of each name."""
    rest = DOCS.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in rest.splitlines() if line.startswith("| `")]
    found = {name.strip("`"): verdict for name, verdict in rows}
    assert len(found) == len(rows)
    return found


def written(converter: str, target: str = "to_object") -> set[str]:
    """The fields that the client's converter of that name writes, for either of Google's services."""
    found: set[str] = set()
    for service in ("mldev", "vertex"):
        source = inspect.getsource(getattr(models, f"_{converter}_to_{service}", lambda: None))
        found |= set(re.findall(rf"setv\(\s*{target},\s*\['(\w+)'", source))
    return found


def fields_of(kind: Any) -> set[str]:
    return {field.alias for field in kind.model_fields.values()}


DECLARED = [{"functionDeclarations": [{"name": "f"}]}]


def recorded(request: Request, name: str) -> bool:
    return name in request.ignored


def test_the_docs_cover_every_field() -> None:
    verdicts = documented("Fields")
    assert verdicts.keys() >= written("GenerateContentConfig", "parent_object")
    examples: dict[str, Any] = {
        "contents": [USER],
        "systemInstruction": "s",
        "tools": DECLARED,
        "toolConfig": {"functionCallingConfig": {"mode": "NONE"}},
        "generationConfig": {"seed": 1},
        "model": "models/m",
        "generateContentRequest": {"contents": [USER]},
    }
    for name, verdict in verdicts.items():
        request, _ = read(**{name: examples.get(name, {"x": 1})})
        assert recorded(request, name) == (verdict == "ignored"), name
    assert read(toolConfig=examples["toolConfig"])[0].tool_choice == "none"


def test_the_docs_cover_every_field_of_the_generation_config() -> None:
    verdicts = documented("Fields of `generationConfig`")
    assert verdicts.keys() == fields_of(types.GenerationConfig) | written("GenerateContentConfig")
    examples: dict[str, Any] = {
        **dict.fromkeys(("temperature", "topP", "topK", "maxOutputTokens", "presencePenalty", "frequencyPenalty"), 1),
        "seed": 5,
        "candidateCount": 2,
        "stopSequences": ["x"],
        "responseLogprobs": True,
        "responseMimeType": "application/json",
        "thinkingConfig": {},
    }
    plain, _ = read()
    for name, verdict in verdicts.items():
        request, _ = read(generationConfig={name: examples.get(name, {"x": 1})})
        assert recorded(request, f"generationConfig.{name}") == (verdict == "ignored"), name
        assert (name in request.sampling.other) == (verdict == "carried"), name
        if verdict == "used" and name != "thinkingConfig":
            assert (request.sampling, request.wire) != (plain.sampling, plain.wire), name

    verdicts = documented("Fields of `thinkingConfig`")
    assert verdicts.keys() == fields_of(types.ThinkingConfig)
    for name, value in {"includeThoughts": True, "thinkingLevel": "LOW", "thinkingBudget": 5}.items():
        request, _ = read(generationConfig={"thinkingConfig": {name: value}})
        assert recorded(request, f"generationConfig.thinkingConfig.{name}") == (verdicts[name] == "ignored")
        assert bool(request.wire or request.template_args) == (verdicts[name] == "used")


def test_the_docs_cover_every_kind_of_tool() -> None:
    verdicts = documented("Kinds of `tools`")
    assert verdicts.keys() == fields_of(types.Tool)
    for name, verdict in verdicts.items():
        request, _ = read(tools=[{name: [{"name": "f"}]}])
        assert (len(request.tools), request.ignored) == ((1, ()) if verdict == "used" else (0, (f"tools[0]:{name}",)))

    verdicts = documented("Fields of a function declaration")
    assert verdicts.keys() == fields_of(types.FunctionDeclaration)
    for name, verdict in verdicts.items():
        given = {"name": "f", name: {"type": "object"} if name not in ("name", "description") else "f"}
        (found,) = read(tools=[{"functionDeclarations": [given]}])[0].tools
        assert (name in found.extra) == (verdict == "carried")
        assert found.parameters == (given[name] if name.startswith("parameters") else {})

    verdicts = documented("Fields of `toolConfig`")
    assert verdicts.keys() == fields_of(types.ToolConfig) | {"streamFunctionCallArguments"}
    assert fields_of(types.FunctionCallingConfig) == {"mode", "allowedFunctionNames", "streamFunctionCallArguments"}
    for name in verdicts.keys() - {"functionCallingConfig"}:
        inner = name == "streamFunctionCallArguments"
        request, _ = read(toolConfig={"functionCallingConfig": {name: True}} if inner else {name: True})
        where = "toolConfig.functionCallingConfig" if inner else "toolConfig"
        assert request.ignored == (f"{where}.{name}",)
        assert verdicts[name] == "ignored"


def test_the_docs_cover_every_part() -> None:
    verdicts = documented("Fields of a part")
    assert verdicts.keys() == fields_of(types.Part)
    examples: dict[str, Any] = {
        "text": "x",
        "inlineData": INLINE["inlineData"],
        "fileData": {"fileUri": "https://x/y"},
        "functionCall": {"name": "f"},
        "functionResponse": {"name": "f"},
    }
    for name, verdict in verdicts.items():
        if name in ("thought", "thoughtSignature"):
            assert verdict == "used"
            continue
        part = {name: examples.get(name, {"x": 1})}
        (found,) = messages(model(part) if name == "functionCall" else user(part))
        shows = bool(found.text or found.media or found.tool_calls or found.role == "tool")
        assert shows == (verdict == "used"), name
    with pytest.raises(BadRequest):
        read(contents=[user({"another": {"x": 1}})])

    assert documented("Fields of a function call").keys() == fields_of(types.FunctionCall)
    made = {"id": "c", "name": "f", "args": {"a": 1}}
    assert messages(model({"functionCall": {**made, "willContinue": True}})) == messages(model({"functionCall": made}))
    responses = documented("Fields of a function response")
    assert responses.keys() == fields_of(types.FunctionResponse)
    more = {name: True for name, verdict in responses.items() if verdict == "left out"}
    assert more.keys() == {"willContinue", "scheduling"}
    told = [user(text("x")), user(result("f", "c", "r", **more))]
    assert messages(*told)[1] == Message("tool", "r", tool_call_id="c", name="f")
