"""A SkyRL experiment over Towline sessions."""

import sys

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from towline.trainers.skyrl import TowlineGenerator


class Experiment(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        step_wise = cfg.generator.step_wise_trajectories
        return TowlineGenerator("examples/skyrl/task.toml", step_wise=step_wise, extra_traces="main_only")


@ray.remote(num_cpus=1)
def run(cfg):
    Experiment(cfg).run()


if __name__ == "__main__":
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(run.remote(cfg))
