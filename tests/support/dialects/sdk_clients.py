"""The official Python SDKs, each told to hold the same conversation of an agent with tools.

A client has `ask(question, calls)`: one model call, with a user's question or the results of the calls before, and what
the SDK parsed of the answer. Results are sent in reverse order, and every question comes with a picture. `wrong` sends a
request that no provider takes, `missing` asks for what is not there.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
from google import genai
from google.genai import errors, types

SYSTEM = "You are a careful agent."
QUESTIONS = ("List the files, please.", "Once more, please.")
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SECONDS = 60
"""Of patience for one answer. The SDKs' own is ten minutes or for ever, which a test run would wait out with them."""
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@dataclass
class Turn:
    """What an SDK made of one answer."""

    text: str
    reasoning: str | None
    calls: list[dict[str, Any]] = field(default_factory=list)


Ask = Callable[[str | None, list[dict[str, Any]]], Turn]


@dataclass
class Client:
    """One SDK with one conversation."""

    ask: Ask
    wrong: Callable[[], Any]
    missing: Callable[[], Any]


def failure(act: Callable[[], Any]) -> dict[str, Any]:
    """What an SDK raises: its class, the status that it took from the answer, and what it says."""
    try:
        act()
    except (openai.APIError, anthropic.APIError, errors.APIError) as error:
        status = error.code if isinstance(error, errors.APIError) else getattr(error, "status_code", None)
        return {"name": type(error).__name__, "status": status, "message": str(error)}
    return {"name": "nothing", "status": 200, "message": ""}


def converse(ask: Ask) -> list[Turn]:
    turns: list[Turn] = []
    for question in QUESTIONS:
        turns.append(ask(question, []))
        while turns[-1].calls:
            turns.append(ask(None, turns[-1].calls))
    return turns


def output(call: dict[str, Any]) -> str:
    return f"output of {call['arguments']['command']}"


def chat(root: str, key: str, model: str, stream: bool) -> Client:
    client = openai.OpenAI(base_url=f"{root}/v1", api_key=key, timeout=SECONDS, max_retries=0)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    tool = {"name": "bash", "description": "Runs a command.", "parameters": PARAMETERS}
    tools: Any = [{"type": "function", "function": tool}]

    def ask(question: str | None, calls: list[dict[str, Any]]) -> Turn:
        if question is not None:
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
            messages.append({"role": "user", "content": [{"type": "text", "text": question}, image]})
        messages.extend(
            {"role": "tool", "tool_call_id": call["id"], "content": output(call)} for call in reversed(calls)
        )
        if stream:
            with client.chat.completions.stream(model=model, messages=messages, tools=tools) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        calls = [
            {"id": c.id, "name": c.function.name, "arguments": json.loads(c.function.arguments)}
            for c in message.tool_calls or []
        ]
        return Turn(message.content or "", getattr(message, "reasoning_content", None), calls)

    def wrong() -> Any:
        odd: Any = [{"role": "nobody", "content": "x"}]
        return client.chat.completions.create(model=model, messages=odd, stream=stream)

    return Client(ask, wrong, lambda: client.chat.completions.retrieve("nothing"))


def responses(root: str, key: str, model: str, stream: bool, *, by_id: bool = False) -> Client:
    """With `by_id` only what is new is sent, behind the id of the answer before."""
    client = openai.OpenAI(base_url=f"{root}/v1", api_key=key, timeout=SECONDS, max_retries=0)
    history: list[Any] = []
    tools: Any = [{"type": "function", "name": "bash", "description": "Runs a command.", "parameters": PARAMETERS}]
    last: dict[str, str] = {}

    def ask(question: str | None, calls: list[dict[str, Any]]) -> Turn:
        new: list[Any] = []
        if question is not None:
            image = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"}
            new.append({"role": "user", "content": [{"type": "input_text", "text": question}, image]})
        new.extend(
            {"type": "function_call_output", "call_id": call["id"], "output": output(call)} for call in reversed(calls)
        )
        history.extend(new)
        options: dict[str, Any] = {"model": model, "instructions": SYSTEM, "tools": tools}
        if by_id:
            options |= {"input": new, **last}
        else:
            options |= {"input": history, "store": False, "include": ["reasoning.encrypted_content"]}
        if stream:
            with client.responses.stream(**options) as events:
                for _ in events:
                    pass
                response = events.get_final_response()
        else:
            response = client.responses.create(**options)
        history.extend(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output)
        last["previous_response_id"] = response.id
        thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.summary]
        made = [
            {"id": item.call_id, "name": item.name, "arguments": json.loads(item.arguments)}
            for item in response.output
            if item.type == "function_call"
        ]
        return Turn(response.output_text, "".join(thoughts) or None, made)

    def wrong() -> Any:
        odd: Any = [{"role": "nobody", "content": "x"}]
        return client.responses.create(model=model, input=odd, stream=stream)

    return Client(ask, wrong, lambda: client.responses.retrieve("resp_0a"))


def messages(root: str, key: str, model: str, stream: bool) -> Client:
    client = anthropic.Anthropic(base_url=root, api_key=key, timeout=SECONDS, max_retries=0)
    history: list[Any] = []
    tools: Any = [{"name": "bash", "description": "Runs a command.", "input_schema": PARAMETERS}]

    def ask(question: str | None, calls: list[dict[str, Any]]) -> Turn:
        content: list[Any] = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": output(call)} for call in reversed(calls)
        ]
        if question is not None:
            content.append({"type": "text", "text": question})
            source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
            content.append({"type": "image", "source": source})
        history.append({"role": "user", "content": content})
        system: Any = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
        options: dict[str, Any] = {"model": model, "max_tokens": 1000, "system": system, "tools": tools}
        if stream:
            with client.messages.stream(messages=history, **options) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(messages=history, **options)
        history.append({"role": "assistant", "content": message.content})
        text = "".join(block.text for block in message.content if block.type == "text")
        thoughts = [block.thinking for block in message.content if block.type == "thinking"]
        made = [
            {"id": block.id, "name": block.name, "arguments": block.input}
            for block in message.content
            if block.type == "tool_use"
        ]
        return Turn(text, "".join(thoughts) or None, made)

    def wrong() -> Any:
        odd: Any = [{"role": "nobody", "content": "x"}]
        return client.messages.create(model=model, messages=odd, max_tokens=5, stream=stream)

    return Client(ask, wrong, lambda: client.messages.batches.retrieve("nothing"))


def google(root: str, key: str, model: str, stream: bool) -> Client:
    client = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=root, timeout=SECONDS * 1000))
    contents: list[Any] = []
    declaration = types.FunctionDeclaration(
        name="bash", description="Runs a command.", parameters_json_schema=PARAMETERS
    )
    config = types.GenerateContentConfig(
        system_instruction=SYSTEM,
        tools=[types.Tool(function_declarations=[declaration])],
        thinking_config=types.ThinkingConfig(include_thoughts=True),
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )

    def ask(question: str | None, calls: list[dict[str, Any]]) -> Turn:
        parts = []
        for call in reversed(calls):
            response = types.FunctionResponse(id=call["id"], name=call["name"], response={"output": output(call)})
            parts.append(types.Part(function_response=response))
        if question is not None:
            parts.append(types.Part(text=question))
            parts.append(types.Part.from_bytes(data=base64.b64decode(PIXEL), mime_type="image/png"))
        contents.append(types.Content(role="user", parts=parts))
        given: list[types.Part] = []
        if stream:
            for chunk in client.models.generate_content_stream(model=model, contents=contents, config=config):
                given += chunk.candidates[0].content.parts or []
        else:
            whole = client.models.generate_content(model=model, contents=contents, config=config)
            given += whole.candidates[0].content.parts or []
        contents.append(types.Content(role="model", parts=given))
        text = "".join(part.text for part in given if part.text and not part.thought)
        thoughts = "".join(part.text for part in given if part.text and part.thought)
        made = [
            {"id": part.function_call.id, "name": part.function_call.name, "arguments": part.function_call.args}
            for part in given
            if part.function_call
        ]
        return Turn(text, thoughts or None, made)

    def wrong() -> Any:
        odd: Any = [types.Content(role="nobody", parts=[types.Part(text="x")])]
        if stream:
            return list(client.models.generate_content_stream(model=model, contents=odd))
        return client.models.generate_content(model=model, contents=odd)

    return Client(ask, wrong, lambda: client.files.get(name="nothing"))
