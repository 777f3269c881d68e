"""NeMo Gym: Towline as an agent server.

    NeMo RL, `gym eval run` ──POST /run {row}──▶ this server ──task──▶ Towline ──▶ {row, response, reward}

A row becomes a task of one session by a template (`towline.trainers.templates`). NeMo Gym repeats rows itself, so its
groups are groups of calls, and the caller computes their advantages.

| outcome | answer |
|---|---|
| the session was scored, even if it timed out | 200: the row, `response` with every turn's tokens, `reward`, `towline` |
| the row is invalid; the session has several traces and `extra_traces` is `error` | 422 with the invalid field |
| trained turns were sampled at another temperature than the row's, or at several | 422 |
| infrastructure failed, or the session was not scored | 503, which NeMo RL retries; never a reward of 0 |
| the same, with `failures="mark"` | 200 with `_ng_failure_class`, which `gym eval run` keeps apart from the results |

    python -m towline.trainers.nemo_gym --url http://127.0.0.1:8600 --template task.toml --port 8700

The `response` holds the conversation's items in the shape of OpenAI's Responses API. The last item of each turn carries the
turn's tokens: `prompt_token_ids` (everything before), `generation_token_ids` and `generation_log_probs`. They are slices of
one exact row, so each prompt starts with the previous prompt and generation, token for token; NeMo RL checks that. A turn
that the row does not train carries no tokens: they are part of the next prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
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
from towline.common.sockets import listen, url_of
from towline.errors import ConfigError
from towline.schema import Problem, Task, Trajectory, Turn
from towline.schema.checks import runs
from towline.schema.files import dump_json
from towline.trainers import packing
from towline.trainers.packing import SessionFailed
from towline.trainers.templates import RowError, TaskTemplate, with_sampling, with_system_prompt

Item = dict[str, Any]


def response_of(row: packing.SplitRow, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to `asked`, the row's `responses_create_params`."""
    trajectory = row.trajectory
    incomplete = packing.ended_early(trajectory)
    return {
        "id": f"resp_{trajectory.session_id}",
        "object": "response",
        "created_at": trajectory.created,
        "model": asked.get("model") or next((turn.model for turn in trajectory.turns), ""),
        "status": "incomplete" if incomplete else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
        "instructions": asked.get("instructions"),
        "metadata": asked.get("metadata"),
        "output": output_items(row),
        "parallel_tool_calls": asked.get("parallel_tool_calls", True),
        "temperature": packing.row_temperature(row),
        "top_p": row.trace.top_p,
        "tool_choice": "auto",
        "tools": _tools(trajectory, row),
        "usage": _usage(row),
    }


def output_items(row: packing.SplitRow) -> list[Item]:
    by_index = {turn.index: turn for turn in row.trajectory.turns}
    since = {turn.index: messages for turn, messages in row.trajectory.row_turns(row.trace)}
    tokens, trace = row.trace.token_ids, row.trace
    items: list[Item] = []
    for index, start, end in runs(trace.turn_ids):
        if index < 0:
            continue
        turn = by_index[index]
        # The input of the first turn is the row's own.
        items += (
            [_harness_item(message, turn, number) for number, message in enumerate(since.get(index, turn.messages))]
            if items
            else []
        )
        items += _reply_items(turn)
        if trace.loss_mask[start:end].all():
            items[-1] |= {
                "prompt_token_ids": tokens[:start].tolist(),
                "generation_token_ids": tokens[start:end].tolist(),
                "generation_log_probs": trace.logprobs[start:end].tolist(),
            }
    return items


def _harness_item(message: Mapping[str, Any], turn: Turn, number: int) -> Item:
    """A message that the harness added to the conversation."""
    text = str(message.get("text") or "")
    if message["role"] == "tool":
        return {"type": "function_call_output", "call_id": str(message.get("tool_call_id") or ""), "output": text}
    if message["role"] == "assistant":
        return _message(f"msg_{turn.id}_{number}", text)
    return {"type": "message", "role": message["role"], "content": text}


def _reply_items(turn: Turn) -> list[Item]:
    """The model's reply in one turn: at least one item."""
    reply = turn.reply
    items: list[Item] = []
    if reply.get("reasoning"):
        summary = [{"type": "summary_text", "text": reply["reasoning"]}]
        items.append({"type": "reasoning", "id": f"rs_{turn.id}", "summary": summary})
    calls = reply.get("tool_calls") or []
    if reply.get("text") or not calls:
        items.append(_message(f"msg_{turn.id}", str(reply.get("text") or "")))
    for call in calls:
        arguments = call["arguments"]
        if call.get("custom"):
            arguments = {"input": arguments}
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{turn.id}_{call['id']}",
                "call_id": call["id"],
                "name": call["name"],
                "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
                "status": "completed",
            }
        )
    return items


def _message(name: str, text: str) -> Item:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": name, "role": "assistant", "status": "completed", "content": content}


def _tools(trajectory: Trajectory, row: packing.SplitRow) -> list[Item]:
    """The tools that the harness declared in the row's last turn."""
    last = next(turn for turn in trajectory.turns if turn.index == int(row.trace.turn_ids.max()))
    return [
        {
            "type": "function",
            "name": tool["function"]["name"],
            "description": tool["function"].get("description") or None,
            "parameters": tool["function"].get("parameters") or {},
            "strict": False,
        }
        for tool in trajectory.tools.get(last.tools_key, [])
    ]


def _usage(row: packing.SplitRow) -> dict[str, Any]:
    """Token counts of the row's turns, as a provider would bill them."""
    indices = {int(index) for index in row.trace.turn_ids if index >= 0}
    turns = [turn for turn in row.trajectory.turns if turn.index in indices]
    prompt, sampled = sum(turn.prompt_length for turn in turns), sum(len(turn.sampled) for turn in turns)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": sum(turn.cached_tokens for turn in turns)},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


GymRow = dict[str, Any]
T = TypeVar("T")
Failures = Literal["error", "mark"]
PARAMS = "responses_create_params"
TASK_INDEX = "_ng_task_index"
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
"""A row's sampling parameters and their names in a task."""
_DISCONNECT_POLL_SECONDS = 1.0
"""Interval of the check for a disconnected caller."""


@dataclass(slots=True)
class Agent:
    """Runs one session per row."""

    client: AsyncClient
    template: TaskTemplate
    extra_traces: packing.ExtraTraces = "error"
    failures: Failures = "error"
    dropped: packing.Dropped = field(default_factory=packing.Dropped)

    def task(self, row: Mapping[str, Any]) -> Task:
        params = row.get(PARAMS)
        if not isinstance(params, dict) or "input" not in params:
            raise RowError("must be an object with `input`", PARAMS)
        prompt = with_system_prompt(params["input"], params.get("instructions"))
        task = self.template.task(row, prompt=prompt, name="nemo-gym", samples=1)
        sampling = {ours: params.get(theirs) for theirs, ours in _SAMPLING.items()}
        return with_sampling(task, sampling, min_samples=0)

    async def run(self, row: GymRow) -> GymRow:
        """The row with `response` and `reward`."""
        group = await packing.run_group(self.client, self.task(row))
        if not group.sessions:
            return self._failed(row, group)
        (session,) = group.sessions
        kept = packing.one_row(session, self.extra_traces, self.dropped)
        if kept is None:
            raise packing.ExtraTracesError(f"session {session.session_id} has no trace of the main conversation")
        packing.check_temperature(kept, row[PARAMS].get("temperature"))
        return {
            **row,
            "response": response_of(kept, row[PARAMS]),
            "reward": packing.reward_of(session),
            "towline": _session_facts(kept),
        }

    def _failed(self, row: GymRow, group: packing.TrainingGroup) -> GymRow:
        ((name, reason),) = group.unusable.items()
        if self.failures == "error":
            raise SessionFailed(f"session {name} is not usable for training: {reason}")
        empty = {"id": f"resp_{name}", "object": "response", "created_at": 0, "model": "", "output": [], "tools": []}
        return {
            **row,
            "response": {**empty, "parallel_tool_calls": True, "tool_choice": "auto", "status": "failed"},
            # Required by the format, but not to be read: both fields below say so.
            "reward": 0.0,
            "_ng_failure_class": "infrastructure",
            "instance_config": {**(row.get("instance_config") or {}), "mask_sample": True},
            "towline": {"session_id": name, "error": reason},
        }


def _session_facts(row: packing.SplitRow) -> dict[str, Any]:
    """Session facts for which NeMo Gym has no field."""
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


def means(answers: list[GymRow]) -> dict[str, Any]:
    """Mean rewards overall and per task, which NeMo Gym requests after all rows have run."""
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
    extra_traces: packing.ExtraTraces = "error",
    failures: Failures = "error",
) -> FastAPI:
    """The agent server for the Towline service at `url`, by default that of `TOWLINE_URL` and `TOWLINE_KEY`."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncClient(url) as client:
            app.state.agent = Agent(client, template, extra_traces, failures)
            yield

    app = FastAPI(title="Towline for NeMo Gym", lifespan=lifespan)

    async def alive() -> dict[str, str]:
        return {"status": "ok"}

    async def run(row: GymRow, request: Request) -> Response:
        return _json(await _unless_disconnected(request.app.state.agent.run(row), request))

    async def responses(params: GymRow, request: Request) -> Response:
        """The response alone, without the rest of the row."""
        return _json((await _unless_disconnected(request.app.state.agent.run({PARAMS: params}), request))["response"])

    async def aggregate_metrics(body: dict[str, list[GymRow]]) -> dict[str, Any]:
        return means(body["verify_responses"])

    app.get("/")(alive)
    app.post("/run", response_model=None)(run)
    app.post("/v1/responses", response_model=None)(responses)
    app.post("/aggregate_metrics")(aggregate_metrics)
    refused = (RowError, InvalidRequest, packing.ExtraTracesError, ConfigError)
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


async def _unless_disconnected(work: Coroutine[Any, Any, T], request: Request) -> T:
    """Await the work; cancel it, and with it the session, if the caller disconnects."""
    running = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({running}, timeout=_DISCONNECT_POLL_SECONDS))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "the caller has disconnected")
    finally:
        if not running.done():
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    return running.result()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m towline.trainers.nemo_gym", description="Towline as an agent of NeMo Gym."
    )
    parser.add_argument("--url", help="URL of the Towline service (default: TOWLINE_URL); its key is TOWLINE_KEY")
    parser.add_argument("--template", type=Path, required=True, help="task template for rows, in TOML or JSON")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8700, help="port; 0 picks a free one (default: 8700)")
    parser.add_argument(
        "--extra-traces", choices=get_args(packing.ExtraTraces), default="error", help="sessions with several traces"
    )
    parser.add_argument("--failures", choices=get_args(Failures), default="error", help="sessions without a score")
    given = parser.parse_args(arguments)
    try:
        app = make_app(
            TaskTemplate.read(given.template), given.url, extra_traces=given.extra_traces, failures=given.failures
        )
        listener = listen(given.host, given.port)
    except ConfigError as error:
        sys.exit(f"towline: {error}")
    with listener:
        print(url_of(listener, given.host), flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
