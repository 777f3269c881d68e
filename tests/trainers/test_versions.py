"""Versions that adapters announce, batches that teach nothing, and rewards that differ by rounding alone."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.trainers.adapter_views import group_of, session
from towline.client import AsyncClient, Client
from towline.client.errors import NotAllowed
from towline.schema import Policy
from towline.trainers import areal, nemo_rl, prime_rl, skyrl, slime, tinker, verl
from towline.trainers.advantages import centred, group_advantages, reward_spread
from towline.trainers.packing import TrainingGroup, report_batch, split_rows
from towline.trainers.templates import TaskTemplate
from towline.trainers.versions import TrainerVersions


@dataclass
class FakeService:
    """The policy's routes of a service, at some version."""

    version: int = 0
    announced: list[int | None] = field(default_factory=list)
    refuses: bool = False

    def policy(self) -> Policy:
        return Policy(version=self.version, paused=False)

    def announce(self, version: int | None = None) -> Policy:
        if self.refuses:
            raise NotAllowed("the key is a consumer's", status=403)
        self.announced.append(version)
        assert version is None or version >= self.version
        self.version = self.version if version is None else version
        return self.policy()


def test_steps_are_versions_and_a_trainer_that_starts_over_continues_above() -> None:
    service: Any = FakeService()
    versions = TrainerVersions()
    assert [versions.announce(service, step) for step in (0, 1, 1, 2)] == [0, 1, 1, 2]
    assert service.announced == [0, 1, 2]  # once each
    resumed = TrainerVersions()
    assert resumed.announce(service, 1) == 3  # other weights than those of version 2
    assert [resumed.announce(service, step) for step in (2, 3)] == [4, 5]
    assert resumed.step_of(5) == 3
    service.refuses = True
    assert resumed.announce(service, 4) == 6


def serve(monkeypatch: pytest.MonkeyPatch, group: TrainingGroup, *modules: ModuleType) -> FakeService:
    """Adapters in these modules talk to a service that answers every task with the group."""
    service = FakeService(version=7)

    class FakeClient:
        async def __aenter__(self) -> FakeClient:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def policy(self) -> Policy:
            return service.policy()

        async def announce(self, version: int | None = None) -> Policy:
            return service.announce(version)

    async def run_group(client: Any, task: Any, **_: Any) -> TrainingGroup:
        return TrainingGroup(task, group.sessions, group.unusable)

    for module in modules:
        monkeypatch.setattr(module, "AsyncClient", lambda *_: FakeClient())
        monkeypatch.setattr("towline.trainers.packing.run_group", run_group)
    return service


TEMPLATE = TaskTemplate({"harness": "pi", "instruction": "go"})


async def test_areal_announces_the_version_of_its_engine_and_gets_rows_in_its_numbering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = group_of(session("a", 1.0), session("b", 0.0))
    service = serve(monkeypatch, group, areal)
    episodes = areal.GroupEpisodes(TEMPLATE, samples=2)
    batch = await episodes.arun_episode(SimpleNamespace(get_version=lambda: 3), {})
    assert service.announced == [8]  # above the 7 that the service knew
    assert batch is not None
    own = group.sessions[0].traces[0].policy_versions
    trained = own[own >= 0]
    assert batch["versions"][0][: len(own)][own >= 0].tolist() == (trained - 5).tolist()


async def test_an_unusable_session_keeps_areals_groups_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(session("a", 1.0), session("b", None), session("c", 0.5))
    batch = areal.GroupEpisodes(TEMPLATE).batch(group)
    assert batch is not None
    assert batch["rewards"].tolist() == [1.0, 0.5, 0.75]
    assert batch["loss_mask"].sum(1).bool().tolist() == [True, True, False]


async def test_skyrl_announces_the_step_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(session("a", 1.0), session("b", 0.0))
    service = serve(monkeypatch, group, skyrl)
    ids = [SimpleNamespace(instance_id="x"), SimpleNamespace(instance_id="x")]
    batch = {"prompts": ["p", "p"], "trajectory_ids": ids, "batch_metadata": SimpleNamespace(global_step=9)}
    await skyrl.TowlineGenerator(TEMPLATE).generate(batch)
    assert service.announced == [9]


async def test_slime_takes_over_the_label_of_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(session("a", 1.0), session("b", 0.0))
    service = serve(monkeypatch, group, slime)
    status = SimpleNamespace(TRUNCATED="t", COMPLETED="c")

    class Sample:
        Status = status

        def __init__(self, index: int):
            self.index, self.group_index, self.prompt, self.label, self.metadata = index, 0, "p", None, {}

    args = SimpleNamespace(
        towline_template=TEMPLATE, rollout_batch_size=1, rollout_temperature=1.0, rollout_top_p=1.0,
        rollout_max_response_len=64,
    )  # fmt: skip
    monkeypatch.setattr(slime, "_setting", lambda given, name: getattr(given, name))
    source = SimpleNamespace(get_samples=lambda count: [[Sample(0), Sample(1)] for _ in range(count)])
    batch = await slime._collect(args, source)
    assert service.announced == [None]
    assert (batch.sessions, batch.traces) == (2, 2)


async def test_prime_rls_watcher_tells_an_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    service = serve(monkeypatch, group_of(session("x", 1.0)), prime_rl)
    observer = prime_rl.VersionObserver()
    await observer.on_version_pending(8)
    await observer.on_new_version(8)
    assert service.announced == [8]


async def verl_loops(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[Any], **lengths: int
) -> tuple[list[Any], FakeService]:
    """What verl's newer trainer gets of the loops of one prompt."""
    service = serve(monkeypatch, group_of(session("x", 1.0)), verl)
    waiting = iter(outcomes)
    tasks: list[Any] = []

    async def run_group(client: Any, task: Any, **_: Any) -> TrainingGroup:
        tasks.append(task)
        await asyncio.sleep(0)
        return TrainingGroup.of(task, [next(waiting)])

    monkeypatch.setattr("towline.trainers.packing.run_group", run_group)
    monkeypatch.setattr(verl, "agent_loop_output", lambda row, versions: row)
    monkeypatch.setattr(verl.TowlineAgentLoop, "versions", TrainerVersions())
    rollout = SimpleNamespace(prompt_length=lengths.get("prompt", 999), response_length=lengths.get("response", 999))
    config = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))

    class Servers:
        async def generate(self, **_: Any) -> Any:
            return SimpleNamespace(extra_fields={"global_steps": 11})

    monkeypatch.setattr(verl.TaskTemplate, "read", lambda given: TEMPLATE)
    loops = [verl.TowlineAgentLoop(template="t", trainer_config=config, server_manager=Servers()) for _ in outcomes]
    sampled = {"temperature": 0 if lengths.get("validate") else 1.0, "top_p": 1.0, "top_k": -1}
    answers = await asyncio.gather(
        *(loop.run(sampled, uid="u", session_id=n, raw_prompt="p") for n, loop in enumerate(loops)),
        return_exceptions=True,
    )
    assert {task.settings["sampling"]["temperature"] for task in tasks} == {sampled["temperature"]}
    assert not verl.TowlineAgentLoop._siblings
    return answers, service


async def test_a_failed_session_leaves_verls_group(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [session("a", 1.0), session("b", None), session("c", 0.5)]
    (first, failed, last), service = await verl_loops(monkeypatch, outcomes)
    assert failed == []
    assert [one[0].session_id for one in (first, last)] == ["a", "c"]
    assert service.announced == [11]  # once per step, of verl's own servers


async def test_verls_group_of_one_fails_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, _ = await verl_loops(monkeypatch, [session("a", 1.0), session("b", None)])
    assert all(isinstance(one, verl.SessionFailed) and "1 of 2 sessions" in str(one) for one in answers)


async def test_a_row_that_is_too_long_for_verl_leaves_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [split_rows(session(name, 1.0))[0] for name in "abc"]
    sizes = [len(row.response_ids) for row in rows]
    answers, _ = await verl_loops(monkeypatch, [row.trajectory for row in rows], response=max(sizes) - 1)
    assert all(isinstance(one, verl.SessionFailed) for one in answers)  # all have the same length
    assert "rollout.response_length" in str(answers[0])


async def test_verls_older_trainer_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, group_of(session("x", 1.0)), verl)

    async def run_group(client: Any, task: Any, **_: Any) -> TrainingGroup:
        return TrainingGroup.of(task, [session("a", None)])

    monkeypatch.setattr("towline.trainers.packing.run_group", run_group)
    monkeypatch.setattr(verl.TaskTemplate, "read", lambda given: TEMPLATE)
    with pytest.raises(verl.SessionFailed, match="use_v1"):
        await verl.TowlineAgentLoop(template="t").run({"temperature": 1.0}, raw_prompt="p")


def test_batches_that_teach_nothing_are_reported_by_name(caplog: pytest.LogCaptureFixture) -> None:
    equal = group_of(session("a", 0.5), session("b", 0.5)).sessions
    with caplog.at_level(logging.WARNING):
        nemo_rl.rollout_batch(equal)
        prime_rl.training_samples(equal, "env")
        areal.GroupEpisodes(TEMPLATE).batch(group_of(*equal))
    for adapter in ("NeMo RL", "prime-rl", "AReaL"):
        assert f"{adapter}: this batch teaches nothing: all advantages are 0" in caplog.text, adapter
    assert "g: 2 x 0.5" in caplog.text
    assert report_batch("x", []) == "none of its 0 rows has a trained token"
    different = [row for one in group_of(session("a", 0.5), session("b", 0.6)).sessions for row in split_rows(one)]
    assert report_batch("x", different) == ""


def test_rounding_is_no_advantage() -> None:
    assert centred([0.1 + 0.2, 0.3], "std").tolist() == [0.0, 0.0]
    assert reward_spread([1e6 + 0.1, 1e6]) == 0.0
    assert reward_spread([0.0, 1e-3]) > 0.0
    noisy = group_advantages({"g": [session("a", 0.1 + 0.2), session("b", 0.3)]})
    assert (noisy.sessions, noisy.equal) == ({}, 1)
    samples = [SimpleNamespace(group_index=0, rollout_id=n, reward=value) for n, value in enumerate((0.1 + 0.2, 0.3))]
    assert slime.session_rewards(SimpleNamespace(), samples)[1] == [0.0, 0.0]


def test_nemo_rl_gets_the_prompts_length_and_is_told_of_prompts_that_differ(caplog: pytest.LogCaptureFixture) -> None:
    sessions = group_of(session("a", 1.0), session("b", 0.0)).sessions
    with caplog.at_level(logging.WARNING):
        batch = nemo_rl.rollout_batch(sessions)
    rows = [split_rows(one)[0] for one in sessions]
    assert batch["length"].tolist() == [row.start for row in rows]
    for log, length in zip(batch["message_log"], batch["length"].tolist(), strict=True):
        assert len(log[0]["token_ids"]) == length  # NeMo RL takes the messages up to this length as the prompt
    if not np.array_equal(rows[0].prompt_ids, rows[1].prompt_ids):
        assert "have 2 different prompts" in caplog.text


def test_prime_rls_type_is_found_where_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    class TrainingSample:
        __struct_fields__ = ("token_ids", "mask")

        def __init__(self, **fields: Any):
            self.fields = fields

    for name in ("prime_rl", "prime_rl.transports", "prime_rl.transports.rollouts"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    types = ModuleType("prime_rl.transports.rollouts.types")
    types.TrainingSample = TrainingSample  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, types.__name__, types)
    (made,) = prime_rl.structs([{"token_ids": [1], "mask": [True], "advantages": [1.0]}])
    assert made.fields == {"token_ids": [1], "mask": [True]}


def test_clients_have_the_call() -> None:
    assert callable(Client.announce)
    assert callable(AsyncClient.announce)
    assert tinker.TEMPERATURE == 1.0
