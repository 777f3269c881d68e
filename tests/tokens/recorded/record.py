"""Record what real agent programs send, as small JSON fixtures next to this file.

    python tests/tokens/recorded/record.py NAME…

Each program runs once, in an environment of its own outside the repository, against a scripted model behind a gateway on
loopback. A proxy in front of the gateway keeps every request body. The programs were installed with

    python3.12 -m venv /tmp/rec-NAME && /tmp/rec-NAME/bin/pip install PACKAGES
    npm install --prefix /tmp/rec-goose @aaif/goose-binary-linux-x64

System prompts and tool descriptions are cut to their first words, the same way in every request; paths and keys are
replaced. A fixture holds the requests in order of arrival, each with the reply that it got: `test_traffic.py` plays them
again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "gateway")]

import aiohttp  # noqa: E402
from aiohttp import web  # noqa: E402

from support.gateway.gateway_rig import running_gateway  # noqa: E402
from towline import assets  # noqa: E402
from towline.conversation import Request, ToolCall  # noqa: E402
from towline.engines.scripted import Say  # noqa: E402
from towline.tokens.loading import load_codec  # noqa: E402

PYTHON = "/tmp/rec-{}/bin/python"
GOOSE = "/tmp/rec-goose/node_modules/@aaif/goose-binary-linux-x64/bin/goose"
QUIET = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
KEPT = 60
"""Characters that are kept of a system prompt or a description."""


@dataclass
class Program:
    """One run of one program."""

    about: str
    command: list[str]
    instruction: str
    script: Callable[[Request], Say]
    env: dict[str, str] = field(default_factory=dict)


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall("", name, arguments)


def said(request: Request) -> int:
    """How many replies the request holds."""
    return sum(message.role == "assistant" for message in request.messages)


def system(request: Request) -> str:
    return "\n".join(message.text for message in request.messages if message.role == "system")


def handoff(request: Request) -> Say:
    """Triage hands the question on; the tutor uses a tool and answers."""
    if "Triage" in system(request):
        return Say("", None, [call("transfer_to_math_tutor")])
    return Say("", None, [call("add", a=17, b=25)]) if said(request) < 2 else Say("17 + 25 is 42.")


def agents_as_tools(request: Request) -> Say:
    """Two agents are asked at the same time; each answers; their caller sums up."""
    if "Translate" in system(request):
        return Say("Hola" if "Spanish" in system(request) else "Bonjour")
    if said(request):
        return Say("Spanish: Hola. French: Bonjour.")
    return Say(
        "",
        None,
        [
            call("to_spanish", input="Please translate the word hello for a greeting card in Spain"),
            call("to_french", input="Please translate the word hello for a greeting card in France"),
        ],
    )


def transfer(request: Request) -> Say:
    """The coordinator transfers to another agent, which looks something up and answers."""
    if "coordinate" in system(request):
        return Say("", None, [call("transfer_to_agent", agent_name="billing")])
    done = any("total" in message.text for message in request.messages if message.role == "tool")
    return Say("Your invoice is 30 euros.") if done else Say("", None, [call("invoice", number=7)])


def deep(request: Request) -> Say:
    """Two sub-agents at the same time; each makes a call of its own."""
    if "You research" in system(request):
        place = "Oslo" if "Oslo" in request.messages[-1].text or "Oslo" in str(request.messages[1].text) else "Bergen"
        return Say(f"It rains in {place}.") if said(request) else Say("", None, [call("weather", city=place)])
    if said(request):
        return Say("It rains in both cities.")
    tasks = ("Find out what the weather in Oslo is today.", "Find out what the weather in Bergen is today.")
    return Say("", None, [call("task", description=task, subagent_type="researcher") for task in tasks])


def code(request: Request) -> Say:
    """Two steps of code, without the end of the block, then the answer that is asked for when steps run out."""
    done = said(request)
    if "please provide an answer" in request.messages[-1].text:
        return Say("The sum is 5050.")
    return Say(f"Thought: step {done}.\n<code>\nprint(sum(range({50 * (done + 1) + 1})))\n")


def calling(request: Request) -> Say:
    """Two calls, then the answer that is asked for, without tools, when steps run out."""
    if not request.tools:
        return Say("Two files: a.txt and b.txt.")
    return Say("", None, [call("list_files", folder=f"part{said(request)}")])


def geese(request: Request) -> Say:
    """Calls of the shell with the same reasoning each time."""
    if not request.tools:
        return Say("List files")
    done = sum(message.role == "tool" for message in request.messages)
    if done >= 3:
        return Say("There are no files.", "I should look at the folder.")
    return Say("", "I should look at the folder.", [call("shell", command=f"ls part{done}")])


PROGRAMS = {
    "openai_agents_handoff": Program(
        "OpenAI Agents 0.24.0: a hand-off to another agent with other instructions and tools",
        [PYTHON.format("openai-agents"), str(HERE / "openai_agents_program.py"), "handoff"],
        "What is 17 plus 25?",
        handoff,
    ),
    "openai_agents_tools": Program(
        "OpenAI Agents 0.24.0: two agents as tools, called in parallel",
        [PYTHON.format("openai-agents"), str(HERE / "openai_agents_program.py"), "tools"],
        "Say hello in Spanish and in French.",
        agents_as_tools,
    ),
    "google_adk_transfer": Program(
        "Google ADK 2.13.0: a transfer to a sub-agent",
        [PYTHON.format("google-adk"), str(HERE / "google_adk_program.py")],
        "How much is invoice 7?",
        transfer,
    ),
    "deepagents": Program(
        "deepagents 0.7.32: two sub-agents by parallel calls of the task tool",
        [PYTHON.format("deepagents"), str(HERE / "deepagents_program.py")],
        "Does it rain in Oslo and in Bergen?",
        deep,
    ),
    "smolagents_code": Program(
        "smolagents 1.26.0: a code agent that closes the code block of each reply, and asks for an answer at the end",
        [PYTHON.format("smolagents"), str(HERE / "smolagents_program.py"), "code"],
        "What is the sum of the numbers from 1 to 100?",
        code,
    ),
    "smolagents_calls": Program(
        "smolagents 1.26.0: a tool-calling agent that asks for its last answer without tools",
        [PYTHON.format("smolagents"), str(HERE / "smolagents_program.py"), "calls"],
        "Which files are there?",
        calling,
    ),
    "goose": Program(
        "goose 1.52.0: tool-call turns with the same reasoning",
        [
            GOOSE,
            "run",
            "--no-session",
            "--no-profile",
            "--with-builtin",
            "developer",
            "-t",
            "Which files are in part0, part1 and part2?",
        ],
        "Which files are in part0, part1 and part2?",
        geese,
        {"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": "m", "GOOSE_MODE": "auto", "GOOSE_DISABLE_KEYRING": "1"},
    ),
}


async def record(name: str) -> dict[str, Any]:
    program = PROGRAMS[name]
    codec = load_codec(assets.folder() / "tokenizers" / "qwen3")
    with tempfile.TemporaryDirectory() as folder:
        async with running_gateway(codec, Path(folder) / "data", program.script) as rig:
            session = await rig.open(instruction=program.instruction)
            calls: list[dict[str, Any]] = []
            async with proxy(session.root, calls) as base:
                work = Path(folder) / "project"
                work.mkdir()
                env = {
                    **os.environ,
                    **QUIET,
                    "HOME": folder,
                    "XDG_CONFIG_HOME": folder,
                    "INSTRUCTION": program.instruction,
                }
                env |= {"BASE": base, "KEY": session.key, "OPENAI_API_KEY": session.key, "OPENAI_HOST": base}
                env |= {"OPENAI_BASE_URL": f"{base}/v1", "GOOGLE_GEMINI_BASE_URL": base, "GEMINI_API_KEY": session.key}
                process = await asyncio.create_subprocess_exec(
                    *program.command,
                    cwd=work,
                    env=env | program.env,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                )
                output, _ = await asyncio.wait_for(process.communicate(), 180)
                print(output.decode()[-1500:], file=sys.stderr)
            made = await rig.seal(session)
    calls = [item for item in calls if item["turn"]]
    assert len(calls) == len(made.turns), (len(calls), len(made.turns))
    for item, turn in zip(calls, made.turns, strict=True):
        del item["turn"]
        item["body"] = shortened(item["body"], str(work))
        item["reply"] = {
            "text": turn.reply.get("text", ""),
            "reasoning": turn.reply.get("reasoning"),
            "calls": [[c["name"], c["arguments"]] for c in turn.reply.get("tool_calls", [])],
        }
    for turn in made.turns:
        print(turn.index, turn.role, turn.reason, turn.parent, turn.origin, "|", turn.role_reason, file=sys.stderr)
    return {"about": program.about, "instruction": program.instruction, "calls": calls}


class proxy:
    """Forwards everything to the gateway and keeps what was sent."""

    def __init__(self, root: str, calls: list[dict[str, Any]]):
        self.root, self.calls = root, calls

    async def __aenter__(self) -> str:
        self.web = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()
        await self.web.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        item = None
        if request.method == "POST" and data:
            item = {"path": request.path_qs, "body": json.loads(data), "turn": False}
            self.calls.append(item)
        headers = {
            k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length", "accept-encoding")
        }
        url = self.root + request.path_qs
        async with self.web.request(request.method, url, data=data, headers=headers) as answer:
            if item is not None:
                item["turn"] = answer.status == 200
            response = web.StreamResponse(
                status=answer.status, headers={"content-type": answer.headers.get("content-type", "")}
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


def shortened(body: dict[str, Any], work: str) -> Any:
    """The body with long texts that the program itself wrote cut, the same way each time."""

    def cut(text: str) -> str:
        text = text.replace(work, "/project")
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return text if len(text) <= KEPT else f"{text[:KEPT]}… ({digest})"

    def walk(value: Any, own: bool) -> Any:
        if isinstance(value, dict):
            own = own or value.get("role") in ("system", "developer")
            named = {"description", "instructions", "systemInstruction", "system_instruction", "tools"}
            return {key: walk(item, own or key in named) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, own) for item in value]
        if isinstance(value, str):
            return cut(value) if own else value.replace(work, "/project")
        return value

    return walk(body, False)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or PROGRAMS:
        made = asyncio.run(record(chosen))
        made["calls"], lines = [], ",\n".join(json.dumps(item, ensure_ascii=False) for item in made["calls"])
        text = json.dumps(made, ensure_ascii=False).replace('"calls": []', f'"calls": [\n{lines}\n]')
        (HERE / f"{chosen}.json").write_text(text + "\n")
