"""Towline as an environment of the real verifiers, which is what prime-rl plays: its loader, its episodes, its wire, its branches."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from random import Random

import pytest

from support.trainers.adapter_service import BROKEN, MEAN, Service
from towline.demo.registry import draw_instance

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("VERIFIERS_PYTHON", ROOT / ".venv-verifiers/bin/python"))


def test_episodes_are_sessions_and_branches_are_their_rows(service: Service, tmp_path: Path) -> None:
    instances = [draw_instance(Random(number)) for number in range(2)]
    rows = [{"prompt": one.questions[0].text, "registry": one.to_json()} for one in instances]
    failing = {"evaluator": {"kind": "python", "function": BROKEN}, "max_attempts": 1}
    (tmp_path / "rows.json").write_text(json.dumps([*rows, {**rows[0], "towline_task": failing}]))
    agent = ROOT / "examples/first_agent"
    template = {
        "harness": "shell",
        "harness_options": {
            "command": ["python3", "-S", "-E", "{program}/agent.py", "--registry", "/work/registry.json"],
            "folder": str(agent),
        },
        "environment": {"files": [{"target": "/work/registry.json", "text": "{row.registry}"}]},
        "evaluator": {"kind": "python", "function": MEAN},
        "settings": {"limits": {"turns": 4}},
    }
    (tmp_path / "task.json").write_text(json.dumps(template))
    variables = {
        "ROWS": str(tmp_path / "rows.json"),
        "TOWLINE_URL": service.client.url,
        "TOWLINE_TEMPLATE": str(tmp_path / "task.json"),
        "PYTHONPATH": os.pathsep.join(
            str(ROOT / name) for name in ("src", "examples/prime_rl", "tests/support/trainers")
        ),
    }
    command = [str(PYTHON), str(ROOT / "tests/support/trainers/verifiers_side.py"), str(tmp_path / "out.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, cwd=tmp_path, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *good, bad, worse = json.loads((tmp_path / "out.json").read_text())
    assert [one["task"] for one in good] == [0, 0, 1, 1]
    found = {one.session_id: one for one in service.client.trajectories([one["session"] for one in good])}
    assert len(found) == 4
    for one in good:
        session = found[one["session"]]
        (trace,) = session.traces
        assert one["ok"]
        assert one["reward"] == pytest.approx(session.reward.score if session.reward else None)
        assert one["turns"] == len(session.turns)
        assert one["token_ids"] == trace.token_ids.tolist()
        assert one["mask"] == trace.loss_mask.astype(bool).tolist()
        assert one["logprobs"] == pytest.approx(trace.logprobs.tolist())
        assert session.turns[0].messages[-1]["text"] in one["transcript"]
        assert {turn.temperature for turn in session.turns} == {1.0}
    for one in (bad, worse):
        assert not one["ok"]
        assert "session" not in one
        assert "the judge fell ill" in one["errors"][0]
