"""Towline registered as an agent of the real NeMo Gym: its head server, its client, its models, its collection of rollouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from support.trainers.adapter_service import BROKEN, MEAN, Service
from towline.demo.registry import draw_instance
from towline.schema import TaskState

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("NEMO_GYM_PYTHON", ROOT / ".venv-nemo-gym/bin/python"))


def rows(count: int, **fields: Any) -> list[dict[str, Any]]:
    made = []
    for number in range(count):
        instance = draw_instance(Random(number))
        question = [{"role": "user", "content": instance.questions[0].text}]
        made.append(
            {
                "responses_create_params": {"input": question, "temperature": 1.0, "max_output_tokens": 32},
                "registry": instance.to_json(),
                "instance": instance.to_arguments(),
                "verifier_field": {"number": number},
                **fields,
            }
        )
    return made


def agent(service: Service, *options: str) -> Iterator[str]:
    command = [sys.executable, "-m", "towline.trainers.nemo_gym", "--url", service.client.url, "--port", "0"]
    command += ["--template", "examples/nemo_gym/task.toml", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def strict(service: Service) -> Iterator[str]:
    yield from agent(service)


@pytest.fixture(scope="module")
def marking(service: Service) -> Iterator[str]:
    yield from agent(service, "--failures", "mark")


def collected(url: str, given: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What NeMo Gym's own collection wrote."""
    config = (ROOT / "examples/nemo_gym/towline_agent.yaml").read_text()
    (folder / "agent.yaml").write_text(config.replace("8700", url.rpartition(":")[2]))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    command = [str(PYTHON), str(ROOT / "tests/support/trainers/nemo_gym_side.py")]
    command += [str(folder / name) for name in ("agent.yaml", "rows.jsonl", "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=folder, env={**os.environ})
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_nemo_gym_collects_rollouts_and_their_tokens_are_towlines(
    service: Service, strict: str, tmp_path: Path
) -> None:
    given = rows(3, towline_task={"evaluator": {"kind": "python", "function": MEAN}})
    results = collected(strict, given, tmp_path)
    assert len(results) == 6
    found = service.client.trajectories([one["towline"]["session_id"] for one in results])
    assert len({one.session_id for one in found}) == 6
    by_id = {one.session_id: one for one in found}
    for result in results:
        row = given[result["verifier_field"]["number"]]
        assert {name: result[name] for name in row} == row
        session = by_id[result["towline"]["session_id"]]
        (trace,) = session.traces
        assert result["reward"] == pytest.approx(session.reward.score if session.reward else None)
        calls = [item for item in result["response"]["output"] if "generation_token_ids" in item]
        assert len(calls) == len(session.turns) <= 4
        assert calls[-1]["prompt_token_ids"] + calls[-1]["generation_token_ids"] == trace.token_ids.tolist()
        for call, turn in zip(calls, session.turns, strict=True):
            assert call["prompt_token_ids"] == session.prompt(turn.id).tolist()
            assert call["generation_token_ids"] == turn.sampled.tolist()
            assert call["generation_log_probs"] == pytest.approx(turn.logprobs.tolist())
            assert turn.temperature == 1.0
    (metrics,) = json.loads((tmp_path / "out_aggregate_metrics.json").read_text())
    mean = sum(result["reward"] for result in results) / 6
    assert metrics["key_metrics"]["mean/reward"] == pytest.approx(mean)
    assert [one["_ng_task_index"] for one in metrics["group_level_metrics"]] == [0, 1, 2]


def test_an_unscored_session_is_kept_apart_from_the_results(marking: str, tmp_path: Path) -> None:
    good, bad = (rows(1, towline_task={"evaluator": {"kind": "python", "function": one}}) for one in (MEAN, BROKEN))
    results = collected(marking, good + bad, tmp_path)
    assert [result["_ng_task_index"] for result in results] == [0, 0]
    failures = [json.loads(line) for line in (tmp_path / "out_failures.jsonl").read_text().splitlines()]
    assert [failure["_ng_failure_class"] for failure in failures] == ["infrastructure"] * 2
    assert all("the judge fell ill" in failure["towline"]["error"] for failure in failures)
    assert all(failure["instance_config"]["mask_sample"] for failure in failures)
    (metrics,) = json.loads((tmp_path / "out_aggregate_metrics.json").read_text())
    assert metrics["key_metrics"]["mean/reward"] == pytest.approx(sum(result["reward"] for result in results) / 2)


def test_a_session_whose_caller_disconnects_is_cancelled(service: Service, strict: str) -> None:
    known = {task.task_id for task in service.client.tasks()}
    (row,) = rows(1, towline_task={"harness": "shell", "harness_options": {"command": ["sleep", "300"]}})
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{strict}/run", json=row, timeout=3)
    (left,) = {task.task_id for task in service.client.tasks()} - known
    assert service.client.wait(left, 60).state is TaskState.CANCELLED


def test_failures_are_answered_with_their_reason(strict: str) -> None:
    with httpx.Client(base_url=strict, timeout=120) as http:
        (row,) = rows(1, towline_task={"evaluator": {"kind": "python", "function": BROKEN}, "max_attempts": 1})
        failed = http.post("/run", json=row)
        assert failed.status_code == 503
        assert "the judge fell ill" in failed.json()["error"]
        refused = http.post("/run", json={"input": "no parameters"})
        assert refused.status_code == 422
        assert refused.json()["field"] == "responses_create_params"
        del row["registry"]
        refused = http.post("/run", json=row)
        assert refused.status_code == 422
        assert refused.json() == {
            "error": "registry: the task template references this field, but the row does not have it",
            "field": "registry",
        }
