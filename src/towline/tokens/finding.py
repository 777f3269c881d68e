"""Which turn of ours a request speaks of: the match that a continuation stands on.

The fingerprints decide. Call ids that we minted and reasoning that was sent back only settle twins, which have the same
fingerprint. `lineage` tells where a request that matches nothing came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from towline.conversation import Finish, Message
from towline.schema import POLICY, ForkReason
from towline.tokens import fingerprint
from towline.tokens.graph import Graph, Node
from towline.tokens.settle import bare_id


def match(
    graph: Graph, messages: Sequence[Message], key: str, hashes: Sequence[bytes]
) -> tuple[Node | None, int, bool]:
    """The deepest turn whose request and reply are a prefix, how many messages it covers, and whether a message of its
    prompt vanished."""
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


def twin(
    graph: Graph, messages: Sequence[Message], key: str, hashes: Sequence[bytes], found: Node | None
) -> Node | None:
    """The turn that had this very request; rather one that came to something.

    A request with the same fingerprint whose call ids name `found` and not that turn's past is of another branch. So is
    one that ends with a reply of other reasoning, which is to be written on: no fingerprint tells those apart.
    """
    nodes = graph.by_request.get((hashes[-1], key))
    if nodes and messages[-1].role == "assistant":
        nodes = [node for node in nodes if node.prefill is None or _thought(node.prefill) == _thought(messages[-1])]
    if not nodes:
        return None
    ids = {bare_id(call.id) for message in messages for call in message.tool_calls}
    alike = [node for node in nodes if found is None or _went_on_from(node, found, ids)]
    return next((node for node in reversed(alike) if node.finish is not Finish.ABORT), alike[-1] if alike else None)


def _went_on_from(node: Node, found: Node, ids: set[str]) -> bool:
    """Whether a turn goes on from `found`, or from a twin of it that the ids fit no less."""
    while node.reason is ForkReason.SIBLING and node.origin is not None:
        node = node.origin
    if found in (node.parent, node.origin) or node.parent is None:
        return True
    return _named(node.parent, ids) >= _named(found, ids)


def intact(graph: Graph, messages: Sequence[Message], key: str, hashes: Sequence[bytes]) -> tuple[Node | None, int]:
    """The deepest turn, short of the whole request, whose request and reply are a prefix as they were."""
    for covered in range(len(messages) - 1, 0, -1):
        if messages[covered - 1].role == "assistant":
            node = _pick(graph.after_reply.get(hashes[covered]), key, messages, covered)
            if node is not None:
                return node, covered
    return None, 0


def _match_split(graph: Graph, messages: Sequence[Message], key: str, hashes: Sequence[bytes]) -> Node | None:
    """A reply that the harness sends back as several assistant messages in a row."""
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


def _pick(nodes: Sequence[Node] | None, key: str, messages: Sequence[Message], covered: int) -> Node | None:
    """Among twins, the one whose call ids stand in the request; else whose reasoning was sent back; else the newest that
    was delivered."""
    twins = [node for node in nodes or () if node.key == key]
    if len(twins) <= 1:
        return twins[0] if twins else None
    ids = {bare_id(call.id) for message in messages[:covered] for call in message.tool_calls}
    said = messages[covered - 1]
    thought = bool(said.reasoning) or "<think>" in said.text

    def likeness(node: Node) -> tuple[int, bool, bool, int]:
        return (_named(node, ids), thought and kept(node, said), node.delivered, node.index)

    return max(twins, key=likeness)


def _named(node: Node, ids: set[str]) -> int:
    """How many turns on the node's path have a call whose id is among `ids`."""
    return sum(_has_call(turn, ids) for turn in node.path())


def _has_call(node: Node, ids: set[str]) -> bool:
    return node.reply is not None and any(bare_id(call.id) in ids for call in node.reply.tool_calls)


def own(graph: Graph, message: Message, near: Node | None, place: int = 0, engine: str = POLICY) -> Node | None:
    """The turn of the engine that sampled this message: by its minted call ids, or in the same conversation by its content.

    Of several with the same content, the one whose reply stood nearest to `place`.
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
    alike = [node for node in nodes if node.line is near.line]
    return min(alike, key=lambda node: (abs(node.covered - place), -node.index), default=None)


def named(graph: Graph, messages: Sequence[Message], engine: str = POLICY) -> Node | None:
    """The last turn of the engine whose reply the messages hold, told by its minted call ids."""
    found = (own(graph, message, None, engine=engine) for message in reversed(messages))
    return next((node for node in found if node is not None), None)


def replies(graph: Graph, found: Node, covered: int, messages: Sequence[Message]) -> Iterator[tuple[int, Node]]:
    """Where the replies of the turns up to `found` stand in the request, the last first."""
    place = covered
    node: Node | None = found
    while node is not None:
        for index in range(place - 1, -1, -1):
            message = messages[index]
            ours = (node.reply_fingerprint, node.stopped_fingerprint)
            if message.role == "assistant" and fingerprint.of(message, graph.noise) in ours:
                yield index, node
                place = index
                break
        node = node.parent


def kept(node: Node, message: Message) -> bool:
    """Whether the harness sent the reply's reasoning back."""
    sent = _thought(node.reply_message()) if node.reply is not None else ""
    back = _thought(message)
    return not sent or back == sent or (not back and sent in message.text)


def _thought(message: Message) -> str:
    return (message.reasoning or "").strip()


def noisy(found: Node, messages: Sequence[Message]) -> bool:
    """Whether text that counts as noise differs from what the model was shown in the turns up to `found`."""
    place = len(messages)
    node: Node | None = found
    while node is not None:
        place = min(place, node.covered)
        start = max(place - len(node.new), 0)
        for now, then in zip(messages[start:place], node.new, strict=False):
            restyled = now is not then and now.text != then.text and now.fingerprint == then.fingerprint
            if restyled and fingerprint.normal_text(now) != fingerprint.normal_text(then):
                return True
        place = start - 1
        node = node.parent
    return False
