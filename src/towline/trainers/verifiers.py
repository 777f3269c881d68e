"""verifiers: an environment whose episodes are Towline's sessions, for prime-rl and everything else that plays verifiers'.

    # my_env.py; then env.id = "my-env", with any taskset
    from towline.trainers.verifiers import towline_env

    TowlineEnv = towline_env("task.toml")
    __all__ = ["TowlineEnv"]

A task's data is the row that a task template names fields of. An episode is one session and has one `Trace`, whose branches
are the session's rows: nodes of different rows are not shared, so that a turn which two of them hold is trained in one, as
Towline decides. What is not sampled by a call stands before its sampled tokens, on the same node, so that a branch is its
row, token for token. Advantages are computed by whoever runs the episodes, and an episode is one sample.

A session that nobody may learn from is an episode without traces and with an error, and is tried again by verifiers' rules.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from towline.client import AsyncClient
from towline.errors import TowlineError
from towline.schema import EndReason, Trajectory
from towline.schema.checks import runs
from towline.trainers.groups import reward_of, run_group
from towline.trainers.packing import SplitRow, check_temperature, split_rows
from towline.trainers.templates import TaskTemplate

Node = dict[str, Any]
_STOPS = {EndReason.LIMIT: "max_turns", EndReason.TIMEOUT: "agent_timeout", EndReason.LOOPING: "looping"}
_SAMPLING = ("temperature", "top_p", "max_tokens")


def trace_fields(trajectory: Trajectory, temperature: float | None = None) -> dict[str, Any]:
    """The fields of a `Trace` that a session gives; its task and agent are the environment's to say.

    A branch has one temperature: rows that mix several, or were not sampled at `temperature`, are refused.
    """
    nodes: list[Node] = []
    for row in split_rows(trajectory):
        check_temperature(row, temperature)
        nodes += _branch(row, len(nodes))
    reward = trajectory.reward
    return {
        "id": trajectory.session_id,
        "nodes": nodes,
        "rewards": {"towline": {"score": reward_of(trajectory)}},
        "metrics": dict(reward.components) if reward is not None else {},
        "info": {"towline": {"session_id": trajectory.session_id, "task_id": trajectory.group_id}},
        "is_completed": True,
        "ok": True,
        "is_timeout": trajectory.end_reason is EndReason.TIMEOUT,
        "stop_condition": _STOPS.get(trajectory.end_reason or EndReason.EXITED, "agent_completed"),
    }


def _branch(row: SplitRow, first: int) -> list[Node]:
    """One row as a chain of nodes, the first of which will be the trace's `first`."""
    trace = row.trace
    by_index = {turn.index: turn for turn in row.trajectory.turns}
    since = {turn.index: messages for turn, messages in row.trajectory.row_turns(trace)}
    nodes: list[Node] = []

    def add(message: Mapping[str, Any], **fields: Any) -> None:
        nodes.append({"parent": first + len(nodes) - 1 if nodes else None, "message": _message(message), **fields})

    context = 0
    for index, start, end in runs(trace.turn_ids):
        if index < 0:
            continue
        turn = by_index[index]
        for message in since.get(index, turn.messages):
            add(message)
        trained = bool(trace.loss_mask[start:end].all())
        add(
            {**turn.reply, "role": "assistant"},
            sampled=True,
            token_ids=trace.token_ids[context:end].tolist(),
            mask=[False] * (start - context) + [trained] * (end - start),
            logprobs=trace.logprobs[start:end].tolist() if trained else [],
        )
        context = end
    return nodes


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, text = message["role"], str(message.get("text") or "")
    if role == "tool":
        return {"role": role, "tool_call_id": str(message.get("tool_call_id") or ""), "content": text}
    if role != "assistant":
        return {"role": role, "content": text}
    calls = [
        {
            "id": call["id"],
            "type": "custom" if call.get("custom") else "function",
            "name": call["name"],
            "arguments": call["arguments"] if isinstance(call["arguments"], str) else json.dumps(call["arguments"]),
        }
        for call in message.get("tool_calls") or []
    ]
    said = {"role": role, "content": text or None, "reasoning_content": message.get("reasoning") or None}
    return said | ({"tool_calls": calls} if calls else {})


class Episodes:
    """The part of the environment that is not verifiers'."""

    template: TaskTemplate
    url: str | None
    config: Any

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Nothing of verifiers' own has to run meanwhile: harnesses are Towline's, and so is the endpoint they call."""
        yield

    async def run_episode(self, task: Any, ctx: Any, *, on_trace: Any = None, on_discard: Any = None) -> Any:
        """One session. The signature is that of verifiers' `Env`."""
        kinds, traces = (importlib.import_module(f"verifiers.v1.{name}") for name in ("episode", "trace"))
        about = traces.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = kinds.Episode(env=kinds.EnvInfo(id=self.config.env_id), task=about)
        try:
            async with AsyncClient(self.url) as client:
                group = await run_group(client, self._task(task, ctx))
        except TowlineError as error:
            episode.errors.append(traces.Error(type=type(error).__name__, message=str(error)))
            return episode
        for session in group.sessions:
            agent = traces.AgentInfo(config=self.config.agent)
            trace = traces.Trace(
                task=about, agent=agent, **trace_fields(session, getattr(ctx.sampling, "temperature", None))
            )
            episode.traces.append(trace)
            if on_trace is not None:
                on_trace(trace)
        for reason in group.left.values():
            episode.errors.append(traces.Error(type="SessionFailed", message=reason))
        episode.ok = bool(episode.traces)
        return episode

    def _task(self, task: Any, ctx: Any) -> Any:
        row = task.data.model_dump(mode="json")
        prompt = row.get("prompt")
        if row.get("system_prompt"):
            said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
            prompt = [{"role": "system", "content": row["system_prompt"]}, *said]
        made = self.template.task(row, prompt=prompt, name="verifiers", samples=1)
        asked = {name: getattr(ctx.sampling, name, None) for name in _SAMPLING}
        sampling = {name: value for name, value in asked.items() if value is not None}
        settings = made.settings | {"sampling": made.settings.get("sampling", {}) | sampling}
        return made.model_copy(update={"settings": settings})


def towline_env(template: TaskTemplate | Path | str, url: str | None = None) -> type:
    """An environment class for verifiers; `TOWLINE_URL` and `TOWLINE_KEY` say where the service is if `url` does not."""
    base = importlib.import_module("verifiers.v1.envs.single_agent").SingleAgentEnv
    read = template if isinstance(template, TaskTemplate) else TaskTemplate.read(template)
    return type("TowlineEnv", (Episodes, base), {"template": read, "url": url, "__doc__": __doc__})
