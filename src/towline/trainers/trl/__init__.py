"""TRL: rollouts for `GRPOTrainer`, a worker for `AsyncGRPOTrainer`, and weight transfer for both.

`rollout.py` is for `GRPOTrainer(rollout_func=)`, `worker.py` for `AsyncGRPOTrainer(rollout_worker=)`, `weights.py` pushes
weights for both and is `AsyncGRPOTrainer(weight_transfer=)`. TRL is imported only when a row of its types is made.
"""

from towline.trainers.trl.rollout import TowlineRollouts, session_reward
from towline.trainers.trl.weights import TowlineWeights
from towline.trainers.trl.worker import TowlineWorker

__all__ = ["TowlineRollouts", "TowlineWeights", "TowlineWorker", "session_reward"]
