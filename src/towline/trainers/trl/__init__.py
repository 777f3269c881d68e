"""TRL: rollouts for `GRPOTrainer`, a worker for `AsyncGRPOTrainer`, and the way of their weights to the engine.

`rollout.py` is `GRPOTrainer(rollout_func=)`, `worker.py` is `AsyncGRPOTrainer(rollout_worker=)`, `weights.py` is what both
push with, and `AsyncGRPOTrainer(weight_transfer=)`. TRL itself is imported when a row of its own types is made.
"""

from towline.trainers.trl.rollout import TowlineRollouts, session_reward
from towline.trainers.trl.weights import TowlineWeights
from towline.trainers.trl.worker import TowlineWorker

__all__ = ["TowlineRollouts", "TowlineWeights", "TowlineWorker", "session_reward"]
