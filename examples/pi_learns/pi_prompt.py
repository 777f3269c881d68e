"""Pi's own system prompt and tools, recorded from Pi itself.

One session of the real program runs in a sandbox against a scripted model; none of Pi's text is copied into this example.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from notes import Instance, path, task_of

from towline.config import Settings
from towline.conversation import Message, Request, Tool, ToolCall
from towline.demo import tokenizer
from towline.engines.base import Engine
from towline.engines.scripted import Say, ScriptedEngine
from towline.errors import EngineError
from towline.gateway.gateway import Gateway
from towline.runs.run import local_node, run_tasks
from towline.schema import Trajectory
from towline.tokens.codec import ModelCodec, RenderContext
from towline.tokens.loading import load_codec

ANYTHING = Instance({"lamp": "red", "book": "blue", "ring": "gold"}, "book", ("red", "blue"))
TOUCHED = path("lamp")
"""The note that is edited and overwritten during the recording."""


@dataclass(frozen=True, slots=True)
class Prompt:
    system: Message
    frame: RenderContext
    """Pi's tools, as it declares them."""
    edited: str
    not_edited: str
    written: str
    """Results of Pi's tools on `TOUCHED`: an edit, an edit whose text is missing, and a written file."""


def record_prompt() -> Prompt:
    """Record Pi's prompt and the results of its tools. Installs Pi if needed."""
    edit = ToolCall("", "edit", {"path": TOUCHED, "edits": [{"oldText": "red", "newText": "blue"}]})
    write = ToolCall("", "write", {"path": TOUCHED, "content": "red"})
    trajectory = asyncio.run(play(ANYTHING, [edit, edit, write]))
    first, *others = sorted(trajectory.turns, key=lambda turn: turn.index)
    system = next(message["text"] for message in first.messages if message["role"] == "system")
    declared = [entry["function"] for entry in trajectory.tools[first.tools_key]]
    tools = tuple(Tool(one["name"], one["description"], one["parameters"]) for one in declared)
    returned = [message["text"] for turn in others for message in turn.messages if message["role"] == "tool"]
    return Prompt(Message("system", system), RenderContext(tools), *returned)


async def play(instance: Instance, calls: Sequence[ToolCall], answer: str = "red") -> Trajectory:
    """One session of Pi in which a scripted model makes these calls, one per turn, and then answers."""

    def script(request: Request) -> Say:
        taken = sum(message.role == "assistant" for message in request.messages)
        return Say("", None, [calls[taken]]) if taken < len(calls) else Say(answer)

    with tempfile.TemporaryDirectory(prefix="towline-pi-") as folder:
        tokenizer.write(Path(folder))
        codec = load_codec(Path(folder), renderer="sentinel")
        return await session(ScriptedEngine(codec, script), codec, instance)


async def session(engine: Engine, codec: ModelCodec, instance: Instance) -> Trajectory:
    """One session of Pi on this machine, in a sandbox."""
    with tempfile.TemporaryDirectory(prefix="towline-pi-") as folder:
        out = Path(folder)
        settings = Settings.load(gateway={"port": 0, "control_port": 0, "data": out / "gateway"})
        gateway = Gateway(engine, codec, settings.gateway, model="tiny")
        async with local_node(gateway, settings, out) as node:
            results = await run_tasks(node, [task_of(instance, samples=1)], out)
    (one,) = results.finished
    if one.trajectory.error is not None:
        raise EngineError(f"Pi's session failed: {one.trajectory.error}")
    return one.trajectory
