"""From a session's graph to its trajectory: turns, rows, the fidelity report and the notes.

The report counts what is trained and what is not; the notes name in sentences what a reader of the training signal must
know: tokens that stay untrained, and roots that match no conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from towline.common.arrays import Ids
from towline.conversation import Message, Reply
from towline.schema import (
    POLICY,
    TRAINED_ROLES,
    BuilderName,
    ContextPolicy,
    EndReason,
    FidelityReport,
    ForkReason,
    SessionState,
    Trace,
    Trajectory,
    Turn,
    TurnRole,
    Untrained,
)
from towline.tokens.continuation.plan import CALLS_AS_TEXT
from towline.tokens.graph import roles
from towline.tokens.graph.graph import Graph, GraphNode
from towline.tokens.graph.roles import RoleAssignment
from towline.tokens.traces import builders
from towline.tokens.traces.builders import is_inline
from towline.tokens.traces.plain_difference import MAX_NAMED_TURNS, plain_difference, stitched_difference

_MAX_NAMED = 5
"""Maximum number of turns that the notes name; the others are counted."""


_MAIN = (TurnRole.MAIN, TurnRole.COMPACTION)
END_OF_TURN = "end_of_turn"
"""Why the last tokens of a turn are not trained: the harness appended text to the reply."""


def trained_tokens(traces: Sequence[Trace]) -> dict[int, int]:
    """Trained tokens per turn, by the turn's index."""
    trained: dict[int, int] = {}
    for trace in traces:
        indices, sizes = np.unique(trace.turn_ids[trace.loss_mask == 1], return_counts=True)
        for index, size in zip(indices.tolist(), sizes.tolist(), strict=True):
            trained[index] = trained.get(index, 0) + size
    return trained


_UNPROVEN = (
    "the engine's logprobs are not shown to be those of the distribution that was sampled from; start vLLM with "
    "--logprobs-mode processed_logprobs, or sample at temperature 1 without top_p and top_k"
)


def training_counts(
    nodes: Sequence[GraphNode], roles: Mapping[GraphNode, TurnRole], trained: Mapping[int, int]
) -> dict[str, Any]:
    """The fields of the fidelity report about trained and untrained tokens."""
    untrained: dict[str, int] = {}
    for node in nodes:
        left = len(node.sampled) - trained.get(node.index, 0)
        if node.engine == POLICY and left > 0:
            why = END_OF_TURN if trained.get(node.index) else str(node.untrained or roles[node])
            untrained[why] = untrained.get(why, 0) + left
    return {
        "untrained_tokens": untrained,
        "main_tokens": sum(trained.get(node.index, 0) for node in nodes if roles[node] in _MAIN),
        "unmatched": sum(node.reason is ForkReason.UNMATCHED for node in nodes),
    }


def training_notes(
    nodes: Sequence[GraphNode], roles: Mapping[GraphNode, TurnRole], report: FidelityReport
) -> list[str]:
    """Sentences about the training signal that a reader must know: untrained tokens, unmatched roots."""
    notes: list[str] = []
    left = report.untrained_tokens
    if left:
        total = sum(left.values())
        whole = sum(len(node.sampled) for node in nodes if node.engine == POLICY)
        why = ", ".join(f"{name} {count:,}" for name, count in sorted(left.items()))
        notes.append(f"{total:,} of {whole:,} sampled tokens are not trained: {why}")
    unproven = sum(node.untrained is Untrained.LOGPROBS for node in nodes)
    if unproven:
        notes.append(f"{unproven:,} turns are in no row: {_UNPROVEN}")
    others = report.trained_tokens - report.main_tokens
    if others > report.main_tokens:
        notes.append(f"main trains {report.main_tokens:,} tokens, the other roles {others:,}")
    unmatched = [node for node in nodes if node.reason is ForkReason.UNMATCHED]
    notes += [_unmatched(node, roles[node]) for node in unmatched[:_MAX_NAMED]]
    if len(unmatched) > _MAX_NAMED:
        notes.append(f"{len(unmatched) - _MAX_NAMED:,} further requests match no conversation")
    return notes


def _unmatched(node: GraphNode, role: TurnRole) -> str:
    what = node.difference
    note = f"turn {node.index} ({role}) matches no conversation"
    if not what:
        return note
    return (
        f"{note}: message {what['message']} differs from turn {what['turn']}: {what['was']!r} became {what['sent']!r}"
    )


def message_json(message: Message) -> dict[str, Any]:
    """A neutral message without its empty fields."""
    fields: dict[str, Any] = {"role": message.role, "text": message.text}
    for name in ("reasoning", "tool_call_id", "name"):
        if getattr(message, name):
            fields[name] = getattr(message, name)
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments, "custom": call.custom}
            for call in message.tool_calls
        ]
    if message.media:
        fields["media"] = [{"kind": m.kind, "digest": m.digest, "offset": m.offset} for m in message.media]
    return fields


def reply_json(reply: Reply | None) -> dict[str, Any]:
    if reply is None:
        return {}
    fields = message_json(reply.as_message())
    fields["finish"] = reply.finish.value
    if reply.malformed:
        fields["malformed"] = list(reply.malformed)
    return fields


def assemble_trajectory(
    graph: Graph,
    *,
    session_id: str,
    group_id: str = "",
    builder: BuilderName = BuilderName.EXACT,
    policy: ContextPolicy = ContextPolicy.RETAIN,
    instruction: str | Sequence[str] = "",
    trained: Collection[TurnRole] = TRAINED_ROLES,
    ends: frozenset[int] = frozenset(),
    state: SessionState = SessionState.DONE,
    end_reason: EndReason | None = None,
    error: str | None = None,
    plain_prompts: Mapping[GraphNode, Ids] | None = None,
    **fields: Any,
) -> Trajectory:
    """The trajectory of a session. `plain_prompts` are a plain server's prompts of some turns, to measure the difference."""
    parts = roles.assign_roles(graph, instruction)
    by_node = {node: part.role for node, part in parts.items()}
    nodes = [node for node in graph.nodes if node in by_node]
    traces = builders.build_traces(
        graph, by_node, builder, rollout_id=session_id, group_id=group_id or session_id, trained=trained, ends=ends
    )
    if not any(trace.loss_mask.any() for trace in traces) and error is None:
        error = _nothing_trained(nodes)
    difference = (
        stitched_difference(traces, nodes) if builder is BuilderName.MERGED else plain_difference(plain_prompts or {})
    )
    trained_by_turn = trained_tokens(traces)
    unended = {n: len(n.sampled) - t for n in nodes if 0 < (t := trained_by_turn.get(n.index, 0)) < len(n.sampled)}
    report = FidelityReport(
        conversations=len({node.root for node in nodes}),
        turns=len(nodes),
        chains=len(traces),
        forks=builders.fork_counts(nodes),
        forced_closes=sum(node.forced > 0 for node in nodes),
        row_tokens=sum(len(trace.token_ids) for trace in traces),
        distinct_tokens=builders.distinct_tokens([trace.token_ids for trace in traces]),
        trained_tokens=sum(int(trace.loss_mask.sum()) for trace in traces),
        discarded_tokens=sum(len(node.sampled) for node in nodes if by_node[node] is TurnRole.DISCARDED),
        plain_difference=difference.share,
        plain_different=len(difference.turns),
        plain_different_turns=list(difference.turns)[:MAX_NAMED_TURNS],
        special_text=sum(node.special_text for node in nodes),
        calls_as_text=sum(CALLS_AS_TEXT in node.flags for node in nodes),
        malformed_calls=sum(len(node.reply.malformed) for node in nodes if node.reply is not None),
        frozen_turns=sum(node.untrained is Untrained.FROZEN for node in nodes),
        unknown_prompts=sum(node.untrained is Untrained.PROMPT_UNKNOWN for node in nodes),
        images=sum(len(trace.images) for trace in traces),
        mixed_cache=sum(int(node.meta.get("mixed_cache", 0)) for node in nodes),
        **training_counts(nodes, by_node, trained_by_turn),
    )
    metadata = dict(fields.pop("metadata", {}))
    if added := training_notes(nodes, by_node, report):
        given = metadata.get("notes", [])
        metadata["notes"] = [*(given if isinstance(given, list) else [given]), *added]
    return Trajectory(
        session_id=session_id,
        group_id=group_id or session_id,
        context_policy=policy,
        builder=builder,
        trained_roles=list(trained),
        turns=[turn_record(node, parts[node], unended.get(node, 0)) for node in nodes],
        traces=traces,
        images={image.media.digest: image.media.url for node in nodes for image in node.images if is_inline(image)},
        state=state,
        end_reason=end_reason,
        error=error,
        report=report,
        metadata=metadata,
        **fields,
    )


def _nothing_trained(nodes: Sequence[GraphNode]) -> str:
    """Why a session has no trained token."""
    if not nodes:
        return "no model call was captured"
    if all(node.untrained is Untrained.LOGPROBS for node in nodes):
        return _UNPROVEN
    if all(node.untrained is Untrained.FROZEN for node in nodes):
        return "every model call went to a frozen engine; map a model to the policy in session.models"
    return "no token of a trained role was sampled"


def turn_record(node: GraphNode, part: RoleAssignment, unended: int = 0) -> Turn:
    meta = node.meta
    return Turn(
        id=node.id,
        index=node.index,
        parent=node.parent.id if node.parent else None,
        # A turn in flight is not part of the trajectory yet.
        origin=node.origin.id if node.origin is not None and node.origin.finish is not None else None,
        origin_inferred=node.origin_inferred,
        reason=node.reason,
        role=part.role,
        role_reason=part.reason,
        difference=node.difference,
        unended=unended,
        prompt_length=node.prompt_length,
        suffix=node.suffix,
        sampled=node.sampled,
        logprobs=node.logprobs,
        versions=node.versions,
        finish=str(node.finish or ""),
        forced_close=node.forced > 0,
        delivered=node.delivered,
        flags=node.flags,
        dialect=meta.get("dialect", ""),
        model=node.model,
        temperature=meta.get("temperature", 1.0),
        top_p=meta.get("top_p", 1.0),
        top_k=meta.get("top_k", 0),
        requested=meta.get("requested", {}),
        overridden=meta.get("overridden", []),
        ignored=meta.get("ignored", []),
        messages=[message_json(message) for message in node.new],
        tools_key=node.key,
        engine=node.engine,
        untrained=node.untrained,
        images=[builders.image_record(image, node.prompt_length - len(node.suffix)) for image in node.images],
        reply=reply_json(node.reply),
        cached_tokens=meta.get("cached_tokens", 0),
        mixed_cache=meta.get("mixed_cache", 0),
        started=meta.get("started", 0.0),
        seconds=meta.get("seconds", 0.0),
    )
