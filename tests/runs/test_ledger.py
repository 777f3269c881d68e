"""The ledger: recorded samples do not run again, and nothing unknown is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.runs.ledger import Ledger, LedgerError, SampleRecord, task_digest
from towline.schema import SessionState, Task

TASK = Task(task_id="t", instruction="x", harness="shell", num_samples=3)


def sample(number: int, state: SessionState = SessionState.DONE, **fields: object) -> SampleRecord:
    error = "broke" if state is SessionState.FAILED else None
    made = {"task_id": "t", "digest": task_digest(TASK), "harness": "shell", "usable": True, "error": error, "at": 5.0}
    return SampleRecord.model_validate({**made, "sample": number, "session_id": f"s{number}", "state": state, **fields})


def trajectory(folder: Path, number: int) -> None:
    (folder / "trajectories").mkdir(exist_ok=True)
    (folder / "trajectories" / f"s{number}.arrow").touch()


def test_done_samples_do_not_run_again_but_failed_ones_do(tmp_path: Path) -> None:
    with Ledger(tmp_path, {"model": "m"}) as ledger:
        assert [number for _, number in ledger.missing([TASK])] == [0, 1, 2]
        trajectory(tmp_path, 0)
        ledger.add(sample(0))
        ledger.add(sample(1, SessionState.FAILED, attempt=3))
        with pytest.raises(LedgerError, match="another process"):
            Ledger(tmp_path, {"model": "m"})
    with (tmp_path / "progress.jsonl").open("ab") as file:
        file.write(b'{"cut": ')
    with Ledger(tmp_path, {"model": "m"}) as ledger:
        assert [number for _, number in ledger.missing([TASK])] == [1, 2]
        assert [one.sample for one in ledger.of([TASK])] == [0, 1]
        assert ledger.attempts() == 4
        more = Task.model_validate(TASK.__dict__ | {"num_samples": 4, "priority": 2})
        assert [number for _, number in ledger.missing([more])] == [1, 2, 3]
        ledger.add(sample(1))
        trajectory(tmp_path, 1)
        changed = Task.model_validate(TASK.__dict__ | {"instruction": "y"})
        with pytest.raises(LedgerError, match="different task with the id 't'"):
            ledger.missing([changed])
        # The same task with another harness is something else to run.
        assert len(ledger.missing([Task.model_validate(TASK.__dict__ | {"harness": "other"})])) == 3
    (tmp_path / "trajectories/s0.arrow").unlink()
    with Ledger(tmp_path, {"model": "m"}) as ledger:
        assert [number for _, number in ledger.missing([TASK])] == [0, 2]
    with pytest.raises(LedgerError, match="model was 'm' and is 'n'"):
        Ledger(tmp_path, {"model": "n"})
    (tmp_path / "progress.jsonl").write_text('{"what": 1}\n')
    with Ledger(tmp_path, {"model": "m"}) as ledger:
        assert len(ledger.missing([TASK])) == 3


def test_samples_of_damaged_lines_run_again(tmp_path: Path) -> None:
    with Ledger(tmp_path, {"model": "m"}) as ledger:
        for number in range(3):
            trajectory(tmp_path, number)
            ledger.add(sample(number))
    lines = tmp_path / "progress.jsonl"
    damaged = lines.read_bytes().replace(b'"sample": 1', b'"sampl\xff": 1')
    lines.write_bytes(damaged)
    (tmp_path / "recipe.json").write_bytes(b"{")
    for _ in range(2):  # the second time there is nothing left to complain of
        with Ledger(tmp_path, {"model": "m"}) as ledger:
            assert [number for _, number in ledger.missing([TASK])] == [1]
    kept = {path.name: path.read_bytes() for path in (tmp_path / "quarantine").iterdir()}
    assert kept == {"progress.jsonl": damaged, "recipe.json": b"{"}
    with Ledger(tmp_path, {"model": "m"}) as ledger:
        ledger.discard(sample(0), "not an Arrow file")
    with Ledger(tmp_path, {"model": "m"}) as ledger:
        assert [number for _, number in ledger.missing([TASK])] == [0, 1]
    lines.unlink()
    lines.mkdir()
    with Ledger(tmp_path, {"model": "m"}) as ledger:
        assert len(ledger.missing([TASK])) == 3
