"""From a graph to training rows.

- `exact`: one row per leaf, with the tokens of the path from the root as the model saw and sampled them.
- `merged`: turns that were each re-rendered are stitched afterwards: the sampled ids replace their re-rendering in the
  next prompt. For engines that only speak chat; the context of later turns is then not what they were sampled under.
- `per_turn`: one row per model call. The naive baseline.

In all three a turn of a trained role is trained exactly once: it is owned by the earliest leaf whose path contains it, and
in other rows its tokens are context. A turn whose reply the harness appended text to is trained in the row that continues
it, without its end-of-turn token, which is not in that prompt: a separate row for that one token would repeat the whole
context. Turns that are `untrained`, whatever their role, are in no row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from towline.common.arrays import Ids
from towline.common.images import PlacedImage
from towline.conversation import Finish
from towline.schema import BuilderName, ForkReason, Image, Trace, TurnRole, TurnSampling
from towline.schema.turn import of_turns
from towline.tokens.graph.graph import Graph, GraphNode, check_buffer


@dataclass(slots=True)
class _Row:
    """One row being built."""

    leaf: GraphNode
    tokens: list[Ids] = field(default_factory=list)
    turns: list[tuple[int, GraphNode, int]] = field(default_factory=list)
    """Start of each turn's sampled tokens, the turn, and how many of them there are."""
    length: int = 0
    images: list[PlacedImage] = field(default_factory=list)

    def context(self, ids: Ids) -> None:
        self.tokens.append(ids)
        self.length += len(ids)

    def prompt(self, node: GraphNode, ids: Ids) -> None:
        """Add the end of a turn's prompt, `ids`, with the images in it."""
        start, suffix = node.prompt_length - len(ids), node.prompt_length - len(node.suffix)
        images = node.all_images() if start < suffix else [image.moved(suffix) for image in node.images]
        self.images += [image.moved(self.length - start) for image in images if image.start >= start]
        self.context(ids)

    def sampled(self, node: GraphNode, kept: int | None = None) -> None:
        ids = node.sampled[:kept]
        self.turns.append((self.length, node, len(ids)))
        self.context(ids)


def build_traces(
    graph: Graph,
    roles: Mapping[GraphNode, TurnRole],
    builder: BuilderName,
    *,
    rollout_id: str,
    group_id: str,
    trained: Collection[TurnRole],
    ends: frozenset[int] = frozenset(),
) -> list[Trace]:
    """The rows of a session. `ends` are the ids that end a message; `merged` needs them to find its seams.

    Raises `FidelityError` if a prompt that was sent differs from the tokens of the rows.
    """
    for node in graph.nodes:
        check_buffer(node)
    alive = [node for node in graph.nodes if _is_trained(node, roles, trained) and len(node.sampled)]
    if builder is BuilderName.EXACT:
        rows = [_path_row(leaf) for leaf in _leaves(alive, lambda node: (node.parent, node.appended_turn))]
    elif builder is BuilderName.MERGED:
        rows = [row for leaf in _leaves(alive, lambda node: (_before(node),)) for row in _stitched(leaf, ends)]
    else:
        rows = [_turn_row(node) for node in alive]
    return _own_turns(rows, roles, builder, rollout_id, group_id, trained)


def _is_trained(node: GraphNode, roles: Mapping[GraphNode, TurnRole], trained: Collection[TurnRole]) -> bool:
    return roles.get(node) in trained and node.untrained is None


def image_record(placed: PlacedImage, start: int = 0) -> Image:
    """The record of an image. One that was sent inline is recorded by its digest, without its URL."""
    url = "" if is_inline(placed) else placed.media.url
    start += placed.start
    return Image(digest=placed.media.digest, url=url, start=start, length=placed.length, key=placed.key)


def is_inline(placed: PlacedImage) -> bool:
    """Whether the image was sent inline, as a data URL."""
    return placed.media.url[:5].lower() == "data:"


def _before(node: GraphNode) -> GraphNode | None:
    """The turn before this one in the conversation, its tokens kept or re-rendered."""
    return node.parent or (node.origin if node.reason is None else None)


def _leaves(nodes: Sequence[GraphNode], before: Callable[[GraphNode], tuple[GraphNode | None, ...]]) -> list[GraphNode]:
    inner = {id(earlier) for node in nodes for earlier in before(node) if earlier is not None}
    return [node for node in nodes if id(node) not in inner]


def _path_row(leaf: GraphNode) -> _Row:
    """The tokens of a path. A reply that the harness appended text to is in it as far as it was kept."""
    path: list[tuple[GraphNode, int | None]] = [(leaf, None)]
    while (before := path[-1][0].appended_turn or path[-1][0].parent) is not None:
        path.append((before, path[-1][0].kept_ids if path[-1][0].appended_turn is not None else None))
    row = _Row(leaf)
    for node, kept in reversed(path):
        shared = len(node.appended_turn.suffix) + node.kept_ids if node.appended_turn is not None else 0
        row.prompt(node, node.suffix[shared:])
        row.sampled(node, kept)
    return row


def _turn_row(node: GraphNode) -> _Row:
    row = _Row(node)
    row.prompt(node, node.prompt())
    row.sampled(node)
    return row


def _stitched(leaf: GraphNode, ends: frozenset[int]) -> list[_Row]:
    """The rows of one conversation path: more than one if a seam cannot be found."""
    path = [leaf]
    while (before := _before(path[-1])) is not None:
        path.append(before)
    path.reverse()
    rows: list[_Row] = []
    for previous, node in zip([None, *path], path, strict=False):
        suffix = (
            None if previous is None else node.suffix if node.parent is previous else _ids_after(previous, node, ends)
        )
        if suffix is None:
            rows.append(_Row(node))
            suffix = node.prompt()
        rows[-1].prompt(node, suffix)
        rows[-1].leaf = node
        rows[-1].sampled(node)
    return rows


def _ids_after(previous: GraphNode, node: GraphNode, ends: frozenset[int]) -> Ids | None:
    """What follows the previous reply in the next prompt, located by counting the messages that end before it."""
    before, prompt, marks = previous.prompt(), node.prompt(), np.fromiter(ends, np.int32)
    marked = np.flatnonzero(np.isin(before, marks))
    opening = before[marked[-1] + 1 :] if len(marked) else before
    count = len(_turn_ends(before, marks, opening))
    places = _turn_ends(prompt, marks, opening)
    if len(places) <= count:
        return None
    closed = len(previous.sampled) > 0 and int(previous.sampled[-1]) in ends
    return prompt[places[count] + closed :]


def _turn_ends(prompt: Ids, marks: Ids, opening: Ids) -> list[int]:
    """Where messages end, with consecutive assistant messages as one: a template may write a reply as several (gpt-oss)
    and leave some of them out later. `opening` is what an assistant message begins with."""
    places: list[int] = np.flatnonzero(np.isin(prompt, marks)).tolist()
    if not len(opening):
        return places
    starts = (0, *(place + 1 for place in places))
    assistant = [
        start + len(opening) < len(prompt) and np.array_equal(prompt[start : start + len(opening)], opening)
        for start in starts
    ]
    return [place for index, place in enumerate(places) if not (assistant[index] and assistant[index + 1])]


def _own_turns(
    rows: Sequence[_Row],
    roles: Mapping[GraphNode, TurnRole],
    builder: BuilderName,
    rollout_id: str,
    group_id: str,
    trained: Collection[TurnRole],
) -> list[Trace]:
    owner: dict[GraphNode, str] = {}
    whole = {node for row in rows for _, node, length in row.turns if length == len(node.sampled)}
    traces: list[Trace] = []
    for row in sorted(rows, key=lambda row: row.leaf.index):
        trace_id = f"{rollout_id}-{len(traces)}"
        token_ids = np.concatenate(row.tokens)
        mask = np.zeros(len(token_ids), np.uint8)
        logprobs = np.zeros(len(token_ids), np.float32)
        versions = np.full(len(token_ids), -1, np.int32)
        turn_ids = np.full(len(token_ids), -1, np.int32)
        fork: GraphNode | None = None
        for start, node, length in row.turns:
            stretch = slice(start, start + length)
            logprobs[stretch], versions[stretch] = node.logprobs[:length], node.versions[:length]
            turn_ids[stretch] = node.index
            cut = length < len(node.sampled) and node in whole
            if node not in owner and not cut and _is_trained(node, roles, trained):
                owner[node] = trace_id
                mask[stretch] = 1
                fork = fork or node
        if fork is None:
            continue
        source = fork.parent or fork.origin
        last = row.leaf
        temperatures, sampling = of_turns(turn_ids, {node.index: turn_sampling(node) for _, node, _ in row.turns})
        traces.append(
            Trace(
                trace_id=trace_id,
                parent_trace=owner.get(source) if source is not None else None,
                rollout_id=rollout_id,
                group_id=group_id,
                role=roles[last],
                builder=builder,
                token_ids=token_ids,
                loss_mask=mask,
                logprobs=logprobs,
                policy_versions=versions,
                turn_ids=turn_ids,
                temperature=last.meta.get("temperature", 1.0),
                top_p=last.meta.get("top_p", 1.0),
                top_k=last.meta.get("top_k", 0),
                temperatures=temperatures,
                sampling=sampling,
                finish_reason=str(last.finish or ""),
                fork_reason=fork.reason,
                truncated=last.finish is Finish.LENGTH,
                images=[image_record(image) for image in row.images],
            )
        )
    return traces


def turn_sampling(node: GraphNode) -> TurnSampling:
    """The sampling settings of a turn."""
    settings = {name: node.meta[name] for name in ("temperature", "top_p", "top_k") if name in node.meta}
    return TurnSampling(turn=node.index, **settings)


def distinct_tokens(rows: Sequence[Ids]) -> int:
    """Tokens of the prefix tree of the rows: common prefixes count once."""
    ordered = sorted(rows, key=lambda ids: ids.astype(">i4").tobytes())
    total, previous = 0, np.empty(0, np.int32)
    for ids in ordered:
        overlap = min(len(previous), len(ids))
        different = np.flatnonzero(previous[:overlap] != ids[:overlap])
        total += len(ids) - (int(different[0]) if len(different) else overlap)
        previous = ids
    return total


def fork_counts(nodes: Sequence[GraphNode]) -> dict[str, int]:
    """How often each reason started a branch or a root."""
    counts: dict[str, int] = {}
    for node in nodes:
        if isinstance(node.reason, ForkReason):
            counts[node.reason.value] = counts.get(node.reason.value, 0) + 1
    return counts
