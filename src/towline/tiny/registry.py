"""The registry: the smallest task in which a model must call a tool, read its result and answer with it.

A session shows a few items and a few tools, one for each property. A question asks for one property of one item and
offers two values:

    system     Registry of lamp, book, ring. (with the tools colour, size and owner)
    user       colour of lamp: red or blue?
    assistant  a call of colour with {"item": "lamp"}
    tool       blue
    assistant  blue

It is right only if the first reply is one call of the right tool with the right item, and the next one is the value that
came back: a value that was guessed does not count.

Pairs of a property and an item are split once and for all: no question of warm-up or training asks for a held-out pair,
although every property and every item is asked for in other pairs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

from towline.schema import Turn

VALUES: Mapping[str, tuple[str, ...]] = {
    "colour": ("red", "blue", "green", "gold"),
    "size": ("tiny", "small", "large", "huge"),
    "owner": ("ada", "ben", "cleo", "dan"),
    "shape": ("round", "square", "flat", "long"),
    "place": ("attic", "cellar", "garden", "hall"),
    "stuff": ("wood", "iron", "glass", "clay"),
}
"""The properties, each with a tool of its name, and the values that each can have."""
ITEMS = (
    "lamp", "book", "coin", "boat", "kite", "drum", "ring", "vase",
    "sofa", "flag", "rope", "bell", "mask", "fork", "gate", "doll",
)  # fmt: skip
SHOWN_TOOLS = SHOWN_ITEMS = 3
CHANCE = 2 / (SHOWN_TOOLS + 1) * 2 / (SHOWN_ITEMS + 1) * 2 / 3
"""How often it is right to repeat, each time, one of the mentions at random.

The tool is mentioned among the tools and in the question, the item among the items and in the question, the value in
the question and in the result: what is right is there twice, everything else once.
"""
UNKNOWN = "unknown"
"""What a tool returns for an item that is not in the registry."""


def declaration(tool: str) -> dict[str, Any]:
    """A tool as an agent declares it."""
    schema = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    return {"type": "function", "function": {"name": tool, "parameters": schema}}


class Split(StrEnum):
    TRAINING = "training"
    HELD_OUT = "held_out"


def split_of(attribute: str, item: str) -> Split:
    """Which side a pair is on: a quarter is held out, spread evenly over properties and items."""
    place = list(VALUES).index(attribute) + ITEMS.index(item)
    return Split.TRAINING if place % 4 else Split.HELD_OUT


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and the two values that are offered."""

    attribute: str
    item: str
    choices: tuple[str, str]

    @property
    def text(self) -> str:
        return f"{self.attribute} of {self.item}: {self.choices[0]} or {self.choices[1]}?"


@dataclass(frozen=True, slots=True)
class Instance:
    """What one session is about: the items with their properties, and the questions in order."""

    records: Mapping[str, Mapping[str, str]]
    """For each item the value of every property."""
    questions: tuple[Question, ...]

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(next(iter(self.records.values())))

    @property
    def system(self) -> str:
        """The system prompt."""
        return f"Registry of {', '.join(self.records)}."

    def lookup(self, tool: str, item: object) -> str:
        """What a tool returns, whatever the model gave as the item."""
        return self.records.get(item, {}).get(tool, UNKNOWN) if isinstance(item, str) else UNKNOWN

    def to_json(self) -> str:
        """What the example agent reads with `--registry`."""
        asked = [{"text": q.text, "answer": self.lookup(q.attribute, q.item)} for q in self.questions]
        return json.dumps({"records": self.records, "questions": asked})


def draw(random: Random, split: Split = Split.TRAINING, questions: int = 1) -> Instance:
    """A random instance whose questions are all on one side of the split."""
    while True:
        items, tools = random.sample(ITEMS, SHOWN_ITEMS), random.sample(list(VALUES), SHOWN_TOOLS)
        pairs = [(tool, item) for tool in tools for item in items if split_of(tool, item) is split]
        if pairs:
            break
    records = {item: {tool: random.choice(VALUES[tool]) for tool in tools} for item in items}
    asked = []
    for _ in range(questions):
        attribute, item = random.choice(pairs)
        truth = records[item][attribute]
        choices = [truth, random.choice([value for value in VALUES[attribute] if value != truth])]
        random.shuffle(choices)
        asked.append(Question(attribute, item, (choices[0], choices[1])))
    return Instance(records, tuple(asked))


def held_out(count: int = 64, seed: int = 0) -> list[Instance]:
    """Instances to measure success on: one question each, of a pair that is never asked for in training."""
    random = Random(f"held out {seed}")
    return [draw(random, Split.HELD_OUT) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Score:
    """What was right about one question; `answer` is whether what the tool returned was repeated."""

    tool: bool = False
    item: bool = False
    answer: bool = False
    well_formed: bool = False
    """There was one call of an offered tool with an item, and then one known value."""

    @property
    def success(self) -> bool:
        return self.tool and self.item and self.answer


def score(instance: Instance, question: Question, replies: Sequence[Mapping[str, Any]]) -> Score:
    """Score what the model said to one question: its replies in neutral JSON (`text`, `tool_calls`), in order."""
    calls = replies[0].get("tool_calls", []) if replies else []
    if len(calls) != 1:
        return Score()
    name, arguments = calls[0]["name"], calls[0]["arguments"]
    if not isinstance(arguments, dict) or set(arguments) != {"item"}:
        return Score(tool=name == question.attribute)
    returned = instance.lookup(name, arguments["item"])
    said = replies[1] if len(replies) > 1 else {}
    text = "" if said.get("tool_calls") else str(said.get("text", "")).strip()
    known = name in instance.tools and isinstance(arguments["item"], str)
    return Score(
        tool=name == question.attribute,
        item=arguments["item"] == question.item,
        answer=text == returned != UNKNOWN,
        well_formed=known and any(text in values for values in VALUES.values()),
    )


def grade(instance: Instance, turns: Sequence[Turn]) -> list[Score]:
    """Score a whole session, from the turns of its one conversation: each user message is the next question."""
    replies: list[list[Mapping[str, Any]]] = []
    for turn in sorted(turns, key=lambda turn: turn.index):
        if any(message["role"] == "user" for message in turn.messages):
            replies.append([])
        if replies:
            replies[-1].append(turn.reply)
    missing = len(instance.questions) - len(replies)
    paired = zip(instance.questions, [*replies, *([[]] * missing)], strict=False)
    return [score(instance, question, said) for question, said in paired]
