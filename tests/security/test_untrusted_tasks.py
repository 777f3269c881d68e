"""Rows 1, 2, 3 and 5 at the service: a submit key, or a caller without any key, uses the nodes' machines by its task."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from support.security.attack import attack, without
from support.security.host_reach import SECRET, evil_module, host_reach, merged
from support.server.server_rig import Caller as HttpCaller
from support.server.server_rig import rig
from towline.benchmarks.fake_runner import FakeRunner
from towline.config import ServerSettings
from towline.schema import Role, SandboxKind, Task
from towline.schema.trust import RootRegistry
from towline.server.api.auth import ANONYMOUS, Caller
from towline.server.errors import RequestError
from towline.server.scheduling.task_trust import admitted, is_trusted

OPEN_DOOR = without(
    ("towline.schema.trust.is_granted", lambda *_: True),
    ("towline.schema.untrusted.is_granted", lambda *_: True),
)
"""The grants that every narrow type asks for."""
SUBMITTER = Caller("tenant", frozenset({Role.SUBMIT}))
_NAMES = (f"evil_{number}" for number in itertools.count())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose service runs in `service/`, with secrets beside and below it."""
    for name in ("secrets", "service", "service/data", "service/towline-data", "service/data/other"):
        (tmp_path / name).mkdir()
    for name in ("secrets/key", "secrets/Dockerfile", "service/towline-data/key", "service/data/key"):
        (tmp_path / name).write_text(SECRET)
    (tmp_path / "service" / "link").symlink_to(tmp_path / "secrets")
    (tmp_path / "service" / "data" / "link").symlink_to(tmp_path / "secrets")
    monkeypatch.chdir(tmp_path / "service")
    monkeypatch.setenv("HOME", str(tmp_path / "secrets"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def submitted(
    task: Task, caller: Caller = SUBMITTER, default: SandboxKind = SandboxKind.BUBBLEWRAP, **settings: Any
) -> list[str]:
    """What a caller's task reaches on the node, once the service took it; nothing if it did not."""
    known = ServerSettings.model_validate(settings)
    registry = RootRegistry({"python": "/nowhere/python.tar"}, {"base": "docker.io/lab/base:1"})
    trusted = is_trusted(caller, known)
    try:
        made = admitted(task, "", trusted=trusted, settings=known, registry=registry, default_sandbox=default)
    except RequestError:
        return []
    return host_reach(made, default)


ROOTS = {
    "traversal": "data/../../secrets",
    "traversal twice": "data/other/../../../secrets",
    "ends in dots": "data/other/..",
    "leading dots": "../secrets",
    "dot and dots": "./../secrets",
    "doubled slashes": "data//..//..//secrets",
    "absolute": "{machine}/secrets",
    "absolute with dots": "{machine}/service/../secrets",
    "many slashes": "///{machine}/secrets",
    "home": "~",
    "link": "./link",
    "link below": "data/link/.",
    "below a folder of the service": "data/other/../.",
    "with a slash": "towline-data/",
}


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS.keys())
@attack("1", "2", guard=OPEN_DOOR)
def test_roots(machine: Path, root: str) -> list[str]:
    return submitted(merged({}, {"environment": {"root": root.format(machine=machine)}}))


@attack("1", "2", guard=without(("towline.schema.untrusted.complete_image", lambda name: name)))
def test_a_bare_name_is_never_a_folder_of_the_service(machine: Path) -> list[str]:
    """The folder that holds every tenant's logs has a name that could be an image's."""
    return submitted(merged({}, {"environment": {"root": "towline-data"}}), submitters_may=["images"])


REGISTRIES = {
    "loopback": "127.0.0.1:5000/lab/base",
    "loopback by digest": f"127.0.0.1:5000/lab/base@sha256:{'a' * 64}",
    "metadata service": "169.254.169.254/latest/meta-data",
    "name of a machine": "registry.internal:5000/x",
    "localhost": "localhost/x",
    "IPv6": "[::1]:5000/x",
}


@pytest.mark.parametrize("root", REGISTRIES.values(), ids=REGISTRIES.keys())
@attack("1", "2", guard=OPEN_DOOR)
def test_registries(machine: Path, root: str) -> list[str]:
    return submitted(merged({}, {"environment": {"root": root}}))


PATHS = {
    "absolute": "{machine}/secrets/key",
    "folder": "{machine}/secrets",
    "traversal": "../secrets/key",
    "inner traversal": "data/../../secrets/key",
    "home": "~/key",
    "link": "link/key",
    "own folder": "data/key",
    "the service's data": "towline-data",
    "this folder": ".",
}
PLACES: dict[str, Any] = {
    "environment.files": lambda path: {"environment": {"files": [{"target": "/x", "source": path}]}},
    "steps.files": lambda path: {
        "steps": [{"name": "s", "instruction": "x", "files": [{"target": "/x", "source": path}]}]
    },
    "evaluator.files": lambda path: {
        "evaluator": {"kind": "command", "command": "true", "files": [{"target": "/x", "source": path}]}
    },
    "patch files": lambda path: {
        "evaluator": {"kind": "patch", "command": "true", "files": [{"target": "/x", "source": path}]}
    },
    "harbor tests": lambda path: {"evaluator": {"kind": "harbor", "tests": path}},
    "harbor secret": lambda path: {"evaluator": {"kind": "harbor", "tests": f"upload:{'a' * 64}", "secret": [path]}},
    "harbor step": lambda path: {"evaluator": {"kind": "harbor", "steps": [{"name": "s", "tests": path}]}},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
@attack("1", "2", guard=OPEN_DOOR)
def test_paths(machine: Path, path: str, place: Any) -> list[str]:
    return submitted(merged({}, place(path.format(machine=machine))))


FOLDERS = {"absolute": "{machine}/secrets", "traversal": "../secrets", "link": "link", "home": "~", "here": "."}


@pytest.mark.parametrize("harness", ["shell", "oracle"])
@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS.keys())
@attack("1", "2", guard=OPEN_DOOR)
def test_folders_of_programs_and_builds(machine: Path, folder: str, harness: str) -> list[str]:
    path = folder.format(machine=machine)
    found = submitted(merged({"harness": harness}, {"harness_options": {"command": "true", "folder": path}}))
    return found + submitted(merged({}, {"environment": {"build": path}}))


MODULES: dict[str, Any] = {
    "harness": lambda name, file: {"harness": f"{name}:HARNESS"},
    "evaluator": lambda name, file: {"evaluator": {"kind": "python", "function": f"{name}:reward"}},
    "evaluator file": lambda name, file: {"evaluator": {"kind": "python", "function": f"{file}:reward"}},
    "evaluator in the folder": lambda name, file: {"evaluator": {"kind": "python", "function": f"../{name}.py:reward"}},
}


@pytest.mark.parametrize("place", MODULES.values(), ids=MODULES.keys())
@attack("1", "3", guard=OPEN_DOOR)
def test_code_of_a_task_in_the_service(machine: Path, place: Any) -> list[str]:
    name = next(_NAMES)
    file = evil_module(machine, name)
    try:
        return submitted(merged({}, place(name, file)))
    finally:
        sys.modules.pop(name, None)


OTHERS: dict[str, dict[str, Any]] = {
    "process": {"environment": {"sandbox": "process"}},
    "process with setup": {"environment": {"sandbox": "process", "setup": ["id >/tmp/x"]}},
    "network": {"environment": {"network": "open"}},
    "packages": {"harness": "shell", "harness_options": {"command": "true", "packages": ["evil==1.0"]}},
    "look-ahead": {"settings": {"noise": [r"(?=(a+))\1*b"]}},
    "back-reference in a role": {"settings": {"roles": [{"role": "side", "system": r"(a*)\1$"}]}},
    "endless pattern": {"settings": {"noise": ["(a{1000}){1000}"]}},
    "long pattern": {"settings": {"noise": ["a?" * 600]}},
    "pattern of the evaluator": {
        "evaluator": {"kind": "command", "command": "true", "reward": "regex", "pattern": r"(x+x+)+\1y"}
    },
}


@pytest.mark.parametrize("fields", OTHERS.values(), ids=OTHERS.keys())
@attack("3", "5", "8", guard=OPEN_DOOR)
def test_what_is_not_isolated(machine: Path, fields: dict[str, Any]) -> list[str]:
    return submitted(merged({}, fields))


@attack("3", "5", guard=without(("towline.schema.untrusted.is_granted", lambda *_: True)))
def test_a_default_sandbox_without_isolation(machine: Path) -> list[str]:
    """An operator who tries things with `--sandbox process` does not give submit keys a shell."""
    return submitted(merged({}, {}), default=SandboxKind.PROCESS)


@pytest.mark.parametrize("version", ["../../../tmp/evil", "/tmp/evil", "3.12/../../x", "3", "", "3.12\n"])
@attack("3", guard=without(("towline.schema.untrusted.UntrustedShell.model_validate", lambda values, context: values)))
def test_the_interpreter_of_a_program_is_a_version(machine: Path, version: str) -> list[str]:
    """Interpreters are searched and started by this text, on the node itself."""
    options = {"command": "true", "packages": ["a==1"], "python": version}
    task = merged({"harness": "shell"}, {"harness_options": options})
    return submitted(task, submitters_may=["packages"])


@pytest.mark.parametrize("caller", [ANONYMOUS, Caller("anonymous", frozenset({Role.ADMIN}), "other")])
@attack("3", guard=without(("towline.server.scheduling.task_trust.ANONYMOUS", Caller("", frozenset()))))
def test_a_caller_without_a_key_is_not_the_operator(machine: Path, caller: Caller) -> list[str]:
    """Any local user is a caller of a service without keys."""
    return submitted(merged({}, {"environment": {"sandbox": "process"}}), caller, auth=False)


@attack("3", guard=without(("towline.server.scheduling.task_trust.is_loopback", lambda _: True)))
def test_trust_in_local_users_ends_at_the_machine(machine: Path) -> list[str]:
    task = merged({}, {"environment": {"sandbox": "process"}})
    return submitted(task, ANONYMOUS, auth=False, trust_tasks=True, host="0.0.0.0")


class Taking(FakeRunner):
    """Takes every task and runs none."""

    def __init__(self) -> None:
        super().__init__(capacity=0)
        self.taken: list[Task] = []

    async def check(self, task: Task) -> None:
        self.taken.append(task)


@attack("1", "2", guard=OPEN_DOOR)
async def test_a_submit_key_over_http(machine: Path) -> list[str]:
    runner = Taking()
    body = {"task_id": "t", "instruction": "x", "harness": "nothing", "environment": {"root": "data/../../secrets"}}
    async with rig(machine / "server", runner=runner) as r:
        key = (await r.service.keys.create("", [Role.SUBMIT])).key
        one = await HttpCaller(r.caller.web, key).call("POST", "/v1/tasks", body)
        many = await HttpCaller(r.caller.web, key).call("POST", "/v1/tasks", [body | {"task_id": "u"}])
        assert {one.status, many.status} in ({403}, {200})
        if one.status == 403:
            assert (one.body["field"], many.body["field"]) == ("environment.root", "[0].environment.root")
    return [reached for task in runner.taken for reached in host_reach(task)]


@attack("3", guard=without(("towline.server.scheduling.task_trust.ANONYMOUS", Caller("", frozenset()))))
async def test_a_local_user_without_a_key_over_http(machine: Path) -> list[str]:
    runner = Taking()
    body = {"task_id": "t", "instruction": "x", "harness": "nothing", "environment": {"sandbox": "process"}}
    async with rig(machine / "server", runner=runner, auth=False) as r:
        answer = await HttpCaller(r.caller.web).call("POST", "/v1/tasks", body)
        assert answer.status in (403, 200), answer
    return [reached for task in runner.taken for reached in host_reach(task)]


async def test_an_operator_may_all_of_it(machine: Path) -> None:
    process = merged({}, {"environment": {"sandbox": "process"}})
    operator = Caller("me", frozenset({Role.ADMIN}))
    assert submitted(process, operator)
    assert submitted(process, ANONYMOUS, auth=False, trust_tasks=True)
    assert submitted(process, trust_submitters=True)
    assert submitted(process, submitters_may=["process"])
    assert submitted(merged({}, {"environment": {"root": "../secrets"}}), operator)
