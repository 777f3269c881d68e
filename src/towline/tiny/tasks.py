"""The registry as tasks: what the demo trains on.

The harness is the example agent, an ordinary program in a sandbox; the evaluator is a function in the node's process, since
a registry question can be scored from the turns alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from towline.schema import Task, Trajectory
from towline.tiny.registry import Instance, Question, Split, draw, grade, held_out

REGISTRY = "/work/registry.json"


def task_of(instance: Instance, agent: Path, *, samples: int, task_id: str = "registry") -> Task:
    """One question of the registry, `samples` times."""
    return Task.model_validate(
        {
            "task_id": task_id,
            "instruction": instance.questions[0].text,
            "harness": "shell",
            "harness_options": {
                "command": ["python3", "-S", "-E", f"{{program}}/{agent.name}", "--registry", REGISTRY],
                "folder": str(agent.parent.resolve()),
            },
            "environment": {"files": [{"target": REGISTRY, "text": instance.to_json()}]},
            "evaluator": {
                "kind": "python",
                "function": "towline.tiny.tasks:reward",
                "arguments": {"instance": _as_json(instance)},
            },
            "num_samples": samples,
            "min_samples": 0,
            "timeouts": {"init": 60.0, "run": 120.0, "evaluate": 60.0},
            "settings": {"sampling": {"max_tokens": 48}, "limits": {"turns": 4}},
        }
    )


def training_task(number: int, agent: Path, *, samples: int, seed: int = 0) -> Task:
    """The n-th task of a training run."""
    return task_of(draw(Random(f"training {seed} {number}"), Split.TRAINING), agent, samples=samples)


def held_out_tasks(agent: Path, count: int = 64, seed: int = 0) -> list[Task]:
    """Questions about pairs of property and item that no training task asks for; one session each."""
    return [task_of(instance, agent, samples=1) for instance in held_out(count, seed)]


def reward(trajectory: Trajectory, instance: dict[str, Any]) -> dict[str, Any]:
    """1 if the right tool was called with the right item and the answer is what it returned, else 0.

    The two turns are also scored by themselves: the first for its call, the second for repeating what came back.
    """
    (found,) = grade(_from_json(instance), trajectory.turns)
    parts = {"tool": found.tool, "item": found.item, "answer": found.answer, "well_formed": found.well_formed}
    turns = sorted(trajectory.turns, key=lambda turn: turn.index)
    by_turn = zip(turns, (found.tool and found.item, found.answer), strict=False)
    return {
        "reward": float(found.success),
        "components": {name: float(value) for name, value in parts.items()},
        "per_turn": {turn.id: float(right) for turn, right in by_turn},
    }


def _as_json(instance: Instance) -> dict[str, Any]:
    (question,) = instance.questions
    asked = {"attribute": question.attribute, "item": question.item, "choices": list(question.choices)}
    return {"records": json.loads(instance.to_json())["records"], "question": asked}


def _from_json(data: dict[str, Any]) -> Instance:
    asked = data["question"]
    question = Question(asked["attribute"], asked["item"], (asked["choices"][0], asked["choices"][1]))
    return Instance(data["records"], (question,))
