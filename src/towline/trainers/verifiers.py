"""verifiers: an environment whose episodes are Towline sessions, for prime-rl and other users of verifiers environments.

    # my_env.py; then env.id = "my-env", with any taskset
    from towline.trainers.verifiers import towline_env

    TowlineEnv = towline_env("task.toml")
    __all__ = ["TowlineEnv"]

A task's data is the row that a task template references. An episode is one session and has one `Trace`, whose branches are
the session's rows. Rows share no nodes, so a turn that two of them contain is trained in only one, as Towline decides. A
turn's context tokens precede its sampled tokens on the same node, so that a branch is its row, token for token. The runner
of the episodes computes advantages; an episode is one sample.

An unusable session is an episode without traces and with an error; verifiers retries it by its own rules.
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
from towline.trainers.packing import SplitRow, check_temperature, reward_of, run_group, split_rows
from towline.trainers.templates import TaskTemplate, with_sampling, with_system_prompt

TraceNode = dict[str, Any]
_STOPS = {EndReason.LIMIT: "max_turns", EndReason.TIMEOUT: "agent_timeout", EndReason.LOOPING: "looping"}
_SAMPLING = ("temperature", "top_p", "max_tokens")


def trace_fields(trajectory: Trajectory, temperature: float | None = None) -> dict[str, Any]:
    """The fields of a `Trace` that come from a session; the environment sets its task and agent.

    A branch has one temperature: rows that were not all sampled at `temperature` are refused.
    """
    nodes: list[TraceNode] = []
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


def _branch(row: SplitRow, first: int) -> list[TraceNode]:
    """One row as a chain of nodes, the first of which has index `first` in the trace."""
    trace = row.trace
    by_index = {turn.index: turn for turn in row.trajectory.turns}
    since = {turn.index: messages for turn, messages in row.trajectory.row_turns(trace)}
    nodes: list[TraceNode] = []

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
    reply = {"role": role, "content": text or None, "reasoning_content": message.get("reasoning") or None}
    return reply | ({"tool_calls": calls} if calls else {})


class SessionEpisodes:
    """The environment without verifiers' base class."""

    template: TaskTemplate
    url: str | None
    config: Any

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """No-op: Towline runs the harnesses and the endpoint they call."""
        yield

    async def run_episode(self, task: Any, ctx: Any, *, on_trace: Any = None, on_discard: Any = None) -> Any:
        """Run one session. The signature is that of verifiers' `Env`."""
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
        for reason in group.unusable.values():
            episode.errors.append(traces.Error(type="SessionFailed", message=reason))
        episode.ok = bool(episode.traces)
        return episode

    def _task(self, task: Any, ctx: Any) -> Any:
        row = task.data.model_dump(mode="json")
        prompt = with_system_prompt(row.get("prompt"), row.get("system_prompt"))
        made = self.template.task(row, prompt=prompt, name="verifiers", samples=1)
        return with_sampling(made, {name: getattr(ctx.sampling, name, None) for name in _SAMPLING})


def towline_env(template: TaskTemplate | Path | str, url: str | None = None) -> type:
    """An environment class for verifiers. The service defaults to `TOWLINE_URL` and `TOWLINE_KEY`."""
    base = importlib.import_module("verifiers.v1.envs.single_agent").SingleAgentEnv
    fields = {"template": TaskTemplate.read(template), "url": url, "__doc__": __doc__}
    return type("TowlineEnv", (SessionEpisodes, base), fields)


# The stable names of these for users' code.
Episodes = SessionEpisodes
