"""The reference trainer: asynchronous GRPO in plain torch over a rollout service.

`loop` submits, leases, learns and pushes; `learner` is the model with its optimiser; `run` adds the learning-rate schedule
and held-out measurements.
"""

from towline.trainers.grpo import loop
from towline.trainers.grpo.loop import Grpo, GrpoSettings, NothingToLearn, TooManyFailed, mean_reward, permuted, play

__all__ = ["Grpo", "GrpoSettings", "NothingToLearn", "Step", "TooManyFailed", "mean_reward", "permuted", "play"]

Step = loop.TrainingStep
"""The public name of a training step."""
