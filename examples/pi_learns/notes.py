"""The task: a question about one of three notes in a folder.

    user       There are notes/lamp, notes/book and notes/ring. Does notes/book say "red" or "blue"?
    assistant  a call of Pi's `read` with {"path": "notes/book"}, or of its `bash` with {"command": "cat notes/book"}
    tool       blue
    assistant  blue

It is answered correctly only if the first reply is one call that shows the right note, and the next is the word that Pi then
read in its sandbox: a guessed word does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from towline.schema import Task, Trajectory

NAMES = (
    "lamp", "book", "coin", "boat", "kite", "drum", "ring", "vase",
    "sofa", "flag", "rope", "bell", "mask", "fork", "gate", "doll",
)  # fmt: skip
WORDS = (
    "red", "blue", "green", "gold", "round", "square", "flat", "long",
    "wood", "iron", "glass", "clay", "north", "south", "east", "west",
)  # fmt: skip
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Instance:
    """The notes with the word in each, the note in question, and the two words offered."""

    notes: Mapping[str, str]
    asked: str
    offered: tuple[str, str]

    @property
    def text(self) -> str:
        first, second, third = (path(name) for name in self.notes)
        one, other = self.offered
        return f'There are {first}, {second} and {third}. Does {path(self.asked)} say "{one}" or "{other}"?'


def path(name: str) -> str:
    """A note's path relative to Pi's working directory."""
    return f"notes/{name}"


def draw(random: Random) -> Instance:
    """A random instance. There are so many that a run hardly repeats any."""
    names = random.sample(NAMES, SHOWN)
    notes = {name: random.choice(WORDS) for name in names}
    asked = random.choice(names)
    offered = [notes[asked], random.choice([word for word in WORDS if word != notes[asked]])]
    random.shuffle(offered)
    return Instance(notes, asked, (offered[0], offered[1]))


def task_of(instance: Instance, *, samples: int, task_id: str = "notes") -> Task:
    """The task of one instance, with `samples` sessions of Pi."""
    files = [{"target": f"/work/{path(name)}", "text": word} for name, word in instance.notes.items()]
    return Task.model_validate(
        {
            "task_id": task_id,
            "instruction": instance.text,
            "harness": "pi",
            "harness_options": {"thinking": "off"},
            "environment": {"files": files},
            "evaluator": {
                "kind": "python",
                "function": f"{Path(__file__).resolve()}:reward",
                "arguments": {"notes": dict(instance.notes), "asked": instance.asked},
            },
            "num_samples": samples,
            "min_samples": 0,
            "timeouts": {"init": 120.0, "run": 240.0, "evaluate": 60.0},
            "settings": {"sampling": {"max_tokens": 64}, "limits": {"turns": 4}},
        }
    )


def training_task(number: int, *, samples: int, seed: int = 0) -> Task:
    """The n-th task of a training run."""
    return task_of(draw(Random(f"notes {seed} {number}")), samples=samples)


def reward(trajectory: Trajectory, notes: dict[str, str], asked: str) -> dict[str, Any]:
    """1 if the right note was read and the answer is its word, else 0.

    The two turns also get rewards of their own: the first for its call, the second for repeating what Pi read, if it read
    anything.
    """
    turns = sorted(trajectory.turns, key=lambda turn: turn.index)
    calls = turns[0].reply.get("tool_calls", []) if turns else []
    shown = _shown(calls[0]) if len(calls) == 1 else None
    right = shown == path(asked)
    per_turn = {turn.id: float(right) for turn in turns[:1]}
    read = _read(turns[1].messages) if len(turns) > 1 else ""
    looked = shown is not None and read in notes.values()
    repeated = False
    if looked:
        said = turns[1].reply
        repeated = not said.get("tool_calls") and str(said.get("text", "")).strip() == read
        per_turn[turns[1].id] = float(repeated)
    components = {"call": bool(calls), "looked": looked, "right_note": right, "repeated": repeated}
    return {
        "reward": float(right and repeated),
        "components": {name: float(value) for name, value in components.items()},
        "per_turn": per_turn,
    }


def _shown(call: Mapping[str, Any]) -> str | None:
    """The path whose content a call shows; `None` if it shows none."""
    match call:
        case {"name": "read", "arguments": {"path": str(shown)}}:
            return shown
        case {"name": "bash", "arguments": {"command": str(command)}} if command.startswith("cat "):
            return command.removeprefix("cat ")
    return None


def _read(messages: list[Any]) -> str:
    """The result of Pi's tool."""
    results = [message for message in messages if message["role"] == "tool"]
    return str(results[0].get("text", "")).strip() if len(results) == 1 else ""
