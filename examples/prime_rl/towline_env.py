"""An environment for verifiers, and so for prime-rl: `env.id = "towline-env"`, with any taskset that has such rows."""

import os

from towline.trainers.verifiers import towline_env

TowlineEnv = towline_env(os.environ.get("TOWLINE_TEMPLATE", "examples/prime_rl/task.toml"))
__all__ = ["TowlineEnv"]
