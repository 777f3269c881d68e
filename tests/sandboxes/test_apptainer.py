"""Apptainer's command lines, checked by a stand-in that writes down what it is asked. For real: apptainer_by_hand.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from towline.sandboxes import apptainer, namespaces
from towline.sandboxes.apptainer import ApptainerRuntime
from towline.sandboxes.apptainer_cli import Apptainer, Place, exec_command, start_command
from towline.sandboxes.apptainer_instance import ApptainerSandbox
from towline.sandboxes.base import Mount, SandboxError, Spec, Unsupported, execute
from towline.sandboxes.folder_cache import Lease
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
    place = Place(
        "towline-1",
        Path("/roots/r"),
        Path("/d/overlay"),
        (Path("/d/layer-0"), Path("/d/layer-1")),
        (Path("/d/copy-1"),),
        Path("/d/pid"),
    )
    spec = Spec(
        root="/roots/r",
        network=Network.GATEWAY,
        resources=Resources(memory_mb=512, pids=100, cpus=1.5),
        mounts=(Mount(source, "/opt/towline/x"), Mount(source, "/opt/towline/y", writable=True)),
        env=(("KEY", "secret"),),
    )
    assert start_command(spec, place) == [
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
    bare = start_command(Spec(root="/r", network=Network.OPEN, resources=Resources()), place)
    assert not {"--net", "--memory", "--pids-limit", "--cpus"} & set(bare)
    assert "--net" in start_command(Spec(root="/r", network=Network.NONE, resources=Resources()), place)
    assert exec_command("i", ["echo", "-n", "x y"], cwd="/work", home=None) == [
        *("exec", "--cleanenv", "--no-eval", "--pwd", "/work", "instance://i", "echo", "-n", "x y"),
    ]
    assert exec_command("i", ["a"], cwd="/", home="/home/agent")[-3:] == ["env", "HOME=/home/agent", "a"]


async def test_commands_get_their_variables_by_the_environment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, log = stand_in(tmp_path)
    monkeypatch.setenv("OF_THE_NODE", "secret of the node")
    monkeypatch.setattr(namespaces, "is_apart", lambda pid: True)
    place = Place("towline-1", tmp_path, tmp_path, (), (), tmp_path / "pid")
    spec = Spec(root=str(tmp_path), env=(("KEY", "secret of the session"), ("HOME", "/home/agent")))
    sandbox = ApptainerSandbox(
        Apptainer(program, tmp_path / "data"), spec, tmp_path / "folder", place, Lease(tmp_path, None)
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
    with pytest.raises(Unsupported, match="one user"):
        await sandbox.start(["id"], user="agent")


async def test_it_fails_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, log = stand_in(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="there is no `apptainer`"):
        await ApptainerRuntime(tmp_path / "data").open()
    monkeypatch.undo()

    monkeypatch.setattr(apptainer, "_is_ordinary_user", lambda: False)
    with pytest.raises(SandboxError, match="for ordinary users"):
        await ApptainerRuntime(tmp_path / "data", program=program).open()

    # One that says it started an instance, and isolated nothing.
    monkeypatch.setattr(apptainer, "_is_ordinary_user", lambda: True)
    with pytest.raises(SandboxError, match="not the first of a namespace of its own"):
        await ApptainerRuntime(tmp_path / "data", program=program).open()
    assert asked(log)[-1][0][:2] == ["instance", "start"]
    assert not list((tmp_path / "data").glob("towline-*/overlay"))

    refusing, _ = stand_in(tmp_path, "user namespaces are not allowed")
    runtime = ApptainerRuntime(tmp_path / "data", program=refusing)
    with pytest.raises(SandboxError, match="user namespaces are not allowed"):
        await runtime.open()
    for spec, reason in (
        (Spec(), "a root of their own"),
        (Spec(root=str(tmp_path), user="agent"), "one user"),
        (Spec(root=str(tmp_path), resources=Resources(memory_mb=64)), "memory_mb=64 cannot be enforced"),
        (Spec(root="docker://debian"), "no root file system"),
    ):
        with pytest.raises(SandboxError, match=reason):
            await runtime.create(spec)
    assert not namespaces.is_apart(os.getpid())
    assert namespaces.processes(os.getpid()) == []
