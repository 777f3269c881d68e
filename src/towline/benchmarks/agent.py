"""A tool-using agent to measure with: what it is told, what it calls, what its tools print.

Tool results are real source text (Python's own library, as a coding agent prints files), of 300 to 1,500 tokens each. The
model's replies are fixed: reasoning and one call each, encoded beforehand in the model's own format. Everything is a
function of the seed, so two runs on one machine measure the same conversations.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from importlib import util
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from towline.arrays import Ids
from towline.conversation import Tool, ToolCall
from towline.errors import TowlineError
from towline.tokens.codec import Codec, Frame
from towline.tokens.tokenizer import Tokenizer

_NUMBER = 6
"""Width of a line's number."""
LEAST_RESULT, MOST_RESULT = 300, 1500
"""Tokens of a tool result."""
_MODULES = ("_pydecimal", "argparse", "inspect", "tarfile", "typing")
"""Their source is what the tools print: about 250,000 tokens."""
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
    made = []
    for name, description, parameters in _TOOLS:
        properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
        made.append(Tool(name, description, {"type": "object", "properties": properties, "required": [*parameters]}))
    return tuple(made)


class Printout:
    """Source text to cut tool results from, by the number of tokens."""

    def __init__(self, tokenizer: Tokenizer):
        lines: list[str] = []
        for name in _MODULES:
            spec = util.find_spec(name)
            path = Path(spec.origin) if spec is not None and spec.origin else None
            if path is not None and path.suffix == ".py" and path.is_file():
                text = path.read_text("utf-8").splitlines()
                lines += (f"{number:{_NUMBER}d}\t{line}\n" for number, line in enumerate(text, 1))
        if not lines:
            raise TowlineError("Python's library is here without its source, which the benchmarks use as tool results")
        self._lines = lines
        encoded = tokenizer.backend.encode_batch_fast(lines, add_special_tokens=False)
        self._ends = list(accumulate(len(encoding.ids) for encoding in encoded))

    def cut(self, tokens: int, random: random.Random, *, fresh: bool = False) -> str:
        """Consecutive lines of about `tokens` tokens, from a random place; if `fresh`, with numbers of their own."""
        start = random.randrange(len(self._lines))
        before = self._ends[start - 1] if start else 0
        if before + tokens > self._ends[-1]:
            start, before = 0, 0
        end = bisect_left(self._ends, before + tokens)
        lines = self._lines[start : end + 1]
        if fresh:
            lines = [f"{random.randrange(10**_NUMBER):0{_NUMBER}d}{line[_NUMBER:]}" for line in lines]
        return "".join(lines)


def replies(codec: Codec, count: int) -> list[Ids]:
    """What the model samples in the first `count` turns of a conversation, end of turn included."""
    frame = Frame(_tools())
    made = []
    for turn in range(count):
        first = 40 + 60 * turn
        reasoning = (
            f"The listing so far does not show where the order is lost. Step {turn:04d}: the members are sorted somewhere "
            f"between lines {first:05d} and {first + 60:05d}; I should look at the callers before I change anything."
        )
        command = f"sed -n '{first:05d},{first + 60:05d}p' src/archive/members.py && grep -rn 'sort_members' src | head"
        ids = codec.write("", reasoning, [ToolCall("", "bash", {"command": command})], frame)
        made.append(np.asarray(ids, np.int32))
    return made


class Conversation:
    """One agent's side of a conversation: the request it sends, and what it adds after each reply.

    History is kept as JSON, one piece a message, as a client that appends would: a request is a join.
    """

    def __init__(self, printout: Printout, seed: int, model: str = "bench"):
        self._printout = printout
        self._random = random.Random(seed)
        tools = orjson.dumps(tool_declarations())
        self._head = b'{"model":"' + model.encode() + b'","temperature":1.0,"tools":' + tools + b',"messages":['
        told = {"role": "user", "content": f"{_TASK} This is attempt {seed}."}
        self._items = [orjson.dumps({"role": "system", "content": _SYSTEM}), orjson.dumps(told)]

    def body(self) -> bytes:
        """The next request, with the whole history."""
        return self._head + b",".join(self._items) + b"]}"

    def size(self) -> int:
        """Tokens of an ordinary tool result."""
        return self._random.randint(LEAST_RESULT, MOST_RESULT)

    def hear(self, response: bytes, tokens: int, *, fresh: bool = False) -> None:
        """Take the model's reply and run its calls, each of which prints about `tokens` tokens."""
        self.take(response, [self._printout.cut(tokens, self._random, fresh=fresh)])

    def take(self, response: bytes, results: Sequence[str]) -> None:
        """Take the model's reply and answer its calls with `results`."""
        message = orjson.loads(response)["choices"][0]["message"]
        calls = message.get("tool_calls") or ()
        if len(calls) != len(results):
            raise TowlineError(f"the reply has {len(calls)} tool calls, {len(results)} were sampled")
        self._items.append(orjson.dumps({key: value for key, value in message.items() if value is not None}))
        for call, result in zip(calls, results, strict=True):
            self._items.append(orjson.dumps({"role": "tool", "tool_call_id": call["id"], "content": result}))
