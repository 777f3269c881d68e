"""`towline cluster` with programs that stand in for Slurm's and for kubectl: what they are asked, and what users are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.cluster.stand_ins import StandIns
from towline.cli import app
from towline.cluster.launch import programs
from towline.errors import TowlineError

SLURM = '[cluster]\nkind = "slurm"\n'
KUBERNETES = '[cluster]\nkind = "kubernetes"\nsecrets = ["MY_TOKEN"]\n[cluster.kubernetes]\nimage = "towline:1"\nnamespace = "lab"\n'
QUEUE = """
state = Path(sys.argv[0]).parents[1] / "state"
if not state.exists():
    sys.exit("slurm_load_jobs error: Invalid job id specified")
print(state.read_text())
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    monkeypatch.chdir(tmp_path)
    made = StandIns(tmp_path / "programs")
    (tmp_path / "programs").mkdir()
    monkeypatch.setenv("PATH", made.path)
    monkeypatch.setenv("TOWLINE_CONFIG", "towline.toml")
    return made


def towline(*words: str) -> Any:
    """What a command prints with `--json`; errors that users see are raised."""
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_life_of_a_slurm_job(stand_ins: StandIns, tmp_path: Path) -> None:
    Path("towline.toml").write_text(SLURM)
    state = tmp_path / "programs/state"
    stand_ins.add("sbatch", "print('42;other')")
    stand_ins.add("squeue", QUEUE)
    stand_ins.add("scancel", "(Path(sys.argv[0]).parents[1] / 'state').write_text('CANCELLED|None')")
    with pytest.raises(TowlineError, match=r"nothing was submitted from .*towline cluster up"):
        towline("cluster", "status")

    script = towline("cluster", "up", "--dry-run")["rendered"]
    assert not stand_ins.calls()
    assert towline("cluster", "up") == {"kind": "slurm", "name": "towline", "job_id": "42", "namespace": ""}
    folder = tmp_path / "towline-data/cluster"
    assert (folder / "job.sh").read_text() == script
    assert stand_ins.calls("sbatch")[0]["arguments"] == ["--parsable", str(folder / "job.sh")]

    state.write_text("PENDING|(Priority)\n")
    status = towline("cluster", "status")
    assert (status["state"], status["detail"], status["active"], status["url"]) == ("PENDING", "(Priority)", True, "")
    with pytest.raises(TowlineError, match="slurm 42 is PENDING; stop it first: towline cluster down"):
        towline("cluster", "up")
    state.write_text("RUNNING|n[1-4]\n")
    (folder / "endpoint.json").write_text('{"url": "http://10.0.0.1:8600", "keys": true}\n')
    (folder / "admin.key").write_text("tlk-1")
    status = towline("cluster", "status")
    assert (status["url"], status["key"]) == ("http://10.0.0.1:8600", str(folder / "admin.key"))
    shown = CliRunner().invoke(app, ["cluster", "status"]).stdout.splitlines()
    assert shown[:3] == ["slurm       42", "state       RUNNING n[1-4]", "service     http://10.0.0.1:8600"]
    assert "tlk-1" not in "".join(shown)

    assert towline("cluster", "down") == {"stopped": "42"}
    assert [call["arguments"] for call in stand_ins.calls("scancel")] == [["--batch", "--signal=TERM", "42"]]
    with pytest.raises(TowlineError, match="nothing was submitted"):
        towline("cluster", "down")


def test_a_job_that_waits_is_cancelled(stand_ins: StandIns, tmp_path: Path) -> None:
    Path("towline.toml").write_text(SLURM)
    stand_ins.add("sbatch", "print('42')")
    stand_ins.add("squeue", QUEUE)
    stand_ins.add("scancel", "(Path(sys.argv[0]).parents[1] / 'state').unlink()")
    towline("cluster", "up")
    (tmp_path / "programs/state").write_text("PENDING|(Resources)")
    assert towline("cluster", "down") == {"stopped": "42"}
    assert [call["arguments"] for call in stand_ins.calls("scancel")] == [["42"]]


def test_a_job_that_slurm_has_forgotten_is_over(stand_ins: StandIns, tmp_path: Path) -> None:
    Path("towline.toml").write_text(SLURM)
    stand_ins.add("sbatch", "print('7')")
    stand_ins.add("squeue", QUEUE)
    towline("cluster", "up")
    (tmp_path / "towline-data/cluster/endpoint.json").write_text('{"url": "http://gone"}')
    status = towline("cluster", "status")
    assert (status["state"], status["active"], status["url"]) == ("ENDED", False, "")
    assert towline("cluster", "up")["job_id"] == "7"
    assert towline("cluster", "down") == {"stopped": "7"}


def test_kubernetes_gets_secrets_by_standard_input_alone(
    stand_ins: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("towline.toml").write_text(KUBERNETES)
    objects = [
        {"kind": "Deployment", "status": {"availableReplicas": 1}},
        {"kind": "RayCluster", "status": {"state": "ready"}},
        {"kind": "Pod", "status": {"phase": "Running"}},
        {"kind": "Pod", "status": {"phase": "Pending"}},
    ]
    stand_ins.add("kubectl", f"print({json.dumps({'items': objects})!r}) if 'get' in sys.argv else None", reads=True)
    with pytest.raises(TowlineError, match=r"cluster\.secrets: set MY_TOKEN in the environment first"):
        towline("cluster", "up")
    monkeypatch.setenv("MY_TOKEN", "hush-hush")
    assert "hush-hush" not in towline("cluster", "up", "--dry-run")["rendered"]
    assert towline("cluster", "up") == {"kind": "kubernetes", "name": "towline", "job_id": "", "namespace": "lab"}
    (apply,) = stand_ins.calls("kubectl")
    assert apply["arguments"] == ["apply", "--filename=-"]
    assert "MY_TOKEN: hush-hush\n" in apply["input"]
    written = [path for path in (tmp_path / "towline-data").rglob("*") if path.is_file()]
    assert not [path for path in written if b"hush-hush" in path.read_bytes()]

    status = towline("cluster", "status")
    assert (status["state"], status["url"]) == ("AVAILABLE", "http://towline.lab.svc:8600")
    assert status["detail"] == "1 of 2 pods run; RayCluster: ready"
    # Applying again updates it in place.
    towline("cluster", "up")
    assert towline("cluster", "down") == {"stopped": "lab/towline"}
    delete = stand_ins.calls("kubectl")[-1]["arguments"]
    assert delete[0] == "delete"
    assert "persistentvolumeclaim" not in delete[1]
    assert delete[2:4] == ["--namespace=lab", "--selector=app.kubernetes.io/instance=towline"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SLURM, "sbatch was not found; run this on a login node of the Slurm cluster, or use --dry-run"),
        (
            KUBERNETES,
            "kubectl was not found; install it, and give it access to the Kubernetes cluster, or use --dry-run",
        ),
        ("", "cluster.kind: 'local' has nothing to submit; run: towline serve"),
        ('[cluster]\nkind = "ray"', "cluster.kind: 'ray' has nothing to submit; run: towline serve --cluster ADDRESS"),
    ],
)
def test_what_is_missing_is_one_line(
    stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, settings: str, message: str
) -> None:
    Path("towline.toml").write_text(settings)
    monkeypatch.setenv("MY_TOKEN", "x")
    monkeypatch.setenv("PATH", str(stand_ins.folder))
    with pytest.raises(TowlineError) as raised:
        towline("cluster", "up")
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_refusals_and_silence_are_told(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("towline.toml").write_text(SLURM)
    stand_ins.add("sbatch", "sys.exit('sbatch: error: invalid partition\\nsbatch: error: Batch job submission failed')")
    with pytest.raises(
        TowlineError, match="sbatch failed with status 1: sbatch: error: invalid partition sbatch: error"
    ):
        towline("cluster", "up")
    stand_ins.add("sbatch", "print('Submitted')")
    with pytest.raises(TowlineError, match="sbatch printed 'Submitted' instead of a job id"):
        towline("cluster", "up")
    stand_ins.add("squeue", "import time; time.sleep(60)")
    with pytest.raises(TowlineError, match=r"squeue did not answer within 0\.5 seconds"):
        programs.call_program(["squeue"], seconds=0.5)
    Path("towline-data/cluster/launched.json").write_text("{")
    with pytest.raises(TowlineError, match="is damaged; end the job by hand"):
        towline("cluster", "status")
