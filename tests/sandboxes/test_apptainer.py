"""Apptainer's command lines, recorded by a stand-in program. `apptainer_by_hand.py` runs the real one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from towline.sandboxes.apptainer import namespaces
from towline.sandboxes.apptainer import runtime as apptainer
from towline.sandboxes.apptainer.runtime import ApptainerRuntime
from towline.sandboxes.apptainer.sandbox import (
    ApptainerCli,
    ApptainerSandbox,
    InstancePaths,
    exec_command,
    start_command,
)
from towline.sandboxes.base import Mount, SandboxError, SandboxSpec, Unsupported, execute
from towline.sandboxes.images.root_cache import FolderLease
from towline.schema import Network, Resources

STAND_IN = """#!/usr/bin/env python3
import json, os, sys
asked = [word for word in sys.argv[1:] if word != "-q"]
with open({log!r}, "a") as log:
    log.write(json.dumps([asked, dict(os.environ)]) + "\\n")
if asked == ["version"]:
    print("1.4.5")
elif asked[:2] == ["instance", "start"]:
    if {fails!r}:
        sys.exit("FATAL: " + {fails!r})
    with open(asked[asked.index("--pid-file") + 1], "w") as file:
        file.write(str(os.getpid()))
elif asked[0] == "exec":
    at = next(index for index, word in enumerate(asked) if word.startswith("instance://"))
    os.execvpe(asked[at + 1], asked[at + 1:], {{"PATH": os.environ["PATH"]}})
"""


def stand_in(folder: Path, fails: str = "") -> tuple[str, Path]:
    program, log = folder / "apptainer", folder / "log"
    program.write_text(STAND_IN.format(log=str(log), fails=fails))
    program.chmod(0o755)
    return str(program), log


def asked(log: Path) -> list[tuple[list[str], dict[str, Any]]]:
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()]


def test_command_lines(tmp_path: Path) -> None:
    source = tmp_path / "a,b"
    source.mkdir()
    paths = InstancePaths(
        "towline-1",
        Path("/roots/r"),
        Path("/d/overlay"),
        (Path("/d/layer-0"), Path("/d/layer-1")),
        (Path("/d/copy-1"),),
        Path("/d/pid"),
    )
    spec = SandboxSpec(
        root="/roots/r",
        network=Network.GATEWAY,
        resources=Resources(memory_mb=512, pids=100, cpus=1.5),
        mounts=(Mount(source, "/opt/towline/x"), Mount(source, "/opt/towline/y", writable=True)),
        env=(("KEY", "secret"),),
    )
    assert start_command(spec, paths) == [
        *(
            "instance",
            "start",
            "--userns",
            "--fakeroot",
            "--ignore-subuid",
            "--ignore-fakeroot-command",
            "--containall",
        ),
        *("--cleanenv", "--no-privs", "--no-home", "--no-mount", "tmp,home,cwd,hostfs,bind-paths,sys"),
        *("--net", "--network", "none"),
        *("--memory", "512m", "--memory-swap", "512m", "--pids-limit", "100", "--cpus", "1.5"),
        *("--overlay", "/d/layer-0:ro", "--overlay", "/d/layer-1:ro", "--overlay", "/d/overlay"),
        *("--mount", f'type=bind,src="{source}",dst=/opt/towline/x,ro'),
        *("--mount", "type=bind,src=/d/copy-1,dst=/opt/towline/y"),
        *("--pid-file", "/d/pid", "/roots/r", "towline-1"),
    ]
    bare = start_command(SandboxSpec(root="/r", network=Network.OPEN, resources=Resources()), paths)
    assert not {"--net", "--memory", "--pids-limit", "--cpus"} & set(bare)
    assert "--net" in start_command(SandboxSpec(root="/r", network=Network.NONE, resources=Resources()), paths)
    assert exec_command("i", ["echo", "-n", "x y"], cwd="/work", home=None) == [
        *("exec", "--cleanenv", "--no-eval", "--pwd", "/work", "instance://i", "echo", "-n", "x y"),
    ]
    assert exec_command("i", ["a"], cwd="/", home="/home/agent")[-3:] == ["env", "HOME=/home/agent", "a"]


async def test_commands_get_variables_only_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, log = stand_in(tmp_path)
    monkeypatch.setenv("OF_THE_NODE", "secret of the node")
    monkeypatch.setattr(namespaces, "is_namespace_init", lambda pid: True)
    paths = InstancePaths("towline-1", tmp_path, tmp_path, (), (), tmp_path / "pid")
    spec = SandboxSpec(root=str(tmp_path), env=(("KEY", "secret of the session"), ("HOME", "/home/agent")))
    sandbox = ApptainerSandbox(
        ApptainerCli(program, tmp_path / "data"), spec, tmp_path / "folder", paths, FolderLease(tmp_path, None)
    )
    done = await execute(
        sandbox, ["sh", "-c", 'cat; echo "$HOME" >&2; exit 5'], stdin=b"in", env={"MORE": "$x, `y`"}, cwd="/work"
    )
    assert (done.code, done.stdout, done.stderr) == (5, b"in", b"/home/agent\n")
    assert (await execute(sandbox, ["sh", "-c", "kill -9 $$"])).code == 137
    assert (await execute(sandbox, ["sleep", "60"], seconds=0.2)).timed_out
    words, environment = asked(log)[0]
    assert "secret" not in " ".join(words)
    assert environment["APPTAINERENV_KEY"] == "secret of the session"
    assert environment["APPTAINERENV_MORE"] == "$x, `y`"
    assert "APPTAINERENV_HOME" not in environment
    assert "secret of the node" not in environment.values()
    assert environment["APPTAINER_CONFIGDIR"] == str(tmp_path / "data/config")
    with pytest.raises(Unsupported, match="only root inside"):
        await sandbox.start(["id"], user="agent")


async def test_it_fails_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, log = stand_in(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="Apptainer is not installed"):
        await ApptainerRuntime(tmp_path / "data").open()
    monkeypatch.undo()

    monkeypatch.setattr(apptainer, "_is_ordinary_user", lambda: False)
    with pytest.raises(SandboxError, match="cannot run as root"):
        await ApptainerRuntime(tmp_path / "data", program=program).open()

    # A program that claims to have started an instance, and isolated nothing.
    monkeypatch.setattr(apptainer, "_is_ordinary_user", lambda: True)
    with pytest.raises(SandboxError, match="not the init of its own PID namespace"):
        await ApptainerRuntime(tmp_path / "data", program=program).open()
    assert asked(log)[-1][0][:2] == ["instance", "start"]
    assert not list((tmp_path / "data").glob("towline-*/overlay"))

    refusing, _ = stand_in(tmp_path, "user namespaces are not allowed")
    runtime = ApptainerRuntime(tmp_path / "data", program=refusing)
    with pytest.raises(SandboxError, match="user namespaces are not allowed"):
        await runtime.open()
    for spec, reason in (
        (SandboxSpec(), "need a root file system"),
        (SandboxSpec(root=str(tmp_path), user="agent"), "only root inside"),
        (SandboxSpec(root=str(tmp_path), resources=Resources(memory_mb=64)), "memory_mb=64 cannot be enforced"),
        (SandboxSpec(root="docker://debian"), "no root file system"),
    ):
        with pytest.raises(SandboxError, match=reason):
            await runtime.create(spec)
    assert not namespaces.is_namespace_init(os.getpid())
    assert namespaces.processes(os.getpid()) == []
