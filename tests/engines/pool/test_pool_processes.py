"""Two SGLang servers as processes of their own behind a pool and a real gateway, and one of them killed under load.

The servers are the stand-in over the embedded engine, with real weights: that a token was sampled by the weights that it
is stamped with is checked by a forward pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from support.engines import sglang_stand_in
from support.gateway.gateway_rig import Rig, chat, eventually, message_of, running_gateway, user
from towline.demo import tiny_model
from towline.engines.embedded import Decoder, load_decoder
from towline.engines.pool import EnginePool
from towline.engines.sglang import SglangEngine
from towline.schema import Trajectory
from towline.tokens.loading import load_codec

SESSIONS, TURNS = 14, 3


class Server:
    """One server process, which can be killed and started again at the same address."""

    def __init__(self, folder: Path, log: Path, *options: str):
        self.folder, self.log, self.options = folder, log, options
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.start()

    def start(self) -> None:
        command = [sys.executable, sglang_stand_in.__file__, str(self.folder), str(self.port), *self.options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    async def listening(self) -> SglangEngine:
        engine = SglangEngine(f"http://127.0.0.1:{self.port}")
        for _ in range(600):
            if await engine.healthy():
                return engine
            assert self.process.poll() is None, self.log.read_text()
            await asyncio.sleep(0.1)
        raise TimeoutError(self.log.read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of weights of one tiny model, `0` and `1`."""
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        tiny_model.create(folder / str(seed), seed=seed, steps=1)
    return folder


@pytest.fixture
def servers(models: Path, tmp_path: Path) -> Iterator[list[Server]]:
    """One that streams and one that does not."""
    made = [Server(models / "0", tmp_path / "a.log", "incremental"), Server(models / "0", tmp_path / "b.log")]
    try:
        yield made
    finally:
        for server in made:
            with contextlib.suppress(ProcessLookupError):
                server.kill()


async def converse(rig: Rig, batch: str, number: int) -> Trajectory:
    """One session as a harness has it: a few turns, each behind all before it. No call may fail."""
    session = await rig.open(group=f"{batch}-{number // 4}")
    messages = [user(f"Begin {number}.")]
    for turn in range(TURNS):
        status, answer = await rig.post(session, chat(*messages, max_tokens=40, tools=[]))
        assert status == 200, answer
        messages += [message_of(answer), user(f"Go on {turn}.")]
    return await rig.seal(session)


def check(trajectory: Trajectory, decoders: dict[int, Decoder]) -> None:
    """Every token has the logprob that the weights of its version give it behind the tokens before it."""
    assert len(trajectory.turns) == TURNS
    for turn in trajectory.turns:
        prompt = trajectory.prompt(turn.id)
        row = torch.from_numpy(np.concatenate([prompt, turn.sampled]).astype(np.int64))
        for version in set(turn.versions.tolist()):
            with torch.inference_mode():
                logits = decoders[version](row[None, :-1])[0, len(prompt) - 1 :]
            logprobs = logits.log_softmax(-1).gather(1, row[len(prompt) :, None])[:, 0].numpy()
            ours = turn.versions == version
            np.testing.assert_allclose(turn.logprobs[ours], logprobs[ours], atol=1e-3)


async def test_a_replica_killed_under_load_costs_no_session_and_returns_with_the_current_weights(
    servers: list[Server], models: Path, tmp_path: Path
) -> None:
    codec = load_codec(models / "0")
    decoders = {version: load_decoder(models / str(version)) for version in (0, 1)}
    engines = [await server.listening() for server in servers]
    pool = EnginePool(dict(zip("ab", engines, strict=True)), interval=0.2, deadline=60)
    a, b = pool.replicas
    async with running_gateway(codec, tmp_path / "data", engine=pool) as rig:  # type: ignore[arg-type]
        work = [asyncio.create_task(converse(rig, "first", number)) for number in range(SESSIONS)]
        await eventually(lambda: a.counters.turns >= 3 and a.in_flight >= 3, "both are busy")
        servers[0].kill()
        await eventually(lambda: not a.serving, "it left")
        trajectories = await asyncio.gather(*work)
        moved = [turn for trajectory in trajectories for turn in trajectory.turns if "moved" in turn.flags]
        assert len(moved) == a.counters.moved >= 1
        assert any(len(turn.sampled) for turn in moved)

        await pool.update_weights(models / "1", 1)
        servers[0].start()
        await (await servers[0].listening()).close()
        await eventually(lambda: a.serving, "it is back")
        before = a.counters.turns
        work = [asyncio.create_task(converse(rig, "second", number)) for number in range(SESSIONS)]
        later = await asyncio.gather(*work)
        assert a.counters.turns > before
        assert b.counters.failures == 0
        assert {version for trajectory in later for turn in trajectory.turns for version in turn.versions} == {1}
        for trajectory in [*trajectories, *later]:
            check(trajectory, decoders)
