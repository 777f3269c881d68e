"""Submit, watch and cancel the Slurm job: `sbatch`, `squeue`, `scancel`."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

from towline.cluster.launch.inputs import LaunchInputs
from towline.cluster.launch.launcher import LaunchRecord, LaunchStatus
from towline.cluster.launch.programs import LaunchError, call_program
from towline.cluster.launch.slurm import render_job
from towline.common.files import write_atomically

_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
_ENDED |= {"REVOKED", "TIMEOUT"}
_STOP_SECONDS = 60.0
"""How long a job may take to end after its server has had its own time to stop."""
_KILL_SECONDS = 180.0
"""How long a cancelled job may take to end: Slurm's KillWait, and then some."""
_GONE = "ENDED"
"""Slurm has forgotten the job."""


@dataclass(frozen=True, slots=True)
class SlurmLauncher:
    """Towline as a Slurm job."""

    inputs: LaunchInputs

    def render(self) -> str:
        return render_job(self.inputs)

    def up(self) -> LaunchRecord:
        script, state = self.render(), self.inputs.state
        state.mkdir(parents=True, exist_ok=True)
        path = state / "job.sh"
        write_atomically(path, script.encode())
        # `12`, or `12;name` where several clusters are known.
        job_id = call_program(["sbatch", "--parsable", str(path)]).strip().partition(";")[0]
        if not job_id.isdecimal():
            raise LaunchError(f"sbatch printed {job_id!r} instead of a job id; look for the job with squeue")
        return LaunchRecord(kind="slurm", name=self.inputs.settings.cluster.name, job_id=job_id)

    def status(self, record: LaunchRecord) -> LaunchStatus:
        state, detail = _queue_state(record.job_id)
        folder = self.inputs.state
        active = state not in _ENDED and state != _GONE
        return LaunchStatus(
            kind="slurm",
            name=record.name,
            job_id=record.job_id,
            state=state,
            active=active,
            detail=detail,
            url=_served_url(folder / "endpoint.json") if active else "",
            key=str(folder / "admin.key") if (folder / "admin.key").is_file() else "",
            log=str(folder / f"job-{record.job_id}.log"),
        )

    def down(self, record: LaunchRecord) -> None:
        """Signal the batch script, which stops its server first and its steps last; then cancel what is left."""
        state = self.status(record).state
        if state == "RUNNING":
            # It may end by itself at this moment; then there is nothing to signal.
            with contextlib.suppress(LaunchError):
                call_program(["scancel", "--batch", "--signal=TERM", record.job_id])
            if self._ended(record, self.inputs.settings.server.stop_seconds + _STOP_SECONDS):
                return
        elif state in _ENDED | {_GONE}:
            return
        call_program(["scancel", record.job_id])
        if not self._ended(record, _KILL_SECONDS):
            raise LaunchError(f"job {record.job_id} has not ended {_KILL_SECONDS:g} seconds after scancel; see squeue")

    def _ended(self, record: LaunchRecord, seconds: float) -> bool:
        """Whether the job ends within so many seconds."""
        until = time.monotonic() + seconds
        while self.status(record).active:
            if time.monotonic() > until:
                return False
            time.sleep(0.5)
        return True


def _queue_state(job_id: str) -> tuple[str, str]:
    """State of a job and why, or where: of a job in parts, of the first part."""
    try:
        out = call_program(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T|%R"])
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return _GONE, ""
        raise
    lines = out.strip().splitlines()
    if not lines:
        return _GONE, ""
    state, _, detail = lines[0].partition("|")
    return state.strip(), detail.strip()


def _served_url(path: Path) -> str:
    """The URL in what the server printed; empty if it has not printed it yet."""
    try:
        first = path.read_text().partition("\n")[0]
        return str(json.loads(first)["url"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ""
