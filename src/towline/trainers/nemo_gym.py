"""Towline as an agent server of NeMo Gym.

    NeMo RL, `gym eval run` ──POST /run {row}──▶ this server ──task──▶ Towline ──▶ {row, response, reward}

A row becomes a task of one session by a template (`towline.trainers.templates`). NeMo Gym repeats rows itself, so its groups
are groups of calls, and whoever calls computes their advantages.

| what happened | answer |
|---|---|
| the session was scored, on time or not | 200: the row, `response` with the tokens of every call, `reward`, `towline` |
| the row makes no task; the session has several traces and `extra_traces` is `error` | 422 with the field at fault |
| trained turns were sampled at another temperature than the row asks, or at several | 422 |
| the session's machinery failed, or nobody scored it | 503, which NeMo RL tries again; never a reward of 0 |
| the same, with `failures="mark"` | 200 with `_ng_failure_class`, which `gym eval run` keeps apart from the results |

    python -m towline.trainers.nemo_gym --url http://127.0.0.1:8600 --template task.toml --port 8700
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from towline.client import AsyncClient, ClientError, InvalidRequest
from towline.errors import ConfigError, TowlineError
from towline.schema import Problem, Task
from towline.schema.files import dump_json
from towline.trainers.groups import Group, reward_of, run_group
from towline.trainers.nemo_gym_response import response_of
from towline.trainers.packing import Dropped, ExtraTraces, ExtraTracesError, SplitRow, check_temperature, one_row
from towline.trainers.templates import RowError, TaskTemplate

Row = dict[str, Any]
T = TypeVar("T")
Failures = Literal["error", "mark"]
PARAMS = "responses_create_params"
TASK_INDEX = "_ng_task_index"
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
"""What a row says of sampling, and what a task calls it."""
_LOOK_SECONDS = 1.0
"""How often it is looked whether the caller still waits."""


class SessionFailed(TowlineError):
    """There is nothing to learn from: the machinery failed, or nobody scored the session."""


@dataclass(slots=True)
class Agent:
    """One row in, one session, one result out."""

    client: AsyncClient
    template: TaskTemplate
    extra_traces: ExtraTraces = "error"
    failures: Failures = "error"
    dropped: Dropped = field(default_factory=Dropped)

    def task(self, row: Mapping[str, Any]) -> Task:
        params = row.get(PARAMS)
        if not isinstance(params, dict) or "input" not in params:
            raise RowError("must be an object with `input`", PARAMS)
        prompt = params["input"]
        if params.get("instructions"):
            said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = [{"role": "system", "content": params["instructions"]}, *said]
        task = self.template.task(row, prompt=prompt, name="nemo-gym", samples=1)
        asked = {ours: params[theirs] for theirs, ours in _SAMPLING.items() if params.get(theirs) is not None}
        sampling = task.settings.get("sampling", {}) | asked
        return task.model_copy(update={"settings": task.settings | {"sampling": sampling}, "min_samples": 0})

    async def run(self, row: Row) -> Row:
        """The row with `response` and `reward`."""
        group = await run_group(self.client, self.task(row))
        if not group.sessions:
            return self._failed(row, group)
        (session,) = group.sessions
        kept = one_row(session, self.extra_traces, self.dropped)
        if kept is None:
            raise ExtraTracesError(f"session {session.session_id}: none of its traces is of the main conversation")
        check_temperature(kept, row[PARAMS].get("temperature"))
        return {**row, "response": response_of(kept, row[PARAMS]), "reward": reward_of(session), "towline": _told(kept)}

    def _failed(self, row: Row, group: Group) -> Row:
        ((name, reason),) = group.left.items()
        if self.failures == "error":
            raise SessionFailed(f"session {name} gave nothing to learn from: {reason}")
        empty = {"id": f"resp_{name}", "object": "response", "created_at": 0, "model": "", "output": [], "tools": []}
        return {
            **row,
            "response": {**empty, "parallel_tool_calls": True, "tool_choice": "auto", "status": "failed"},
            # A number that the shape asks for and nobody is to read: both fields below say so.
            "reward": 0.0,
            "_ng_failure_class": "infrastructure",
            "instance_config": {**(row.get("instance_config") or {}), "mask_sample": True},
            "towline": {"session_id": name, "error": reason},
        }


def _told(row: SplitRow) -> dict[str, Any]:
    """What Towline knows of the session and NeMo Gym has no field for."""
    trajectory = row.trajectory
    assert trajectory.reward is not None
    return {
        "session_id": trajectory.session_id,
        "task_id": trajectory.group_id,
        "end_reason": trajectory.end_reason,
        "reward_components": trajectory.reward.components,
        "lowest_version": row.trace.lowest_version,
        "traces": len(trajectory.traces),
        "dropped_tokens": trajectory.report.trained_tokens - row.trace.trained_tokens,
    }


def means(answers: list[Row]) -> dict[str, Any]:
    """What NeMo Gym asks for once all rows have been run: mean rewards, over all and for each task."""
    tasks: dict[int, list[float]] = {}
    for answer in answers:
        if "_ng_failure_class" not in answer:
            tasks.setdefault(answer.get(TASK_INDEX, 0), []).append(float(answer["reward"]))
    rewards = [reward for task in tasks.values() for reward in task]
    overall = {"mean/reward": sum(rewards) / len(rewards)} if rewards else {}
    of_each = [{TASK_INDEX: index, "mean/reward": sum(task) / len(task)} for index, task in sorted(tasks.items())]
    return {"group_level_metrics": of_each, "agent_metrics": overall, "key_metrics": overall}


def make_app(
    template: TaskTemplate,
    url: str | None = None,
    *,
    extra_traces: ExtraTraces = "error",
    failures: Failures = "error",
) -> FastAPI:
    """The server over the Towline service at `url`; `TOWLINE_URL` and `TOWLINE_KEY` by default."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncClient(url) as client:
            app.state.agent = Agent(client, template, extra_traces, failures)
            yield

    app = FastAPI(title="Towline for NeMo Gym", lifespan=lifespan)

    async def alive() -> dict[str, str]:
        return {"status": "ok"}

    async def run(row: Row, request: Request) -> Response:
        return _json(await _while_wanted(request.app.state.agent.run(row), request))

    async def responses(params: Row, request: Request) -> Response:
        """The session without the rest of the row."""
        return _json((await _while_wanted(request.app.state.agent.run({PARAMS: params}), request))["response"])

    async def aggregate_metrics(body: dict[str, list[Row]]) -> dict[str, Any]:
        return means(body["verify_responses"])

    app.get("/")(alive)
    app.post("/run", response_model=None)(run)
    app.post("/v1/responses", response_model=None)(responses)
    app.post("/aggregate_metrics")(aggregate_metrics)
    refused = (RowError, InvalidRequest, ExtraTracesError, ConfigError)
    for kind, status in (*((kind, 422) for kind in refused), (SessionFailed, 503)):
        app.add_exception_handler(kind, _problem(status))
    app.add_exception_handler(ClientError, _problem(503))
    return app


def _json(value: Any) -> Response:
    return Response(dump_json(value), media_type="application/json")


def _problem(status: int) -> Any:
    async def answer(request: Request, error: Exception) -> Response:
        return JSONResponse(Problem(error=str(error), field=getattr(error, "field", None)).model_dump(), status)

    return answer


async def _while_wanted(work: Coroutine[Any, Any, T], request: Request) -> T:
    """Do the work unless its caller goes away: a session that nobody waits for is ended."""
    doing = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({doing}, timeout=_LOOK_SECONDS))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "the caller has gone")
    finally:
        if not doing.done():
            doing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await doing
    return doing.result()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m towline.trainers.nemo_gym", description="Towline as an agent of NeMo Gym."
    )
    parser.add_argument("--url", help="the Towline service; TOWLINE_URL by default, and TOWLINE_KEY is its key")
    parser.add_argument("--template", type=Path, required=True, help="the task that a row becomes, in TOML or JSON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8700, help="0 takes a free one; the URL is printed")
    parser.add_argument("--extra-traces", choices=get_args(ExtraTraces), default="error")
    parser.add_argument("--failures", choices=get_args(Failures), default="error")
    given = parser.parse_args(arguments)
    try:
        app = make_app(
            TaskTemplate.read(given.template), given.url, extra_traces=given.extra_traces, failures=given.failures
        )
        listener = socket.create_server((given.host, given.port), backlog=2048)
    except (ConfigError, OSError) as error:
        sys.exit(f"towline: {error}")
    with listener:
        print(f"http://{given.host}:{listener.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
