"""A stand-in for the rollout service: the contract of `towline.schema.service` in memory, with faults on request.

It runs no harness: a session ends when the test says so, or at once. It is faithful in all that a client can see:
idempotent submission, leases per consumer, acknowledgement by id, groups, staleness, `Problem` bodies, Arrow streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from towline.schema import EndReason, Event, Reward, Session, SessionState, Task, Trace, Trajectory, Turn
from towline.schema.files import to_table

ARROW = "application/vnd.apache.arrow.stream"


def make_trajectory(
    session_id: str, task_id: str, *, reward: float = 1.0, version: int = 0, turns: int = 2
) -> Trajectory:
    """A valid trajectory whose tokens are a function of its session."""
    seed = sum(session_id.encode())
    made: list[Turn] = []
    columns: list[list[Any]] = [[], [], [], [], []]
    for index in range(turns):
        suffix = [(seed + index * 7 + k) % 500 for k in range(3)]
        sampled = [(seed + index * 11 + k) % 500 for k in range(2)]
        made.append(
            Turn(
                id=f"t{index}",
                index=index,
                parent=f"t{index - 1}" if index else None,
                prompt_length=index * 5 + 3,
                suffix=np.array(suffix, np.int32),
                sampled=np.array(sampled, np.int32),
                logprobs=np.array([-0.5, -0.25], np.float32),
                versions=np.full(2, version, np.int32),
                finish="stop",
                messages=[{"role": "user", "text": f"question {index}"}],
                reply={"text": f"answer {index}"},
            )
        )
        for column, context, own in zip(
            columns,
            (suffix, [0] * 3, [0.0] * 3, [-1] * 3, [-1] * 3),
            (sampled, [1, 1], [-0.5, -0.25], [version] * 2, [index] * 2),
            strict=True,
        ):
            column += context + own
    kinds = (np.int32, np.uint8, np.float32, np.int32, np.int32)
    names = ("token_ids", "loss_mask", "logprobs", "policy_versions", "turn_ids")
    arrays = {name: np.array(column, kind) for name, column, kind in zip(names, columns, kinds, strict=True)}
    trace = Trace(trace_id="main", rollout_id=session_id, group_id=task_id, finish_reason="stop", **arrays)
    done = {"state": SessionState.DONE, "end_reason": EndReason.EXITED}
    trajectory = Trajectory(session_id=session_id, group_id=task_id, turns=made, traces=[trace], **done)
    return trajectory.with_reward(Reward(value=reward))


class StandIn:
    def __init__(self, *, key: str = "", at_once: bool = True, older: bool = False):
        """`older`: as a version that leases by GET only."""
        self.key = key
        self.older = older
        self.at_once = at_once
        """Whether sessions end as soon as they are submitted."""
        self.tasks: dict[str, Task] = {}
        self.trajectories: dict[str, Trajectory] = {}
        self.results: list[dict[str, Any]] = []
        self.leases: dict[tuple[str, str], list[float]] = {}
        """By consumer and result: when the lease ends, how often it was delivered."""
        self.acked: set[tuple[str, str]] = set()
        self.delivered: list[tuple[str, str, int]] = []
        self.events: list[Event] = []
        self.version, self.paused = 0, False
        self.cancelled: set[str] = set()
        self.faults: list[str] = []
        """What becomes of the next calls: a status, `hang up`, or `answer, then hang up`."""
        self.calls: list[str] = []
        self.acks, self.most_acks = 0, 1_000_000
        """How many acknowledgements were heard; those beyond the most are not, however long their client waits."""

    # What happens

    def finish(self, task_id: str, sample: int, *, version: int = 0, reward: float = 1.0) -> None:
        session_id = f"{task_id}-{sample}"
        trajectory = make_trajectory(session_id, task_id, reward=reward, version=version)
        self.trajectories[session_id] = trajectory
        session = {
            "session_id": session_id,
            "task_id": task_id,
            "sample": sample,
            "attempt": 1,
            "state": "done",
            "end_reason": "exited",
            "reward": reward,
            "reward_status": "scored",
            "usable": True,
            "turns": len(trajectory.turns),
            "trained_tokens": trajectory.traces[0].trained_tokens,
            "lowest_version": version,
            "finished": time.time(),
        }
        self.results.append(
            {"result_id": f"s-{session_id}", "unit": "session", "task_id": task_id, "sessions": [session]}
        )
        own = [r["sessions"][0] for r in self.results if r["task_id"] == task_id and r["unit"] == "session"]
        if len(own) == self.tasks[task_id].num_samples:
            self.results.append({"result_id": f"g-{task_id}", "unit": "group", "task_id": task_id, "sessions": own})
        self.tell("session", {"session_id": session_id, "state": "done"})

    def tell(self, kind: str, body: dict[str, Any]) -> None:
        self.events.append(Event(seq=len(self.events) + 1, at=time.time(), kind=kind, body=body))

    # The app

    def app(self) -> Any:
        routes = [
            Route("/v1/tasks", self.submit, methods=["POST"]),
            Route("/v1/tasks", self.listing),
            Route("/v1/tasks/{id:path}", self.task, methods=["GET", "DELETE"]),
            Route("/v1/sessions/{id}", self.session),
            Route("/v1/sessions/{id}/trajectory", self.trajectory),
            Route("/v1/trajectories", self.many, methods=["POST"]),
            Route("/v1/results", self.lease, methods=["GET"] if self.older else ["GET", "POST"]),
            Route("/v1/results/ack", self.ack, methods=["POST"]),
            Route("/v1/events", self.stream),
            Route("/v1/policy", self.policy),
            Route("/v1/policy/{what}", self.policy, methods=["POST"]),
            Route("/v1/nodes", self.nodes),
            Route("/healthz", self.healthz),
        ]
        inner = Starlette(routes=routes)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await inner(scope, receive, send)
            self.calls.append(f"{scope['method']} {scope['path']}")
            given = dict(scope["headers"]).get(b"authorization", b"").decode()
            if self.key and given != f"Bearer {self.key}":
                return await problem(401, "the key is missing or wrong")(scope, receive, send)
            fault = self.faults.pop(0) if self.faults else ""
            if fault.isdigit():
                headers = {"Retry-After": "0"} if fault in ("429", "503") else {}
                return await problem(int(fault), f"told to fail with {fault}", headers=headers)(scope, receive, send)
            if fault.endswith("hang up"):
                if fault.startswith("answer"):

                    async def swallow(_: Any) -> None:
                        return None

                    await inner(scope, receive, swallow)
                # A body shorter than promised: the connection is cut in the middle of the answer.
                promised = [(b"content-length", b"100")]
                await send({"type": "http.response.start", "status": 200, "headers": promised})
                raise ConnectionResetError(fault)
            return await inner(scope, receive, send)

        return app

    async def submit(self, request: Request) -> Response:
        body = await request.json()
        answers = []
        for given in body if isinstance(body, list) else [body]:
            try:
                task = Task.model_validate(given)
            except ValidationError as error:
                first = error.errors()[0]
                return problem(422, first["msg"], ".".join(map(str, first["loc"])))
            created = task.task_id not in self.tasks
            if not created and self.tasks[task.task_id] != task:
                return problem(409, f"another task has the id {task.task_id}", "task_id")
            answers.append({"task_id": task.task_id, "created": created, "sessions": task.num_samples})
            if created:
                self.tasks[task.task_id] = task
                self.tell("task", {"task_id": task.task_id})
                if self.at_once:
                    for sample in range(task.num_samples):
                        self.finish(task.task_id, sample)
        return JSONResponse(answers if isinstance(body, list) else answers[0])

    def status(self, task_id: str) -> dict[str, Any]:
        task = self.tasks[task_id]
        done = sum(r["task_id"] == task_id and r["unit"] == "session" for r in self.results)
        state = "cancelled" if task_id in self.cancelled else "done" if done == task.num_samples else "running"
        figures = {"num_samples": task.num_samples, "finished": done, "usable": done, "created": 1.0, "updated": 2.0}
        return {"task_id": task_id, "state": state, **figures}

    async def listing(self, request: Request) -> Response:
        wanted = request.query_params.get("state")
        found = [self.status(name) for name in self.tasks]
        found = [one for one in found if wanted in (None, one["state"])]
        names = [one["task_id"] for one in found]
        start = names.index(request.query_params["after"]) + 1 if "after" in request.query_params else 0
        return JSONResponse(found[start : start + int(request.query_params["limit"])])

    async def task(self, request: Request) -> Response:
        name = request.path_params["id"]
        if name not in self.tasks:
            return problem(404, f"there is no task {name}")
        if request.method == "DELETE":
            self.cancelled.add(name)
        return JSONResponse(self.status(name))

    async def session(self, request: Request) -> Response:
        name = request.path_params["id"]
        if name not in self.trajectories:
            return problem(404, f"there is no session {name}")
        group = self.trajectories[name].group_id
        session = Session(session_id=name, task_id=group, state=SessionState.DONE, end_reason=EndReason.EXITED)
        return JSONResponse(session.model_dump(mode="json"))

    async def trajectory(self, request: Request) -> Response:
        found = self.trajectories.get(request.path_params["id"])
        if found is None:
            return problem(404, "no such trajectory")
        if ARROW in request.headers.get("accept", ""):
            return Response(arrow([found]), media_type=ARROW)
        return Response(found.to_json(), media_type="application/json")

    async def many(self, request: Request) -> Response:
        wanted = (await request.json())["session_ids"]
        return Response(arrow([self.trajectories[w] for w in wanted if w in self.trajectories]), media_type=ARROW)

    async def lease(self, request: Request) -> Response:
        query = await request.json() if request.method == "POST" else request.query_params
        consumer, most, until = query["consumer"], int(query["max"]), time.monotonic() + float(query["wait"])
        bound = int(query["max_staleness"]) if "max_staleness" in query else None
        while True:
            taken, dropped = [], 0
            for result in self.results:
                mark = (consumer, result["result_id"])
                lease = self.leases.get(mark, [0.0, 0])
                if (
                    result["unit"] != query["unit"]
                    or mark in self.acked
                    or lease[0] > time.time()
                    or len(taken) == most
                ):
                    continue
                stale = bound is not None and any(
                    self.version - s["lowest_version"] > bound for s in result["sessions"]
                )
                if stale and query["stale"] == "drop":
                    self.acked.add(mark)
                    dropped += 1
                    continue
                self.leases[mark] = [time.time() + float(query.get("lease", 60)), lease[1] + 1]
                sessions = [{**s, "stale": stale} for s in result["sessions"]]
                taken.append(
                    {**result, "sessions": sessions, "delivery": int(lease[1] + 1), "lease_until": self.leases[mark][0]}
                )
                self.delivered.append((consumer, result["result_id"], int(lease[1] + 1)))
            if taken or dropped or time.monotonic() >= until:
                return JSONResponse({"results": taken, "dropped": dropped, "version": self.version})
            await asyncio.sleep(0.01)

    async def ack(self, request: Request) -> Response:
        body = await request.json()
        while self.acks >= self.most_acks:
            await asyncio.sleep(0.01)
            if await request.is_disconnected():
                return problem(503, "nobody is there any more")
        self.acks += 1
        known = [name for name in body["result_ids"] if (body["consumer"], name) in self.leases]
        self.acked.update((body["consumer"], name) for name in known)
        return JSONResponse({"acked": known, "unknown": [name for name in body["result_ids"] if name not in known]})

    async def stream(self, request: Request) -> Response:
        async def lines() -> Any:
            seen = int(request.headers.get("last-event-id", len(self.events)))
            yield ": hello\n\n"
            while True:
                for event in self.events[seen:]:
                    yield f"id: {event.seq}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"
                    seen = event.seq
                    if "hang up after event" in self.faults:
                        self.faults.remove("hang up after event")
                        return
                await asyncio.sleep(0.01)

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def policy(self, request: Request) -> Response:
        what = request.path_params.get("what", "")
        if what:
            body = await request.json()
            self.paused = what == "pause"
            self.version = body.get("version", self.version)
        return JSONResponse({"version": self.version, "paused": self.paused})

    async def nodes(self, _: Request) -> Response:
        return JSONResponse([{"node": "here", "running": 0}])

    async def healthz(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})


def problem(status: int, error: str, field: str | None = None, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": error, "field": field}, status, headers)


def arrow(trajectories: list[Trajectory]) -> bytes:
    sink = pa.BufferOutputStream()
    empty = to_table(Trajectory, [])
    with pa.ipc.new_stream(sink, empty.schema) as writer:
        for one in trajectories:
            writer.write_table(one.to_arrow())
    return bytes(sink.getvalue())


@contextlib.contextmanager
def serving(stand_in: StandIn, port: int = 0) -> Iterator[str]:
    """The stand-in on a loopback port, in its own thread."""
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(stand_in.app(), log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < until, "the stand-in did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
