"""The registry: the smallest task in which a model must call a tool, read its result and answer with it.

A session shows a few items. A question asks for one property of one of them and offers two values:

    user       colour of lamp: red or blue?
    assistant  <tool_call> colour(item="lamp") </tool_call>
    tool       blue
    assistant  blue

It is right only if the first call has the right tool and the right item, and the answer is the value that came back: a
value that was guessed does not count. Whoever picks at random among what is shown is right in `CHANCE` of the cases.

Pairs of a property and an item are split once and for all: a held-out pair is asked or called nowhere in warm-up or
training, although its property, its item and every two of its three symbols are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

VALUES: Mapping[str, tuple[str, ...]] = {
    "colour": ("red", "blue", "green", "gold"),
    "size": ("tiny", "small", "large", "huge"),
    "owner": ("ada", "ben", "cleo", "dan"),
    "shape": ("round", "square", "flat", "long"),
    "place": ("attic", "cellar", "garden", "hall"),
    "stuff": ("wood", "iron", "glass", "clay"),
}
"""The properties, each with a tool of its name, and the values that each can have."""
ITEMS = tuple(
    [
        "lamp",
        "book",
        "coin",
        "boat",
        "kite",
        "drum",
        "ring",
        "vase",
        "sofa",
        "flag",
        "rope",
        "bell",
        "mask",
        "fork",
        "gate",
        "doll",
    ]
)
SHOWN_ITEMS = SHOWN_TOOLS = 3
CHANCE = 1 / SHOWN_TOOLS / SHOWN_ITEMS / 2
"""Of the tool, of the item, and of the two values offered."""


def tool(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }


class Split(StrEnum):
    TRAINING = "training"
    HELD_OUT = "held_out"


def split_of(attribute: str, item: str) -> Split:
    """Which side a pair is on; a quarter is held out, evenly over all three symbols."""
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
    """One session's worth: the items with their properties, and the questions in order."""

    records: Mapping[str, Mapping[str, str]]
    """The value of every property by item."""
    questions: tuple[Question, ...]

    @property
    def tools(self) -> list[str]:
        return list(next(iter(self.records.values())))

    @property
    def system(self) -> str:
        """The system prompt."""
        return f"Registry of {', '.join(self.records)}."

    def lookup(self, tool: str, item: str) -> str:
        """What a tool returns."""
        return self.records.get(item, {}).get(tool, "unknown")

    def to_json(self) -> str:
        """What the example agent reads with `--registry`."""
        questions = [{"attribute": q.attribute, "item": q.item, "choices": q.choices} for q in self.questions]
        return json.dumps({"records": self.records, "questions": questions})


def draw(random: Random, split: Split = Split.TRAINING, questions: int = 1) -> Instance:
    """A random instance whose questions are all of one side of the split."""
    items = random.sample(ITEMS, SHOWN_ITEMS)
    names = random.sample(list(VALUES), SHOWN_TOOLS)
    pairs = [(name, item) for name in names for item in items if split_of(name, item) is split]
    if not pairs:
        return draw(random, split, questions)
    records = {item: {name: random.choice(VALUES[name]) for name in names} for item in items}
    asked = []
    for _ in range(questions):
        name, item = random.choice(pairs)
        truth = records[item][name]
        choices = [truth, random.choice([value for value in VALUES[name] if value != truth])]
        random.shuffle(choices)
        asked.append(Question(name, item, (choices[0], choices[1])))
    return Instance(records, tuple(asked))


def held_out(count: int = 64, seed: int = 0) -> list[Instance]:
    """The instances that success is measured on: one question each, of pairs never asked in training."""
    random = Random(f"held out {seed}")
    return [draw(random, Split.HELD_OUT) for _ in range(count)]
