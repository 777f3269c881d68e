"""Long conversations that are cheap: several questions of the tiny model's registry in one session.

A session has two turns a question, and every request sends all of them again. So what a trainer has to go through depends
on the builder: with a row a session it grows with the conversation, with a row a turn with its square.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from towline.schema import Task, Trajectory, Turn
from towline.tiny.registry import Instance, Question, score
from towline.tiny.tasks import REGISTRY


def task_of(
    instance: Instance, agent: Path, *, samples: int, settings: Mapping[str, Any], options: Sequence[str] = ()
) -> Task:
    """One interview, `samples` times. `settings` are those of the sessions, `options` those of the agent."""
    return Task.model_validate(
        {
            "task_id": "interview",
            "instruction": instance.questions[0].text,
            "harness": "shell",
            "harness_options": {
                "command": ["python3", "-S", "-E", f"{{program}}/{agent.name}", "--registry", REGISTRY, *options],
                "folder": str(agent.parent.resolve()),
            },
            "environment": {"files": [{"target": REGISTRY, "text": instance.to_json()}]},
            "evaluator": {
                "kind": "python",
                "function": "towline.benchmarks.interviews:reward",
                "arguments": {"instance": _as_json(instance)},
            },
            "num_samples": samples,
            "timeouts": {"init": 120.0, "run": 300.0, "evaluate": 60.0},
            "settings": {
                "sampling": {"max_tokens": 48},
                "limits": {"turns": 3 * len(instance.questions)},
                **settings,
            },
        }
    )


def reward(trajectory: Trajectory, instance: dict[str, Any]) -> dict[str, Any]:
    """The share of the questions that were answered right; a turn's reward is whether it did its part of that."""
    known = _from_json(instance)
    per_turn: dict[str, float] = {}
    right = 0
    for question, turns in zip(known.questions, _by_question(trajectory.turns), strict=False):
        found = score(known, question, [turn.reply for turn in turns])
        right += found.success
        per_turn |= {turn.id: float(found.answer) for turn in turns}
        per_turn[turns[0].id] = float(found.tool and found.item)
    return {"reward": right / len(known.questions), "per_turn": per_turn}


def _by_question(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The turns of each question. A turn whose request ends with the user's words begins the next one, whether its
    prompt is what was new or, after a fork, all of the conversation."""
    found: list[list[Turn]] = []
    for turn in sorted(turns, key=lambda turn: turn.index):
        if turn.messages and turn.messages[-1]["role"] == "user":
            found.append([])
        if found:
            found[-1].append(turn)
    return found


def _as_json(instance: Instance) -> dict[str, Any]:
    asked = [{"attribute": q.attribute, "item": q.item, "choices": list(q.choices)} for q in instance.questions]
    return {"records": {item: dict(values) for item, values in instance.records.items()}, "questions": asked}


def _from_json(data: dict[str, Any]) -> Instance:
    asked = [Question(one["attribute"], one["item"], tuple(one["choices"])) for one in data["questions"]]
    return Instance(data["records"], tuple(asked))
