"""The workload of the gateway benchmarks: a tool-using agent, and an engine that answers at once.

Tool results are real source text (Python's standard library, as a coding agent prints files) of 300 to 1,500 tokens each.
The model's replies are fixed: reasoning and one call each, encoded in advance in the model's own format. Everything is a
function of the seed, so two runs on one machine measure the same conversations.

The engine returns fixed ids, so that the measured cost is the gateway's. It serialises the prompt's ids as JSON, as every
engine behind HTTP must, and reports that CPU time: it grows with the history whatever a gateway does.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Sequence
from importlib import util
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from towline.common.arrays import Ids
from towline.conversation import Finish, Tool, ToolCall
from towline.engines.base import CaptureLevel, EngineInfo, PauseMode, Sample, SampleRequest
from towline.errors import TowlineError
from towline.tokens.codec import ModelCodec, RenderContext
from towline.tokens.tokenizer import Tokenizer

_NUMBER = 6
"""Width of a line number."""
MIN_RESULT_TOKENS, MAX_RESULT_TOKENS = 300, 1500
"""Tokens of a tool result."""
_MODULES = ("_pydecimal", "argparse", "inspect", "tarfile", "typing")
"""The tools print their source: about 250,000 tokens."""
_SYSTEM = (
    "You are a software engineer who works in a repository through tools. Read before you write, make the smallest change "
    "that fixes the problem, run the tests, and say what you did. Paths are relative to the root of the repository."
)
_TASK = (
    "The test `tests/test_archive.py::test_roundtrip_keeps_order` fails since the last release. Find out why, fix it, and "
    "make sure that nothing else depended on the old behaviour."
)
_TOOLS = (
    ("bash", "Run a command in the repository's shell and return what it prints.", {"command": "The command."}),
    ("read_file", "Return some lines of a file.", {"path": "The file.", "first": "First line.", "last": "Last line."}),
    (
        "edit_file",
        "Replace text in a file.",
        {"path": "The file.", "old": "Text to replace.", "new": "Its replacement."},
    ),
)


def tool_declarations() -> list[dict[str, Any]]:
    """The agent's tools as a chat request declares them."""
    return [tool.as_function() for tool in _tools()]


def _tools() -> tuple[Tool, ...]:
    tools = []
    for name, description, parameters in _TOOLS:
        properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
        tools.append(Tool(name, description, {"type": "object", "properties": properties, "required": [*parameters]}))
    return tuple(tools)


class SourceText:
    """Source text from which tool results of a given number of tokens are taken."""

    def __init__(self, tokenizer: Tokenizer):
        lines: list[str] = []
        for name in _MODULES:
            spec = util.find_spec(name)
            path = Path(spec.origin) if spec is not None and spec.origin else None
            if path is not None and path.suffix == ".py" and path.is_file():
                text = path.read_text("utf-8").splitlines()
                lines += (f"{number:{_NUMBER}d}\t{line}\n" for number, line in enumerate(text, 1))
        if not lines:
            raise TowlineError("the source of Python's standard library, used as tool results, is not installed")
        self._lines = lines
        encoded = tokenizer.backend.encode_batch_fast(lines, add_special_tokens=False)
        self._ends = list(accumulate(len(encoding.ids) for encoding in encoded))

    def cut(self, tokens: int, random: random.Random, *, fresh: bool = False) -> str:
        """Consecutive lines of about `tokens` tokens from a random position; with `fresh`, with random line numbers."""
        start = random.randrange(len(self._lines))
        before = self._ends[start - 1] if start else 0
        if before + tokens > self._ends[-1]:
            start, before = 0, 0
        end = bisect_left(self._ends, before + tokens)
        lines = self._lines[start : end + 1]
        if fresh:
            lines = [f"{random.randrange(10**_NUMBER):0{_NUMBER}d}{line[_NUMBER:]}" for line in lines]
        return "".join(lines)


def scripted_replies(codec: ModelCodec, count: int) -> list[Ids]:
    """The model's replies in the first `count` turns of a conversation, end of turn included."""
    frame = RenderContext(_tools())
    replies = []
    for turn in range(count):
        first = 40 + 60 * turn
        reasoning = (
            f"The listing so far does not show where the order is lost. Step {turn:04d}: the members are sorted somewhere "
            f"between lines {first:05d} and {first + 60:05d}; I should look at the callers before I change anything."
        )
        command = f"sed -n '{first:05d},{first + 60:05d}p' src/archive/members.py && grep -rn 'sort_members' src | head"
        ids = codec.write("", reasoning, [ToolCall("", "bash", {"command": command})], frame)
        replies.append(np.asarray(ids, np.int32))
    return replies


class AgentConversation:
    """One agent's side of a conversation: the request it sends, and the messages it appends after each reply.

    The history is kept as one JSON string per message, so that building a request is a join.
    """

    def __init__(self, source: SourceText, seed: int, model: str = "bench"):
        self._source = source
        self._random = random.Random(seed)
        tools = orjson.dumps(tool_declarations())
        self._head = b'{"model":"' + model.encode() + b'","temperature":1.0,"tools":' + tools + b',"messages":['
        task = {"role": "user", "content": f"{_TASK} This is attempt {seed}."}
        self._items = [orjson.dumps({"role": "system", "content": _SYSTEM}), orjson.dumps(task)]

    def body(self) -> bytes:
        """The next request, with the whole history."""
        return self._head + b",".join(self._items) + b"]}"

    def result_tokens(self) -> int:
        """A random size of a tool result, in tokens."""
        return self._random.randint(MIN_RESULT_TOKENS, MAX_RESULT_TOKENS)

    def run_call(self, response: bytes, tokens: int, *, fresh: bool = False) -> None:
        """Append the model's reply and a result of about `tokens` tokens for its call."""
        self.append(response, [self._source.cut(tokens, self._random, fresh=fresh)])

    def append(self, response: bytes, results: Sequence[str]) -> None:
        """Append the model's reply and the results of its calls."""
        message = orjson.loads(response)["choices"][0]["message"]
        calls = message.get("tool_calls") or ()
        if len(calls) != len(results):
            raise TowlineError(f"the reply has {len(calls)} tool calls, but {len(results)} were sampled")
        self._items.append(orjson.dumps({key: value for key, value in message.items() if value is not None}))
        for call, result in zip(calls, results, strict=True):
            self._items.append(orjson.dumps({"role": "tool", "tool_call_id": call["id"], "content": result}))


_CONTEXT = 1 << 20


class InstantEngine:
    """Answers every request at once with the next of its fixed replies."""

    def __init__(self, replies: Sequence[Ids], vocabulary: int):
        self._samples = [
            (ids, np.linspace(-0.01, -2.0, len(ids), dtype=np.float32), np.zeros(len(ids), np.int32)) for ids in replies
        ]
        self._info = EngineInfo("instant", CaptureLevel.TOKENS, _CONTEXT, vocabulary)
        self.sent_ns = 0
        """CPU time spent on serialising ids so far."""
        self.sent_bytes = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def version(self) -> int:
        return 0

    async def start(self) -> None:
        return None

    async def sample(self, request: SampleRequest) -> Sample:
        began = time.thread_time_ns()
        self.sent_bytes += len(orjson.dumps(request.prompt, option=orjson.OPT_SERIALIZE_NUMPY))
        self.sent_ns += time.thread_time_ns() - began
        turn = int(request.id.rpartition("-")[2])
        ids, logprobs, versions = self._samples[turn % len(self._samples)]
        return Sample(ids, logprobs, versions, Finish.STOP, len(request.prompt))

    async def abort(self, ids: Sequence[str]) -> None:
        return None

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        return None

    async def resume(self, version: int | None = None) -> None:
        return None

    async def ready(self) -> None:
        return None

    async def update_weights(self, folder: Path, version: int) -> None:
        return None

    async def close(self) -> None:
        return None
