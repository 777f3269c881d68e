"""From a session's graph to its trajectory: turns, rows and the fidelity report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from towline.arrays import Ids
from towline.conversation import Message, Reply
from towline.schema import (
    TRAINED_ROLES,
    BuilderName,
    ContextPolicy,
    EndReason,
    FidelityReport,
    SessionState,
    Trajectory,
    Turn,
    TurnRole,
    Untrained,
)
from towline.tokens import builders, notes, roles
from towline.tokens.builders import is_inline
from towline.tokens.graph import Graph, Node
from towline.tokens.plain_difference import MOST_NAMED, plain_difference, stitched_difference
from towline.tokens.plan import CALLS_AS_TEXT
from towline.tokens.roles import Part


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


def assemble(
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
    plain_prompts: Mapping[Node, Ids] | None = None,
    **fields: Any,
) -> Trajectory:
    """`plain_prompts` gives what a plain server would have rendered for some turns, to measure the difference."""
    parts = roles.assign(graph, instruction)
    by_node = {node: part.role for node, part in parts.items()}
    nodes = [node for node in graph.nodes if node in by_node]
    traces = builders.build(
        graph, by_node, builder, rollout_id=session_id, group_id=group_id or session_id, trained=trained, ends=ends
    )
    if not any(trace.loss_mask.any() for trace in traces) and error is None:
        error = _nothing_trained(nodes)
    difference = (
        stitched_difference(traces, nodes) if builder is BuilderName.MERGED else plain_difference(plain_prompts or {})
    )
    trained_by_turn = notes.trained_tokens(traces)
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
        plain_different_turns=list(difference.turns)[:MOST_NAMED],
        special_text=sum(node.special_text for node in nodes),
        calls_as_text=sum(CALLS_AS_TEXT in node.flags for node in nodes),
        malformed_calls=sum(len(node.reply.malformed) for node in nodes if node.reply is not None),
        frozen_turns=sum(node.untrained is Untrained.FROZEN for node in nodes),
        unknown_prompts=sum(node.untrained is Untrained.PROMPT_UNKNOWN for node in nodes),
        images=sum(len(trace.images) for trace in traces),
        **notes.counts(nodes, by_node, trained_by_turn),
    )
    metadata = dict(fields.pop("metadata", {}))
    if said := notes.about(nodes, by_node, report):
        given = metadata.get("notes", [])
        metadata["notes"] = [*(given if isinstance(given, list) else [given]), *said]
    return Trajectory(
        session_id=session_id,
        group_id=group_id or session_id,
        context_policy=policy,
        builder=builder,
        trained_roles=list(trained),
        turns=[turn_of(node, parts[node], unended.get(node, 0)) for node in nodes],
        traces=traces,
        images={image.media.digest: image.media.url for node in nodes for image in node.images if is_inline(image)},
        state=state,
        end_reason=end_reason,
        error=error,
        report=report,
        metadata=metadata,
        **fields,
    )


def _nothing_trained(nodes: Sequence[Node]) -> str:
    """Why a session has no trained token."""
    if not nodes:
        return "no model call was captured"
    if all(node.untrained is Untrained.FROZEN for node in nodes):
        return "every model call went to a frozen engine: session.models leaves none to the policy"
    return "no token of a trained role was sampled"


def turn_of(node: Node, part: Part, unended: int = 0) -> Turn:
    meta = node.meta
    return Turn(
        id=node.id,
        index=node.index,
        parent=node.parent.id if node.parent else None,
        # A turn in flight is no part of the trajectory yet.
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
        images=[builders.image_of(image, node.prompt_length - len(node.suffix)) for image in node.images],
        reply=reply_json(node.reply),
        cached_tokens=meta.get("cached_tokens", 0),
        started=meta.get("started", 0.0),
        seconds=meta.get("seconds", 0.0),
    )
