"""Weights that change while turns are sampled: every token carries the version of the weights that it was sampled from.

The proof is to compute every logprob again: under the weights of the version on its label it is what was recorded, and
under those of the other versions it is not, so that a wrong label would show.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from towline.client import Client
from towline.demo import registry, tiny_model
from towline.demo.registry import EXAMPLE_AGENT, REGISTRY_PATH
from towline.engines.embedded import load_decoder, save_decoder
from towline.schema import Task, Trajectory
from towline.trainers.service import own_service

pytestmark = pytest.mark.timeout(900)
"""Several processes, each of which imports torch: minutes on a machine that is busy with other things."""

QUESTIONS = 8
SESSIONS = 4
LONGEST = 240
"""Tokens of a turn: long enough for an update to meet it half-way."""
BOUND = 1e-3


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model that hardly knows how to end a turn, and others that are near it and plainly not the same."""
    torch.set_num_threads(1)
    folders = [tiny_model.create(tmp_path_factory.mktemp("models") / "v0", steps=2)]
    for version in range(1, 4):
        decoder = load_decoder(folders[0])
        chance = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for values in decoder.parameters():
                values += 0.3 * values.std() * torch.randn(values.shape, generator=chance)
        folders.append(tmp_path_factory.mktemp("models") / f"v{version}")
        save_decoder(decoder, folders[-1])
    return folders


@pytest.fixture(scope="module")
def client(weights: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    options = ["--concurrency", str(SESSIONS)]
    with own_service(weights[0], tmp_path_factory.mktemp("service"), options) as url, Client(url) as client:
        yield client


def long_task(name: str) -> Task:
    """A conversation of long turns: whatever the model says is taken for an answer, and the next question follows."""
    instance = registry.draw_instance(Random(name), questions=QUESTIONS)
    return Task.model_validate(
        {
            "task_id": name,
            "instruction": instance.questions[0].text,
            "harness": "shell",
            "harness_options": {
                "command": ["python3", "-S", "-E", f"{{program}}/{EXAMPLE_AGENT.name}", "--registry", REGISTRY_PATH],
                "folder": str(EXAMPLE_AGENT.parent),
            },
            "environment": {"files": [{"target": REGISTRY_PATH, "text": instance.to_json()}]},
            "num_samples": SESSIONS,
            "settings": {"sampling": {"max_tokens": LONGEST}},
        }
    )


def sampling(client: Client, name: str) -> None:
    """Wait until sessions are in the middle of their conversations: two that have a turn behind them and more before them.

    Not until all are: on a quick machine the first may be at its end before the last has begun.
    """
    until = time.monotonic() + 120
    while time.monotonic() < until:
        (node,) = client.nodes()
        sampled = sum(one["sampled_tokens"] for one in node["sessions"])
        if sampled > 150 and sum(1 <= one["turns"] <= QUESTIONS - 2 for one in node["sessions"]) >= 2:
            return
        time.sleep(0.005)
    raise AssertionError(f"no two sessions were in the middle of their conversations: {client.task(name)}")


def ended(client: Client, name: str) -> list[Trajectory]:
    status = client.wait(name, 240)
    found = client.trajectories([session.session_id for session in status.sessions])
    assert len(found) == SESSIONS
    assert all(one.error is None and one.report.chains == 1 for one in found)
    return found


def recomputed(folder: Path, trajectory: Trajectory) -> np.ndarray:
    """The logprob of every token of the session's one row, under these weights."""
    (trace,) = trajectory.traces
    ids = torch.from_numpy(trace.token_ids.astype(np.int64))
    decoder = load_decoder(folder)
    with torch.no_grad():
        logprobs = torch.log_softmax(decoder(ids[None])[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], logprobs.numpy()])


def check_labels(trajectories: list[Trajectory], weights: list[Path], old: int, new: int) -> None:
    """Every sampled token is of the old version or the new one, and its logprob says the same as its label."""
    found = dict.fromkeys((old, new), 0)
    for trajectory in trajectories:
        (trace,) = trajectory.traces
        under = {version: recomputed(weights[version], trajectory) for version in (old, new)}
        assert set(trace.policy_versions[trace.turn_ids >= 0].tolist()) <= {old, new}
        for version, other in ((old, new), (new, old)):
            labelled = trace.policy_versions == version
            off = np.abs(under[version] - trace.logprobs)[labelled]
            assert off.max(initial=0.0) < BOUND
            wrong = np.abs(under[other] - trace.logprobs)[labelled]
            assert (wrong < BOUND).sum() <= 0.05 * len(wrong), "the weights are too much alike to tell a wrong label"
            found[version] += len(wrong)
        # Within a turn the version only grows.
        for turn in trajectory.turns:
            assert (np.diff(turn.versions) >= 0).all()
    assert min(found.values()) > 100, f"one of the versions sampled hardly anything: {found}"


def halved(trajectories: list[Trajectory]) -> int:
    """Turns that an update met half-way."""
    return sum(len(set(turn.versions.tolist())) > 1 for one in trajectories for turn in one.turns)


def test_drained_turns_have_one_version(client: Client, weights: list[Path]) -> None:
    old = client.policy().version
    client.submit(long_task("drained"))
    sampling(client, "drained")
    assert client.pause("drain").paused
    client.update_weights(weights[old + 1], old + 1)
    client.resume()
    found = ended(client, "drained")
    check_labels(found, weights, old, old + 1)
    assert halved(found) == 0


def test_aborted_turns_continue_under_the_next_version(client: Client, weights: list[Path]) -> None:
    old = client.policy().version
    client.submit(long_task("cut"))
    sampling(client, "cut")
    client.pause("abort")
    client.update_weights(weights[old + 1], old + 1)
    client.resume()
    found = ended(client, "cut")
    check_labels(found, weights, old, old + 1)
    assert halved(found) > 0
    assert all("resumed" in turn.flags for one in found for turn in one.turns if len(set(turn.versions.tolist())) > 1)


def test_a_push_without_a_pause_switches_between_two_steps(client: Client, weights: list[Path]) -> None:
    old = client.policy().version
    client.submit(long_task("pushed"))
    sampling(client, "pushed")
    client.update_weights(weights[old + 1], old + 1)
    found = ended(client, "pushed")
    check_labels(found, weights, old, old + 1)
    assert halved(found) > 0
