"""A trainer in forty lines: it can be killed and restarted at any moment, and uses every session exactly once."""

import json
import os
from pathlib import Path

from towline import Client

CHECKPOINT, LEASE = Path(os.environ.get("CHECKPOINT", "checkpoint.json")), float(os.environ.get("LEASE", "60"))
AGENT = {"command": "{python} {program}/agent.py", "folder": str(Path(__file__).resolve().parents[1] / "first_agent")}
TASK = {"instruction": "Answer.", "harness": "shell", "num_samples": 4, "evaluator": {"kind": "completed"}}
TASKS = [{**TASK, "harness_options": AGENT | {"command": AGENT["command"] + f" --seed {n}"}} for n in range(16)]


def learn(state: dict, batch: list) -> None:
    """Replace with the gradient step; what it changes (weights, optimizer) belongs in `state`."""
    state["step"] += 1
    state["trained_tokens"] += sum(int(row["loss_mask"].sum()) for result in batch for row in result.rows())


def save(state: dict) -> None:
    draft = CHECKPOINT.with_suffix(".draft")
    with draft.open("wb", buffering=0) as file:
        file.write(json.dumps(state).encode())
        os.fsync(file.fileno())
    draft.replace(CHECKPOINT)


state = json.loads(CHECKPOINT.read_text()) if CHECKPOINT.exists() else {"step": 0, "trained_tokens": 0, "used": []}
with Client() as client:
    mine = {one.task_id for one in client.submit(TASKS)}  # submitting the same tasks again is a no-op
    client.ack("trainer", state["used"])  # in the checkpoint, but perhaps not acknowledged before a kill
    while len(state["used"]) < 64:
        batch = {one.result_id: one for one in client.results("trainer", limit=8, idle=LEASE, lease=LEASE)}
        new = {name: one for name, one in batch.items() if one.task_id in mine and name not in state["used"]}
        learn(state, list(new.values()))
        state["used"] += new
        save(state)  # the checkpoint comes first: after the ack the service may forget the results
        client.ack("trainer", list(batch))
