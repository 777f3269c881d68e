"""Which turn of ours a request refers to: the match that a continuation builds on.

Fingerprints decide. Call ids that we minted, and reasoning that was sent back, only break ties between turns with the
same fingerprint. `lineage` finds where a request that matches nothing came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from towline.conversation import Finish, Message
from towline.schema import POLICY, ForkReason
from towline.tokens.graph import fingerprint
from towline.tokens.graph.graph import Graph, GraphNode
from towline.tokens.graph.tool_results import bare_id


def match(
    graph: Graph, messages: Sequence[Message], key: str, hashes: Sequence[bytes]
) -> tuple[GraphNode | None, int, bool]:
    """The deepest turn whose request and reply are a prefix of the messages, how many messages that is, and whether a
    message of its prompt vanished."""
    for covered in range(len(messages), 0, -1):
        if messages[covered - 1].role != "assistant":
            continue
        node = _pick(graph.after_reply.get(hashes[covered]), key, messages, covered)
        if node is None and covered >= 2 and messages[covered - 2].role == "assistant":
            node = _match_split(graph, messages[:covered], key, hashes)
        if node is not None:
            return node, covered, False
        node = _pick(graph.after_vanished.get(hashes[covered]), key, messages, covered)
        if node is not None:
            return node, covered, True
    return None, 0, False


def find_same_request(
    graph: Graph, messages: Sequence[Message], key: str, hashes: Sequence[bytes], found: GraphNode | None
) -> GraphNode | None:
    """The turn that had exactly this request, preferably one that was not aborted.

    A request with the same fingerprint whose call ids name `found` rather than that turn's history belongs to another
    branch. So does one that ends with an assistant message of other reasoning to continue, which no fingerprint tells
    apart.
    """
    nodes = graph.by_request.get((hashes[-1], key))
    if nodes and messages[-1].role == "assistant":
        nodes = [node for node in nodes if node.prefill is None or _thought(node.prefill) == _thought(messages[-1])]
    if not nodes:
        return None
    ids = {bare_id(call.id) for message in messages for call in message.tool_calls}
    alike = [node for node in nodes if found is None or _continued_from(node, found, ids)]
    return next((node for node in reversed(alike) if node.finish is not Finish.ABORT), alike[-1] if alike else None)


def _continued_from(node: GraphNode, found: GraphNode, ids: set[str]) -> bool:
    """Whether a turn continues `found`, or a turn with the same fingerprint that the ids fit equally well."""
    while node.reason is ForkReason.SIBLING and node.origin is not None:
        node = node.origin
    if found in (node.parent, node.origin) or node.parent is None:
        return True
    return _named(node.parent, ids) >= _named(found, ids)


def find_intact(
    graph: Graph, messages: Sequence[Message], key: str, hashes: Sequence[bytes]
) -> tuple[GraphNode | None, int]:
    """The deepest turn whose request and reply are an unchanged, strict prefix of the messages, and its length."""
    for covered in range(len(messages) - 1, 0, -1):
        if messages[covered - 1].role == "assistant":
            node = _pick(graph.after_reply.get(hashes[covered]), key, messages, covered)
            if node is not None:
                return node, covered
    return None, 0


def _match_split(graph: Graph, messages: Sequence[Message], key: str, hashes: Sequence[bytes]) -> GraphNode | None:
    """The turn whose reply the harness sent back as several consecutive assistant messages."""
    start = len(messages) - 1
    while start > 0 and messages[start - 1].role == "assistant":
        start -= 1
        run = messages[start:]
        whole = Message(
            "assistant",
            "\n".join(m.text for m in run if m.text.strip()),
            next((m.reasoning for m in run if m.reasoning), None),
            tuple(call for m in run for call in m.tool_calls),
        )
        after = fingerprint.roll(hashes[start], fingerprint.of(whole, graph.noise))
        node = _pick(graph.after_reply.get(after), key, [*messages[:start], whole], start + 1)
        if node is not None:
            return node
    return None


def _pick(nodes: Sequence[GraphNode] | None, key: str, messages: Sequence[Message], covered: int) -> GraphNode | None:
    """Of turns with the same fingerprint, the one whose call ids are in the request; else the one whose reasoning was sent
    back; else the newest that was delivered."""
    same = [node for node in nodes or () if node.key == key]
    if len(same) <= 1:
        return same[0] if same else None
    ids = {bare_id(call.id) for message in messages[:covered] for call in message.tool_calls}
    reply = messages[covered - 1]
    thought = bool(reply.reasoning) or "<think>" in reply.text

    def likelihood(node: GraphNode) -> tuple[int, bool, bool, int]:
        return (_named(node, ids), thought and kept_reasoning(node, reply), node.delivered, node.index)

    return max(same, key=likelihood)


def _named(node: GraphNode, ids: set[str]) -> int:
    """How many turns on the node's path made a call whose id is among `ids`."""
    return sum(_has_call(turn, ids) for turn in node.path())


def _has_call(node: GraphNode, ids: set[str]) -> bool:
    return node.reply is not None and any(bare_id(call.id) in ids for call in node.reply.tool_calls)


def find_own_reply(
    graph: Graph, message: Message, near: GraphNode | None, place: int = 0, engine: str = POLICY
) -> GraphNode | None:
    """The engine's turn that sampled this message: by minted call ids, or in the same conversation by content.

    Of several with the same content, the one whose reply was nearest to index `place`.
    """
    if message.role != "assistant":
        return None
    nodes = graph.by_reply.get((fingerprint.of(message, graph.noise), engine))
    if not nodes:
        return None
    ids = {bare_id(call.id) for call in message.tool_calls}
    named = next((node for node in reversed(nodes) if _has_call(node, ids)), None)
    if named is not None or near is None:
        return named
    alike = [node for node in nodes if node.line_root is near.line_root]
    return min(alike, key=lambda node: (abs(node.message_count - place), -node.index), default=None)


def last_named_turn(graph: Graph, messages: Sequence[Message], engine: str = POLICY) -> GraphNode | None:
    """The engine's last turn whose reply is among the messages, recognised by its minted call ids."""
    found = (find_own_reply(graph, message, None, engine=engine) for message in reversed(messages))
    return next((node for node in found if node is not None), None)


def locate_replies(
    graph: Graph, found: GraphNode, covered: int, messages: Sequence[Message]
) -> Iterator[tuple[int, GraphNode]]:
    """Indexes in the request of the replies of the turns up to `found`, last first."""
    place = covered
    node: GraphNode | None = found
    while node is not None:
        for index in range(place - 1, -1, -1):
            message = messages[index]
            ours = (node.reply_fingerprint, node.stopped_fingerprint)
            if message.role == "assistant" and fingerprint.of(message, graph.noise) in ours:
                yield index, node
                place = index
                break
        node = node.parent


def kept_reasoning(node: GraphNode, message: Message) -> bool:
    """Whether the harness sent the reply's reasoning back."""
    sent = _thought(node.reply_message()) if node.reply is not None else ""
    back = _thought(message)
    return not sent or back == sent or (not back and sent in message.text)


def _thought(message: Message) -> str:
    return (message.reasoning or "").strip()


def noise_differs(found: GraphNode, messages: Sequence[Message]) -> bool:
    """Whether text that `noise` patterns ignore differs from what the model saw in the turns up to `found`."""
    place = len(messages)
    node: GraphNode | None = found
    while node is not None:
        place = min(place, node.message_count)
        start = max(place - len(node.new), 0)
        for now, then in zip(messages[start:place], node.new, strict=False):
            restyled = now is not then and now.text != then.text and now.fingerprint == then.fingerprint
            if restyled and fingerprint.normalized_text(now) != fingerprint.normalized_text(then):
                return True
        place = start - 1
        node = node.parent
    return False
