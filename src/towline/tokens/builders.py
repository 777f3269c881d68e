"""From a graph to training rows.

- `exact`: a row a leaf, its tokens those of the path from the root, as the model saw and sampled them.
- `merged`: turns that were each rendered anew are stitched afterwards: the sampled ids take the place of their
  re-rendering in the next prompt. For engines that only speak chat; the context of later turns is then not what they
  were sampled under.
- `per_turn`: a row a call. The naive baseline.

In all three a turn of a trained role is trained exactly once: it belongs to the earliest leaf that runs through it, and
in other rows its tokens are context. A turn whose reply the harness wrote on behind is trained in the row that goes on
from it, without its end of turn, which no longer stands there: a row of its own for that one token would hold the whole
context once more. Turns that are `untrained`, whatever their role, are in no row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from towline.arrays import Ids
from towline.conversation import Finish
from towline.images import Placed
from towline.schema import BuilderName, ForkReason, Image, Trace, TurnRole, TurnSampling
from towline.schema.sampling import of_turns
from towline.tokens.graph import Graph, Node, check_buffer


@dataclass(slots=True)
class _Row:
    """One row being put together."""

    leaf: Node
    tokens: list[Ids] = field(default_factory=list)
    turns: list[tuple[int, Node, int]] = field(default_factory=list)
    """Where each turn's sampled tokens begin, and how many of them there are."""
    length: int = 0
    images: list[Placed] = field(default_factory=list)

    def context(self, ids: Ids) -> None:
        self.tokens.append(ids)
        self.length += len(ids)

    def prompt(self, node: Node, ids: Ids) -> None:
        """Add the end of a turn's prompt, `ids`, with the images in it."""
        start, suffix = node.prompt_length - len(ids), node.prompt_length - len(node.suffix)
        images = node.all_images() if start < suffix else [image.moved(suffix) for image in node.images]
        self.images += [image.moved(self.length - start) for image in images if image.start >= start]
        self.context(ids)

    def sampled(self, node: Node, kept: int | None = None) -> None:
        ids = node.sampled[:kept]
        self.turns.append((self.length, node, len(ids)))
        self.context(ids)


def build(
    graph: Graph,
    roles: Mapping[Node, TurnRole],
    builder: BuilderName,
    *,
    rollout_id: str,
    group_id: str,
    trained: Collection[TurnRole],
    ends: frozenset[int] = frozenset(),
) -> list[Trace]:
    """The rows of a session. `ends` are the ids that end a message; `merged` needs them to find its seams.

    Raises `FidelityError` if a prompt that was sent is not the one that the rows are made of.
    """
    for node in graph.nodes:
        check_buffer(node)
    alive = [node for node in graph.nodes if _is_trained(node, roles, trained) and len(node.sampled)]
    if builder is BuilderName.EXACT:
        rows = [_path_row(leaf) for leaf in _leaves(alive, lambda node: (node.parent, node.shares))]
    elif builder is BuilderName.MERGED:
        rows = [row for leaf in _leaves(alive, lambda node: (_before(node),)) for row in _stitched(leaf, ends)]
    else:
        rows = [_turn_row(node) for node in alive]
    return _own(rows, roles, builder, rollout_id, group_id, trained)


def _is_trained(node: Node, roles: Mapping[Node, TurnRole], trained: Collection[TurnRole]) -> bool:
    return roles.get(node) in trained and node.untrained is None


def image_of(placed: Placed, start: int = 0) -> Image:
    """What a record says of an image. One that was sent within the request is told by its digest alone."""
    url = "" if is_inline(placed) else placed.media.url
    start += placed.start
    return Image(digest=placed.media.digest, url=url, start=start, length=placed.length, key=placed.key)


def is_inline(placed: Placed) -> bool:
    """Whether the image itself was sent, and not where it is."""
    return placed.media.url[:5].lower() == "data:"


def _before(node: Node) -> Node | None:
    """The turn before this one in the conversation, whether its tokens were kept or rendered anew."""
    return node.parent or (node.origin if node.reason is None else None)


def _leaves(nodes: Sequence[Node], before: Callable[[Node], tuple[Node | None, ...]]) -> list[Node]:
    inner = {id(earlier) for node in nodes for earlier in before(node) if earlier is not None}
    return [node for node in nodes if id(node) not in inner]


def _path_row(leaf: Node) -> _Row:
    """The tokens of a path. A turn whose reply was written on behind stands in it as far as it was kept."""
    path: list[tuple[Node, int | None]] = [(leaf, None)]
    while (before := path[-1][0].shares or path[-1][0].parent) is not None:
        path.append((before, path[-1][0].kept if path[-1][0].shares is not None else None))
    row = _Row(leaf)
    for node, kept in reversed(path):
        shared = len(node.shares.suffix) + node.kept if node.shares is not None else 0
        row.prompt(node, node.suffix[shared:])
        row.sampled(node, kept)
    return row


def _turn_row(node: Node) -> _Row:
    row = _Row(node)
    row.prompt(node, node.prompt())
    row.sampled(node)
    return row


def _stitched(leaf: Node, ends: frozenset[int]) -> list[_Row]:
    """The rows of one conversation path; more than one where a seam cannot be found."""
    path = [leaf]
    while (before := _before(path[-1])) is not None:
        path.append(before)
    path.reverse()
    rows: list[_Row] = []
    for previous, node in zip([None, *path], path, strict=False):
        suffix = None if previous is None else node.suffix if node.parent is previous else _rest(previous, node, ends)
        if suffix is None:
            rows.append(_Row(node))
            suffix = node.prompt()
        rows[-1].prompt(node, suffix)
        rows[-1].leaf = node
        rows[-1].sampled(node)
    return rows


def _rest(previous: Node, node: Node, ends: frozenset[int]) -> Ids | None:
    """What follows the previous reply in the next prompt, found by counting the messages that end before it."""
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
    """Where messages end, those of the assistant in a row as one: a template may write a reply as several (gpt-oss), and
    leave some of them out later. `opening` is what an assistant's message begins with."""
    places: list[int] = np.flatnonzero(np.isin(prompt, marks)).tolist()
    if not len(opening):
        return places
    starts = (0, *(place + 1 for place in places))
    speaks = [
        start + len(opening) < len(prompt) and np.array_equal(prompt[start : start + len(opening)], opening)
        for start in starts
    ]
    return [place for index, place in enumerate(places) if not (speaks[index] and speaks[index + 1])]


def _own(
    rows: Sequence[_Row],
    roles: Mapping[Node, TurnRole],
    builder: BuilderName,
    rollout_id: str,
    group_id: str,
    trained: Collection[TurnRole],
) -> list[Trace]:
    owner: dict[Node, str] = {}
    whole = {node for row in rows for _, node, length in row.turns if length == len(node.sampled)}
    traces: list[Trace] = []
    for row in sorted(rows, key=lambda row: row.leaf.index):
        trace_id = f"{rollout_id}-{len(traces)}"
        token_ids = np.concatenate(row.tokens)
        mask = np.zeros(len(token_ids), np.uint8)
        logprobs = np.zeros(len(token_ids), np.float32)
        versions = np.full(len(token_ids), -1, np.int32)
        turn_ids = np.full(len(token_ids), -1, np.int32)
        fork: Node | None = None
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
        temperatures, sampling = of_turns(turn_ids, {node.index: sampling_of(node) for _, node, _ in row.turns})
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
                images=[image_of(image) for image in row.images],
            )
        )
    return traces


def sampling_of(node: Node) -> TurnSampling:
    """What a turn was sampled with."""
    settings = {name: node.meta[name] for name in ("temperature", "top_p", "top_k") if name in node.meta}
    return TurnSampling(turn=node.index, **settings)


def distinct_tokens(rows: Sequence[Ids]) -> int:
    """Tokens of the tree that the rows make when common beginnings are written once."""
    ordered = sorted(rows, key=lambda ids: ids.astype(">i4").tobytes())
    total, previous = 0, np.empty(0, np.int32)
    for ids in ordered:
        overlap = min(len(previous), len(ids))
        different = np.flatnonzero(previous[:overlap] != ids[:overlap])
        total += len(ids) - (int(different[0]) if len(different) else overlap)
        previous = ids
    return total


def fork_counts(nodes: Sequence[Node]) -> dict[str, int]:
    """How often each reason started a branch or a root."""
    counts: dict[str, int] = {}
    for node in nodes:
        if isinstance(node.reason, ForkReason):
            counts[node.reason.value] = counts.get(node.reason.value, 0) + 1
    return counts
