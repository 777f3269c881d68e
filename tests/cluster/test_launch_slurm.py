"""The Slurm script, run by bash with programs that stand in for Slurm, Ray, vLLM and Towline: who is started, where, how."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.cluster.stand_ins import StandIns
from towline.cluster.launch.inputs import LaunchInputs
from towline.cluster.launch.slurm import render_job
from towline.config import Settings
from towline.errors import ConfigError

HOSTILE = """it's "$(touch pwned)" `touch pwned` ${HOME} ; touch pwned # \\ * %j"""
SRUN = """
# Runs the command, as on the node that is named.
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
os.environ["SLURM_CPUS_ON_NODE"] = "3"
os.execvp(words[0], words)
"""
SCONTROL = """
if sys.argv[1:3] == ["show", "hostnames"]:
    print("\\n".join(sys.argv[3].split(",")))
else:
    print("NodeName=%s NodeAddr=10.9.0.%s Arch=x" % (sys.argv[3], sys.argv[3][1:]))
"""
TOWLINE = """
if "keys" in sys.argv:
    print("tlk-secret")
elif "serve" in sys.argv:
    import time
    # The job ends with its server: not before its steps have begun.
    log, until = Path(sys.argv[0]).parents[1] / "calls", time.monotonic() + 30
    while any(
        log.read_text().count(f'"program": "{name}"') < int(count)
        for name, count in (one.split("=") for one in os.environ.get("AWAITED", "").split())
    ):
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.02)
    print('{"url": "http://here"}', flush=True)
"""
VARIABLES = (
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_MODE",
    "RAY_USAGE_STATS_ENABLED",
    "RAY_ADDRESS",
    "VLLM_API_KEY",
    "UPSTREAM",
    "FROM_SETUP",
)


@pytest.fixture
def stand_ins(tmp_path: Path) -> StandIns:
    made = StandIns(tmp_path / "programs")
    made.add("srun", SRUN)
    made.add("scontrol", SCONTROL)
    made.add("getent", "print(sys.argv[2], 'STREAM')")
    made.add("timeout", "")
    for name in ("ray", "vllm"):
        made.add(name, "", variables=VARIABLES)
    made.add("towline", TOWLINE, variables=VARIABLES)
    return made


def run_job(
    stand_ins: StandIns, folder: Path, settings: dict[str, Any], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Render a job and run it as Slurm would, on n1."""
    folder.mkdir(exist_ok=True)
    loaded = Settings.model_validate(settings)
    script = render_job(LaunchInputs(loaded, folder, folder / "towline.toml"))
    environment = {
        "PATH": stand_ins.path,
        "HOME": str(folder),
        "SLURM_JOB_ID": "12345",
        "SLURMD_NODENAME": "n1",
        **variables,
    }
    command = ["bash", "-c", script]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def steps(stand_ins: StandIns, word: str) -> list[list[str]]:
    """The arguments of `srun` for commands that have a word in them."""
    return [call["arguments"] for call in stand_ins.calls("srun") if word in call["arguments"]]


def test_one_node_needs_no_ray(stand_ins: StandIns, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = {"cluster": {"kind": "slurm", "arguments": ["--concurrency", "8"]}}
    done = run_job(stand_ins, folder, settings, SLURM_JOB_NODELIST="n1")
    assert done.returncode == 0, done.stderr
    keys, serve = (call["arguments"] for call in stand_ins.calls("towline"))
    data = ["--data", str(folder / "towline-data"), "--config", str(folder / "towline.toml")]
    assert keys == ["serve", "keys", "create", "--role", "admin", "--name", "cluster", *data]
    assert serve == ["serve", *data, "--host", "10.9.0.1", "--port", "8600", "--json", "--concurrency", "8"]
    assert not stand_ins.calls("srun")
    key = folder / "towline-data/cluster/admin.key"
    assert (key.read_text(), key.stat().st_mode & 0o777) == ("tlk-secret\n", 0o600)
    # The next job keeps the key.
    assert run_job(stand_ins, folder, settings, SLURM_JOB_NODELIST="n1").returncode == 0
    assert sum("keys" in call["arguments"] for call in stand_ins.calls("towline")) == 1


def test_ray_joins_several_nodes_with_a_token(stand_ins: StandIns, tmp_path: Path) -> None:
    settings = {
        "cluster": {"kind": "slurm", "slurm": {"nodes": 3, "ray": True, "setup": ["export FROM_SETUP='one two'"]}}
    }
    done = run_job(stand_ins, tmp_path / "run", settings, SLURM_JOB_NODELIST="n1,n2,n3", AWAITED="ray=3")
    assert done.returncode == 0, done.stderr
    head, *workers = sorted(stand_ins.calls("ray"), key=lambda call: "--head" not in call["arguments"])
    assert {"--head", "--node-ip-address=10.9.0.1", "--port=22345", "--num-cpus=3"} <= set(head["arguments"])
    assert [call["arguments"][1] for call in workers] == ["--address=10.9.0.1:22345"] * 2
    assert {call["arguments"][2] for call in workers} == {"--node-ip-address=10.9.0.2", "--node-ip-address=10.9.0.3"}
    serve = stand_ins.calls("towline")[-1]
    assert serve["arguments"][-2:] == ["--cluster", "auto"]
    assert serve["variables"]["RAY_ADDRESS"] == "10.9.0.1:22345"
    for call in [head, *workers, serve]:
        assert call["variables"]["RAY_AUTH_MODE"] == "token"
        assert call["variables"]["RAY_USAGE_STATS_ENABLED"] == "0"
        assert call["variables"]["FROM_SETUP"] == "one two"
    (token,) = {call["variables"]["RAY_AUTH_TOKEN"] for call in [head, *workers, serve]}
    assert len(token) == 64
    assert token not in str([call["arguments"] for call in stand_ins.calls()])
    nodes = {argument for step in steps(stand_ins, "ray") for argument in step if argument.startswith("--nodelist")}
    assert nodes == {"--nodelist=n1", "--nodelist=n2", "--nodelist=n3"}


def test_without_ray_the_server_gets_the_addresses_of_its_nodes(stand_ins: StandIns, tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    settings = {"cluster": {"kind": "slurm", "slurm": {"nodes": 3}}}
    done = run_job(stand_ins, folder, settings, SLURM_JOB_NODELIST="n1,n2,n3")
    assert done.returncode == 0, done.stderr
    nodes = folder / "towline-data/cluster/nodes"
    assert nodes.read_text() == "n1 10.9.0.1\nn2 10.9.0.2\nn3 10.9.0.3\n"
    assert stand_ins.calls("towline")[-1]["arguments"][-2:] == ["--cluster", f"slurm:{nodes}"]
    assert not stand_ins.calls("ray")


def test_model_servers_have_a_part_of_the_job(stand_ins: StandIns, tmp_path: Path) -> None:
    engine = {
        "replicas": 2,
        "gpus": 4,
        "memory": "64Gi",
        "partition": "gpu",
        "arguments": ["--tensor-parallel-size", "4"],
    }
    settings = {
        "model": {"folder": "/models/m"},
        "engine": {"key_variable": "UPSTREAM"},
        "cluster": {"kind": "slurm", "engine": engine, "slurm": {"partition": "cpu", "account": "lab"}},
    }
    parts = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n5,n6", "SLURM_HET_SIZE": "2"}
    done = run_job(stand_ins, tmp_path / "run", settings, SLURM_JOB_NODELIST="n1", AWAITED="vllm=2", **parts)
    assert done.returncode == 0, done.stderr
    calls = stand_ins.calls("vllm")
    address = [["--host", f"10.9.0.{number}", "--port", "8000", "--tensor-parallel-size", "4"] for number in (5, 6)]
    assert sorted(call["arguments"] for call in calls) == [["serve", "/models/m", *words] for words in address]
    assert {step[0] if step[0].startswith("--het") else step[6] for step in steps(stand_ins, "vllm")} == {
        "--het-group=1"
    }
    serve = stand_ins.calls("towline")[-1]
    upstream = [f"http://10.9.0.{number}:8000" for number in (5, 6)]
    assert serve["arguments"][-6:] == ["--engine", "vllm", "--upstream", upstream[0], "--upstream", upstream[1]]
    (key,) = {call["variables"]["VLLM_API_KEY"] for call in calls} | {serve["variables"]["UPSTREAM"]}
    assert len(key) == 64
    assert key not in str([call["arguments"] for call in stand_ins.calls()])
    script = render_job(LaunchInputs(Settings.model_validate(settings), tmp_path, None))
    first, second = script.split("#SBATCH hetjob\n")
    assert "#SBATCH --partition=cpu\n" in first
    for line in ("--nodes=2", "--gpus-per-node=4", "--mem=64G", "--partition=gpu", "--account=lab", "--time=04:00:00"):
        assert f"#SBATCH {line}\n" in second


def test_no_text_of_a_user_is_run(stand_ins: StandIns, tmp_path: Path) -> None:
    """Every free text is hostile; each arrives at its program as it is."""
    settings = {
        "model": {"folder": HOSTILE},
        "server": {"data": HOSTILE},
        "cluster": {
            "kind": "slurm",
            "program": ["env", "A=" + HOSTILE, "towline"],
            "ray_program": ["env", "A=" + HOSTILE, "ray"],
            "arguments": [HOSTILE],
            "engine": {"arguments": [HOSTILE], "command": ["env", "A=" + HOSTILE, "vllm"]},
            "slurm": {"nodes": 2, "ray": True, "options": ["--comment=" + HOSTILE]},
        },
    }
    folder = tmp_path / "it's $(touch pwned) 100%"
    parts = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1,n2", "SLURM_JOB_NODELIST_HET_GROUP_1": "n5", "SLURM_HET_SIZE": "2"}
    done = run_job(stand_ins, folder, settings, SLURM_JOB_NODELIST="n1", AWAITED="vllm=1 ray=2", **parts)
    assert done.returncode == 0, done.stderr
    serve = stand_ins.calls("towline")[-1]["arguments"]
    assert serve[:3] == ["serve", "--data", str(folder / HOSTILE)]
    assert serve[-1] == HOSTILE
    vllm = stand_ins.calls("vllm")[0]["arguments"]
    assert (vllm[0], vllm[-1]) == (HOSTILE, HOSTILE)
    assert not list(tmp_path.rglob("pwned"))
    assert (folder / HOSTILE / "cluster/admin.key").is_file()


def test_the_job_ends_as_its_server_does(stand_ins: StandIns, tmp_path: Path) -> None:
    stand_ins.add("towline", TOWLINE + "sys.exit(3)")
    folder = tmp_path / "run"
    (folder / "towline-data/cluster").mkdir(parents=True)
    (folder / "towline-data/cluster/admin.key").write_text("tlk-earlier")
    done = run_job(stand_ins, folder, {"cluster": {"kind": "slurm"}}, SLURM_JOB_NODELIST="n1")
    assert done.returncode == 3
    assert "the server ended with status 3" in done.stderr
    # A URL that nothing serves is not shown.
    assert not (folder / "towline-data/cluster/endpoint.json").exists()


def test_options_come_in_the_order_that_lets_a_user_override(tmp_path: Path) -> None:
    slurm = {
        "cpus_per_task": 16,
        "gpus": 1,
        "memory": "64G",
        "time": "1-00:00:00",
        "qos": "high",
        "options": ["--requeue"],
    }
    settings = Settings.model_validate({"cluster": {"kind": "slurm", "slurm": slurm}})
    script = render_job(LaunchInputs(settings, tmp_path, None))
    assert script == render_job(LaunchInputs(settings, tmp_path, None))
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    wanted = ["--cpus-per-task=16", "--gpus-per-node=1", "--mem=64G", "--qos=high", "--time=1-00:00:00"]
    assert [option for option in options if option in wanted] == wanted
    assert options.index("--no-requeue") < options.index("--requeue") == len(options) - 1


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ({"slurm": {"partition": "a b"}}, "partition"),
        ({"slurm": {"options": ["exclusive"]}}, "options"),
        ({"slurm": {"options": ["--a\n#SBATCH --b"]}}, "one line"),
        ({"slurm": {"setup": ["a\nb"]}}, "one line"),
        ({"slurm": {"time": "soon"}}, "time"),
        ({"slurm": {"interface": "eth0; reboot"}}, "interface"),
        ({"name": "Two Words"}, "name"),
        ({"program": []}, "program"),
        ({"secrets": ["A-B"]}, "secrets"),
        ({"engine": {"memory": "much"}}, "memory"),
        ({"kubernetes": {"cpus": "many"}}, "cpus"),
        ({"kubernetes": {"namespace": "Not_valid"}}, "namespace"),
        ({"kind": "cloud"}, "kind"),
    ],
)
def test_wrong_settings_are_refused(
    tmp_path: Path, cluster: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        Settings.load(cluster=cluster)


def test_a_key_variable_must_be_a_name(tmp_path: Path) -> None:
    settings = {"model": {"folder": "m"}, "engine": {"key_variable": "A=1; reboot #"}, "cluster": {"engine": {}}}
    with pytest.raises(ConfigError, match="key_variable"):
        render_job(LaunchInputs(Settings.model_validate(settings), tmp_path, None))
    with pytest.raises(ConfigError, match=r"cluster\.engine\.model"):
        render_job(LaunchInputs(Settings.model_validate({"cluster": {"engine": {}}}), tmp_path, None))


def test_a_name_that_resolves_to_loopback_is_not_used(stand_ins: StandIns, tmp_path: Path) -> None:
    stand_ins.add("getent", "print('127.0.1.1', 'STREAM')")
    stand_ins.add("hostname", "print('10.9.8.7 10.9.8.6')")
    assert run_job(stand_ins, tmp_path / "a", {"cluster": {"kind": "slurm"}}, SLURM_JOB_NODELIST="n1").returncode == 0
    serve = stand_ins.calls("towline")[-1]["arguments"]
    assert serve[serve.index("--host") + 1] == "10.9.8.7"
    # An interface that is named decides.
    stand_ins.add("ip", "print('2: ib0    inet 10.5.0.3/16 brd 10.5.255.255 scope global ib0')")
    settings = {"cluster": {"kind": "slurm", "slurm": {"interface": "ib0"}}}
    assert run_job(stand_ins, tmp_path / "b", settings, SLURM_JOB_NODELIST="n1").returncode == 0
    serve = stand_ins.calls("towline")[-1]["arguments"]
    assert serve[serve.index("--host") + 1] == "10.5.0.3"
    assert stand_ins.calls("ip")[0]["arguments"] == ["-4", "-o", "addr", "show", "dev", "ib0"]
    # Without any address the job fails and says what to set.
    stand_ins.add("ip", "")
    done = run_job(stand_ins, tmp_path / "c", settings, SLURM_JOB_NODELIST="n1")
    assert done.returncode == 1
    assert "no address of node n1 was found; set cluster.slurm.interface" in done.stderr
