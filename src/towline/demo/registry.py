"""The registry: the smallest task in which a model must call a tool, read its result and answer with it.

A session shows a few items and a few tools, one per property. A question asks for one property of one item and offers two
values:

    system     Registry of lamp, book, ring. (with the tools colour, size and owner)
    user       colour of lamp: red or blue?
    assistant  a call of colour with {"item": "lamp"}
    tool       blue
    assistant  blue

It is answered correctly only if the first reply is one call of the right tool with the right item, and the next is the value
that the tool returned: a guessed value does not count.

The split of (property, item) pairs is fixed: no warm-up or training question asks for a held-out pair, although every
property and every item occurs in other pairs.

As a task, the harness is the example agent, an ordinary program in a sandbox; the evaluator is a function in the node's
process, since a question can be scored from the turns alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from towline.errors import ConfigError
from towline.schema import Task, Trajectory, Turn

VALUES: Mapping[str, tuple[str, ...]] = {
    "colour": ("red", "blue", "green", "gold"),
    "size": ("tiny", "small", "large", "huge"),
    "owner": ("ada", "ben", "cleo", "dan"),
    "shape": ("round", "square", "flat", "long"),
    "place": ("attic", "cellar", "garden", "hall"),
    "stuff": ("wood", "iron", "glass", "clay"),
}
"""The properties, each with a tool of the same name, and their possible values."""
ITEMS = (
    "lamp", "book", "coin", "boat", "kite", "drum", "ring", "vase",
    "sofa", "flag", "rope", "bell", "mask", "fork", "gate", "doll",
)  # fmt: skip
SHOWN_TOOLS = SHOWN_ITEMS = 3
CHANCE = 2 / (SHOWN_TOOLS + 1) * 2 / (SHOWN_ITEMS + 1) * 2 / 3
"""Success rate of repeating one of the mentioned words at random in each reply.

The right tool occurs among the tools and in the question, the right item among the items and in the question, the right
value in the question and in the result: what is right occurs twice, everything else once.
"""
UNKNOWN = "unknown"
"""The tools' result for an item that is not in the registry."""


def tool_declaration(tool: str) -> dict[str, Any]:
    """A tool as an agent declares it to the model."""
    schema = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    return {"type": "function", "function": {"name": tool, "parameters": schema}}


class PairSplit(StrEnum):
    """Which questions may ask for a (property, item) pair."""

    TRAINING = "training"
    """Warm-up and training questions."""
    HELD_OUT = "held_out"
    """Only questions that measure success."""


def split_of(attribute: str, item: str) -> PairSplit:
    """The split of a pair: a quarter is held out, spread evenly over properties and items."""
    diagonal = list(VALUES).index(attribute) + ITEMS.index(item)
    return PairSplit.TRAINING if diagonal % 4 else PairSplit.HELD_OUT


@dataclass(frozen=True, slots=True)
class RegistryQuestion:
    """One question and the two values it offers."""

    attribute: str
    item: str
    choices: tuple[str, str]

    @property
    def text(self) -> str:
        return f"{self.attribute} of {self.item}: {self.choices[0]} or {self.choices[1]}?"


@dataclass(frozen=True, slots=True)
class RegistryInstance:
    """The content of one session: the items with their properties, and the questions in order."""

    records: Mapping[str, Mapping[str, str]]
    """The value of every property, by item."""
    questions: tuple[RegistryQuestion, ...]

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(next(iter(self.records.values())))

    @property
    def system(self) -> str:
        """The system prompt."""
        return f"Registry of {', '.join(self.records)}."

    def lookup(self, tool: str, item: object) -> str:
        """A tool's result; the model may give anything as the item."""
        return self.records.get(item, {}).get(tool, UNKNOWN) if isinstance(item, str) else UNKNOWN

    def to_json(self) -> str:
        """The file that the example agent reads with `--registry`."""
        asked = [{"text": q.text, "answer": self.lookup(q.attribute, q.item)} for q in self.questions]
        return json.dumps({"records": self.records, "questions": asked})

    def to_arguments(self) -> dict[str, Any]:
        """The instance as JSON for a reward function's arguments."""
        asked = [{"attribute": q.attribute, "item": q.item, "choices": list(q.choices)} for q in self.questions]
        return {"records": {item: dict(values) for item, values in self.records.items()}, "questions": asked}

    @classmethod
    def from_arguments(cls, data: Mapping[str, Any]) -> RegistryInstance:
        """The inverse of `to_arguments`. Rows may hold one `question` instead of a list."""
        asked = data["questions"] if "questions" in data else [data["question"]]
        questions = [RegistryQuestion(q["attribute"], q["item"], (q["choices"][0], q["choices"][1])) for q in asked]
        return cls(data["records"], tuple(questions))


def draw_instance(random: Random, split: PairSplit = PairSplit.TRAINING, questions: int = 1) -> RegistryInstance:
    """A random instance whose questions are all from one split."""
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
        asked.append(RegistryQuestion(attribute, item, (choices[0], choices[1])))
    return RegistryInstance(records, tuple(asked))


def held_out_instances(count: int = 64, seed: int = 0) -> list[RegistryInstance]:
    """Instances for measuring success: one question each, about a held-out pair."""
    random = Random(f"held out {seed}")
    return [draw_instance(random, PairSplit.HELD_OUT) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class QuestionScore:
    """Which parts of one question were right."""

    tool: bool = False
    item: bool = False
    answer: bool = False
    """Whether the reply repeated what the tool returned."""
    well_formed: bool = False
    """Whether there was one call of an offered tool with an item, followed by one known value."""

    @property
    def success(self) -> bool:
        return self.tool and self.item and self.answer


def score_question(
    instance: RegistryInstance, question: RegistryQuestion, replies: Sequence[Mapping[str, Any]]
) -> QuestionScore:
    """Score the model's replies to one question: neutral JSON (`text`, `tool_calls`), in order."""
    calls = replies[0].get("tool_calls", []) if replies else []
    if len(calls) != 1:
        return QuestionScore()
    name, arguments = calls[0]["name"], calls[0]["arguments"]
    if not isinstance(arguments, dict) or set(arguments) != {"item"}:
        return QuestionScore(tool=name == question.attribute)
    returned = instance.lookup(name, arguments["item"])
    reply = replies[1] if len(replies) > 1 else {}
    text = "" if reply.get("tool_calls") else str(reply.get("text", "")).strip()
    known = name in instance.tools and isinstance(arguments["item"], str)
    return QuestionScore(
        tool=name == question.attribute,
        item=arguments["item"] == question.item,
        answer=text == returned != UNKNOWN,
        well_formed=known and any(text in values for values in VALUES.values()),
    )


def score_session(instance: RegistryInstance, turns: Sequence[Turn]) -> list[QuestionScore]:
    """Score a whole session from the turns of its one conversation: each user message is the next question."""
    replies: list[list[Mapping[str, Any]]] = []
    for turn in sorted(turns, key=lambda turn: turn.index):
        if any(message["role"] == "user" for message in turn.messages):
            replies.append([])
        if replies:
            replies[-1].append(turn.reply)
    missing = len(instance.questions) - len(replies)
    paired = zip(instance.questions, [*replies, *([[]] * missing)], strict=False)
    return [score_question(instance, question, of_question) for question, of_question in paired]


EXAMPLE_AGENT = Path(__file__).parents[3] / "examples" / "first_agent" / "agent.py"
"""The harness of registry tasks: an ordinary program in the source tree, outside the package."""
REGISTRY_PATH = "/work/registry.json"


def registry_task(instance: RegistryInstance, agent: Path, *, samples: int, task_id: str = "registry") -> Task:
    """The task of one instance, with `samples` sessions."""
    return Task.model_validate(
        {
            "task_id": task_id,
            "instruction": instance.questions[0].text,
            "harness": "shell",
            "harness_options": {
                "command": ["python3", "-S", "-E", f"{{program}}/{agent.name}", "--registry", REGISTRY_PATH],
                "folder": str(agent.parent.resolve()),
            },
            "environment": {"files": [{"target": REGISTRY_PATH, "text": instance.to_json()}]},
            "evaluator": {
                "kind": "python",
                "function": "towline.demo.registry:reward",
                "arguments": {"instance": instance.to_arguments()},
            },
            "num_samples": samples,
            "min_samples": 0,
            "timeouts": {"init": 60.0, "run": 120.0, "evaluate": 60.0},
            "settings": {"sampling": {"max_tokens": 48}, "limits": {"turns": 4}},
        }
    )


def training_task(number: int, agent: Path, *, samples: int, seed: int = 0) -> Task:
    """The n-th task of a training run."""
    return registry_task(draw_instance(Random(f"training {seed} {number}"), PairSplit.TRAINING), agent, samples=samples)


def held_out_tasks(agent: Path, count: int = 64, seed: int = 0) -> list[Task]:
    """Tasks about held-out pairs; one session each."""
    return [registry_task(instance, agent, samples=1) for instance in held_out_instances(count, seed)]


def reward(trajectory: Trajectory, instance: dict[str, Any]) -> dict[str, Any]:
    """1 if the right tool was called with the right item and the answer is its result, else 0.

    The two turns also get rewards of their own: the first for its call, the second for repeating the result.
    """
    (score,) = score_session(RegistryInstance.from_arguments(instance), trajectory.turns)
    parts = {"tool": score.tool, "item": score.item, "answer": score.answer, "well_formed": score.well_formed}
    turns = sorted(trajectory.turns, key=lambda turn: turn.index)
    by_turn = zip(turns, (score.tool and score.item, score.answer), strict=False)
    return {
        "reward": float(score.success),
        "components": {name: float(value) for name, value in parts.items()},
        "per_turn": {turn.id: float(right) for turn, right in by_turn},
    }


def check_agent() -> None:
    """Raise `ConfigError` if the example agent is missing, as in an installation without the source tree."""
    if not EXAMPLE_AGENT.is_file():
        raise ConfigError(f"{EXAMPLE_AGENT} does not exist: clone the repository and run `make demo` in it")
