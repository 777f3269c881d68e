"""Tasks for the adapters' tests: the registry's questions, scored so that sessions of one group differ.

A model after a few steps of warm-up gets nothing right, and equal rewards would teach nothing. So what is scored is which
tokens it samples: something that no two sessions have in common and that a policy can learn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from towline.client import Client
from towline.demo.registry import EXAMPLE_AGENT, REGISTRY_PATH, draw_instance, training_task
from towline.schema import Task, Trajectory

MEAN = f"{Path(__file__).resolve()}:mean_token"
BROKEN = f"{Path(__file__).resolve()}:broken"


@dataclass(frozen=True)
class Service:
    model: Path
    """The folder of the model that it serves."""
    client: Client


def group_task(number: int, task_id: str, *, samples: int, evaluator: str = MEAN) -> Task:
    """Two questions in one conversation, so that context stands between what is sampled, whatever is answered."""
    task = training_task(number, EXAMPLE_AGENT, samples=samples)
    instance = draw_instance(Random(number), questions=2)
    changes: dict[str, Any] = {
        "task_id": task_id,
        "environment": {"files": [{"target": REGISTRY_PATH, "text": instance.to_json()}]},
        "evaluator": {"kind": "python", "function": evaluator},
        "max_attempts": 1,
    }
    return Task.model_validate(task.__dict__ | changes)


def mean_token(trajectory: Trajectory) -> float:
    """The mean id of what was sampled."""
    return float(np.concatenate([turn.sampled for turn in trajectory.turns]).mean())


def broken(trajectory: Trajectory) -> float:
    raise RuntimeError("the judge fell ill")
