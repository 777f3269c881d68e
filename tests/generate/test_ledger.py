"""The ledger: what it has is not run again, and it goes on with nothing that it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.ledger import Ledger, LedgerError, Sample, digest_of
from towline.schema import SessionState, Task

TASK = Task(task_id="t", instruction="x", harness="shell", num_samples=3)


def sample(number: int, state: SessionState = SessionState.DONE, **fields: object) -> Sample:
    error = "broke" if state is SessionState.FAILED else None
    made = {"task_id": "t", "digest": digest_of(TASK), "harness": "shell", "usable": True, "error": error, "at": 5.0}
    return Sample.model_validate({**made, "sample": number, "session_id": f"s{number}", "state": state, **fields})


def trajectory(folder: Path, number: int) -> None:
    (folder / "trajectories").mkdir(exist_ok=True)
    (folder / "trajectories" / f"s{number}.arrow").touch()


def test_what_is_done_is_not_run_again_and_what_failed_is(tmp_path: Path) -> None:
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
        with pytest.raises(LedgerError, match="another task under the id 't'"):
            ledger.missing([changed])
        # The same task with another harness is something else to run.
        assert len(ledger.missing([Task.model_validate(TASK.__dict__ | {"harness": "other"})])) == 3
    (tmp_path / "trajectories/s0.arrow").unlink()
    with Ledger(tmp_path, {"model": "m"}) as ledger:
        assert [number for _, number in ledger.missing([TASK])] == [0, 2]
    with pytest.raises(LedgerError, match="model was 'm' and is 'n'"):
        Ledger(tmp_path, {"model": "n"})
    (tmp_path / "progress.jsonl").write_text('{"what": 1}\n')
    with pytest.raises(LedgerError, match="line 1"):
        Ledger(tmp_path, {"model": "m"})
