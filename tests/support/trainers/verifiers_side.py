"""What verifiers does with an environment, by its own code. Runs in verifiers' environment, with Towline's sources on its path.

    ROWS=rows.json TOWLINE_URL=… TOWLINE_TEMPLATE=task.json python verifiers_side.py OUT.json

Plays two episodes of each task of the rows, sends them over verifiers' own wire format, and writes what a trainer reads of
each branch.
"""

import asyncio
import json
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.episode import WireEpisode
from verifiers.v1.types import Sampling
from verifiers.v1.utils.loaders import environment_class


async def play():
    config = SingleAgentEnvConfig(id="towline-env", taskset={"id": "verifiers-rows"})
    assert isinstance(config, EnvConfig)
    kind = environment_class("verifiers-rows", "towline-env")
    assert issubclass(kind, vf.Env)
    env = kind(config)
    context = ModelContext(model="tiny", client=None, sampling=Sampling(temperature=1.0, max_tokens=24))
    seen = []
    async with env.serving():
        slots = [slot for task in env.taskset for slot in env.slots(task, 2)]
        episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
    for slot, episode in zip(slots, episodes, strict=True):
        assert slot.done
        again = WireEpisode.model_validate(episode.model_dump(mode="python"))
        seen.append({"ok": again.ok, "errors": [error.message for error in again.errors], "task": again.task.data.idx})
        for trace in again.traces:
            (branch,) = trace.branches
            seen[-1] |= {
                "session": trace.id,
                "reward": trace.reward,
                "turns": trace.num_turns,
                "token_ids": branch.token_ids,
                "mask": branch.sampled_mask,
                "logprobs": branch.logprobs,
                "transcript": trace.transcript,
            }
    return seen


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asyncio.run(play())))
