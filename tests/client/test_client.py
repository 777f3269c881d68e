"""The client against a stand-in of the service: requests, responses, and faults."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import towline
from support.client.stand_in_service import StandIn, make_trajectory, serving
from towline.client import (
    AsyncClient,
    BadAnswer,
    Busy,
    Client,
    ClientError,
    Conflict,
    InvalidRequest,
    NotAllowed,
    NotFound,
    ServiceError,
    Unreachable,
    WaitTimeout,
)
from towline.schema import Task, TaskState

TASK = {"instruction": "add one and one", "harness": "shell", "num_samples": 2}


@pytest.fixture
def service() -> StandIn:
    return StandIn()


@pytest.fixture
def url(service: StandIn) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, patience=20) as made:
        yield made


def test_submit_is_idempotent_and_rows_are_arrays(service: StandIn, client: Client) -> None:
    first = client.submit(TASK)
    again = client.submit(dict(reversed(TASK.items())))
    assert (first.task_id, first.created, first.sessions) == (again.task_id, True, 2)
    assert not again.created
    assert client.submit({**TASK, "instruction": "another"}).task_id != first.task_id
    named = client.submit([Task(task_id="named/1 ü", instruction="x", harness="shell"), {**TASK, "num_samples": 1}])
    assert [one.created for one in named] == [True, True]
    assert named[0].task_id == "named/1 ü"
    assert client.task("named/1 ü").state is TaskState.DONE
    assert client.wait(first.task_id, within=5).finished == 2
    assert len(client.tasks()) == 4
    assert client.tasks("running") == []

    taken = list(client.results("trainer", limit=6, lease=60))
    assert sorted(one.result_id for one in taken) == sorted(f"s-{name}" for name in service.trajectories)
    for one in taken:
        (session,) = one.sessions
        expected = service.trajectories[session.session_id]
        assert one.trajectories == [expected]
        assert one.traces == expected.traces
        (row,) = one.rows()
        assert row["token_ids"].dtype == np.int32
        assert np.array_equal(row["token_ids"], expected.traces[0].token_ids)
        assert (row["rollout_id"], row["group_id"], row["reward"]) == (session.session_id, session.task_id, 1.0)
        assert one.rewards == {session.session_id: 1.0}
    groups = list(client.results("trainer", "group", idle=0.1))
    assert sorted(len(one.traces) for one in groups) == [1, 1, 2, 2]
    assert client.trajectory(f"{first.task_id}-0") == service.trajectories[f"{first.task_id}-0"]
    assert client.session(f"{first.task_id}-0").task_id == first.task_id


def test_only_unacknowledged_results_are_delivered_again(service: StandIn, client: Client) -> None:
    client.submit({**TASK, "num_samples": 5})
    first = [one.result_id for one in client.lease("a", max=3, lease=0.05).results]
    done = client.ack("a", [first[0], "unheard-of"])
    assert done.acked == [first[0]]
    assert done.unknown == ["unheard-of"]
    later = list(client.results("a", limit=4, lease=60))
    assert sorted(one.result_id for one in later) == sorted({f"s-{n}" for n in service.trajectories} - {first[0]})
    assert {one.result.delivery for one in later if one.result_id in first} == {2}
    # Another consumer has leases of its own.
    assert len(list(client.results("b", idle=0.05, trajectories=False))) == 5

    loop = client.results("c", auto_ack=True, max=5, lease=60)
    one = next(loop)
    assert ("c", one.result_id) not in service.acked
    two = next(loop)
    assert ("c", one.result_id) in service.acked
    loop.close()
    assert ("c", two.result_id) not in service.acked


def test_loop_skips_results_whose_lease_expired(client: Client) -> None:
    client.submit({**TASK, "num_samples": 3})
    slow = client.results("slow", max=3, limit=3, lease=0.3)
    first = next(slow)
    time.sleep(0.4)
    # The leases of the two others ran out meanwhile: another worker of the same name may have them, and here gets them.
    others = list(client.results("slow", max=3, limit=3, lease=60))
    assert {one.result.delivery for one in others} == {2}
    assert first.result_id in {one.result_id for one in others}
    client.ack("slow", [one.result_id for one in others])
    client.submit({**TASK, "task_id": "more"})
    assert [one.task_id for one in slow] == ["more", "more"]


def test_stale_results_are_dropped_and_counted_or_flagged(service: StandIn, client: Client) -> None:
    service.at_once = False
    client.submit({**TASK, "task_id": "t", "num_samples": 3})
    for sample, version in enumerate((0, 4, 5)):
        service.finish("t", sample, version=version)
    client.pause("abort")
    assert client.policy().paused
    assert client.update_weights("/weights", 5).version == 5
    client.resume(5)
    kept = list(client.results("drops", max_staleness=1, idle=0.1))
    assert [one.result_id for one in kept] == ["s-t-1", "s-t-2"]
    assert kept[0].version == 5
    assert sum(one.dropped for one in kept) == 1
    flagged = list(client.results("flags", max_staleness=1, stale="flag", limit=3))
    assert [one.sessions[0].stale for one in flagged] == [True, False, False]


@pytest.mark.parametrize("fault", ["429", "503", "502", "hang up", "answer, then hang up"])
def test_transient_failures_are_retried(service: StandIn, client: Client, fault: str) -> None:
    service.faults = [fault, fault]
    accepted = client.submit({**TASK, "task_id": "once"})
    assert accepted.sessions == 2
    assert accepted.created == (fault != "answer, then hang up")
    assert list(service.tasks) == ["once"]
    assert service.calls.count("POST /v1/tasks") == 3
    service.faults = [fault]
    (one,) = client.results("a", limit=1, lease=60)
    service.faults = [fault]
    assert client.ack("a", [one.result_id]).acked == [one.result_id]


def test_errors_are_typed_and_name_the_field(service: StandIn, client: Client, url: str) -> None:
    with pytest.raises(InvalidRequest, match="min_samples") as invalid:
        client.submit({**TASK, "min_samples": 9})
    with pytest.raises(InvalidRequest, match="num_samples") as invalid:
        client.submit({**TASK, "num_samples": 0})
    assert invalid.value.field == "num_samples"
    assert "POST /v1/tasks" not in service.calls
    client.submit({**TASK, "task_id": "t"})
    with pytest.raises(Conflict, match="another task"):
        client.submit({**TASK, "task_id": "t", "instruction": "other"})
    with pytest.raises(NotFound, match="there is no task nowhere") as missing:
        client.task("nowhere")
    assert missing.value.status == 404
    service.faults = ["500"]
    with pytest.raises(ServiceError, match="told to fail with 500"):
        client.policy()
    service.faults = ["429"] * 50
    with Client(url, patience=0.3) as hasty, pytest.raises(Busy, match="429"):
        hasty.policy()
    service.faults = []
    service.key = "secret-key"
    with pytest.raises(NotAllowed, match="key is missing"):
        client.policy()
    with Client(url, "secret-key") as allowed:
        assert allowed.policy().version == 0
        assert "secret-key" not in repr(allowed)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}", patience=0.3) as lonely, pytest.raises(Unreachable, match="attempts"):
        lonely.policy()
    with pytest.raises(ClientError, match="not the URL"):
        Client("localhost:80")


def test_foreign_responses_are_bad_answers(service: StandIn, client: Client) -> None:
    service.status = lambda task_id: {"task": task_id}  # type: ignore[method-assign, assignment, return-value]
    client.submit({**TASK, "task_id": "t"})
    with pytest.raises(BadAnswer, match="contract"):
        client.task("t")
    service.trajectories["t-0"] = make_trajectory("t-0", "t").model_copy(update={"schema_version": 99})
    with pytest.raises(BadAnswer, match="schema version 99"):
        client.trajectory("t-0")


def test_wait_times_out(service: StandIn, client: Client) -> None:
    service.at_once = False
    client.submit({**TASK, "task_id": "t"})
    with pytest.raises(WaitTimeout, match="still running"):
        client.wait("t", within=0.2)
    assert list(client.results("a", idle=0.1)) == []
    timer = threading.Timer(0.2, lambda: [service.finish("t", sample) for sample in range(2)])
    timer.start()
    assert client.wait("t", within=20).finished == 2
    assert client.cancel("t").state is TaskState.CANCELLED


def test_events_resume_after_a_broken_stream(service: StandIn, client: Client) -> None:
    service.faults = ["hang up after event"]
    service.tell("policy", {"n": 0})
    seen = []
    for event in client.events(after=0):
        seen.append((event.seq, event.body["n"]))
        if len(seen) == 1:
            for n in range(1, 4):
                service.tell("policy", {"n": n})
        if len(seen) == 4:
            break
    assert seen == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert next(client.events(after=3)).body == {"n": 3}


def test_client_is_shared_by_threads_and_a_running_loop(service: StandIn, client: Client) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda n: client.submit({**TASK, "task_id": f"t{n}"}).created, range(32)))
    assert all(made)
    assert len(service.tasks) == 32

    async def inside() -> int:
        return len(client.tasks())

    assert asyncio.run(inside()) == 32


_FORKS = """
import json, os, sys
from towline import Client
client, task = Client(sys.argv[1], patience=20), json.loads(sys.argv[2])
client.submit(task | {"task_id": "of the parent"})
child = os.fork()
if not child:
    print(client.submit(task | {"task_id": "of the child"}).sessions, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(len(client.tasks()))
"""


def test_forked_process_opens_its_own_connections(service: StandIn, url: str) -> None:
    # In a process without the threads of this one, any of which may hold a lock that a child would wait for.
    command = [sys.executable, "-c", _FORKS, url, json.dumps(TASK)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.split(), done.stderr) == (["2", "2"], "")


async def test_async_client_behaves_the_same(service: StandIn, url: str) -> None:
    async with AsyncClient(url, patience=20) as client:
        service.faults = ["429", "hang up"]
        accepted = await client.submit([{**TASK, "task_id": f"t{n}"} for n in range(3)])
        assert [one.created for one in accepted] == [True] * 3
        assert (await client.wait("t0", within=5)).state is TaskState.DONE
        async for one in client.results("a", limit=6, auto_ack=True):
            assert one.traces[0].trained_tokens == 4
        assert len(service.acked) == 6
        assert (await client.pause("drain", deadline=1)).paused
        assert not (await client.resume(3)).paused
        async for event in client.events(after=0):
            assert event.seq == 1
            break
        with pytest.raises(NotFound):
            await client.trajectory("nothing")
        assert (await client.nodes())[0]["node"] == "here"
        assert (await client.health())["status"] == "ok"


def test_url_and_key_from_the_environment(url: str, service: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    service.key = "from-the-environment"
    monkeypatch.setenv("TOWLINE_URL", url + "/")
    monkeypatch.setenv("TOWLINE_KEY", "from-the-environment")
    with towline.Client() as client:
        assert client.url == url
        assert client.policy().version == 0
    assert os.environ["TOWLINE_URL"].endswith("/")
