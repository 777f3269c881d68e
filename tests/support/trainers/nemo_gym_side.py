"""What NeMo Gym does with an agent server, by its own code. Runs in NeMo Gym's environment, which has no Towline.

    python nemo_gym_side.py AGENT.yaml ROWS.jsonl OUT.jsonl

Starts NeMo Gym's head server over the given configuration, collects rollouts as `gym eval run --no-serve` does, and writes
them to OUT.jsonl, with NeMo Gym's own metrics beside it.
"""

import asyncio
import os
import socket
import sys
from pathlib import Path

import nemo_gym.global_config as global_config
from omegaconf import OmegaConf


def main(agent, rows, out):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = OmegaConf.merge(
        {"head_server": {"host": "127.0.0.1", "port": port}, "dry_run": False}, OmegaConf.load(agent)
    )
    os.environ[global_config.NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME] = OmegaConf.to_yaml(config)

    from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
    from nemo_gym.openai_utils import NeMoGymFunctionCallOutput, TokenIDLogProbMixin
    from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
    from nemo_gym.server_utils import HeadServer, ServerClient

    for line in Path(rows).read_text().splitlines():
        BaseRunRequest.model_validate_json(line)
    server, thread, _ = HeadServer.run_webserver()
    while not server.started:
        thread.join(0.05)
    client = ServerClient.load_from_global_config()
    assert client.poll_for_status("towline_agent") == "success"
    collected = asyncio.run(
        RolloutCollectionHelper().run_from_config(
            RolloutCollectionConfig(
                agent_name="towline_agent",
                input_jsonl_fpath=rows,
                output_jsonl_fpath=out,
                num_repeats=2,
                num_samples_in_parallel=4,
                upload_rollouts_to_wandb=False,
            )
        )
    )
    for result in collected:
        if "_ng_failure_class" in result:
            continue
        response = BaseVerifyResponse.model_validate(result).response
        calls = [item for item in response.output if isinstance(item, TokenIDLogProbMixin)]
        results = [item for item in response.output if isinstance(item, NeMoGymFunctionCallOutput)]
        assert calls, response.output
        assert len(calls) + len(results) == len(response.output)
        contiguous(calls)
    server.should_exit = True
    thread.join()


def contiguous(calls):
    """What NeMo RL asserts when it makes a message log of a rollout."""
    seen = []
    for call in calls:
        assert call.prompt_token_ids[: len(seen)] == seen
        assert len(call.generation_token_ids) == len(call.generation_log_probs) > 0
        seen = call.prompt_token_ids + call.generation_token_ids


if __name__ == "__main__":
    main(*sys.argv[1:])
