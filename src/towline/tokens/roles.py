"""Which part each turn plays in its session, and why.

Roles are settled when the session is built, in this order: what a setting or a header says; `main`, the conversation that
carries the task's instruction, and whatever continues it; `compaction`; `subagent`; `side`. A turn that was never
delivered, and that no request goes on from, is `discarded` whatever its conversation. docs/roles.md has the rules with a
picture.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from towline.conversation import Message
from towline.schema import ForkReason, Trajectory, Turn, TurnRole, Untrained
from towline.tokens import fingerprint
from towline.tokens.graph import Graph, Node
from towline.tokens.lineage import QUOTED, quotes
from towline.tokens.settle import bare_id

_GOES_ON = (None, ForkReason.IMAGE_UNREPORTED)
"""Reasons of turns that simply go on, though their prompts are made anew."""
_REWRITTEN = (ForkReason.HISTORY_EDITED, ForkReason.COMPACTION, ForkReason.UNMATCHED)
"""Reasons of turns before which the harness changed the history."""
_SUMMARISED = "its reply is the summary that another conversation starts from"
_CHANGED = {
    ForkReason.TOOLS_CHANGED: "other tools",
    ForkReason.SYSTEM_CHANGED: "another system prompt",
    ForkReason.MODEL_CHANGED: "a model of another engine",
}


@dataclass(frozen=True, slots=True)
class Part:
    """The role of a turn and the rule that gave it."""

    role: TurnRole
    reason: str


def assign(graph: Graph, instruction: str | Sequence[str] = "", *, also: Collection[Node] = ()) -> dict[Node, Part]:
    """A role for every finished turn. Those in `also` failed; they get the role that they had if they were answered.

    What would have become of a reply that never came, nothing tells: a failed call that may have been for a summary of
    main counts as one. A task of several steps has several instructions, in order.
    """
    trees: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.finish is not None:
            trees.setdefault(node.root, []).append(node)
    return _Cast(graph, trees, instruction, also).parts() if trees else {}


def last_answer(trajectory: Trajectory) -> str:
    """The last text of the conversation that continues main, across hand-offs and compactions; summaries are no answers."""
    by_id = {turn.id: turn for turn in trajectory.turns}
    line = [turn for turn in trajectory.turns if turn.role in (TurnRole.MAIN, TurnRole.COMPACTION)]
    summaries = {turn.origin for turn in line if turn.reason is ForkReason.COMPACTION}
    turn: Turn | None = max(line, key=lambda turn: turn.index, default=None)
    said = {turn.id for turn in line} - summaries
    while turn is not None:
        text = str(turn.reply.get("text") or "")
        if text.strip() and turn.id in said:
            return text
        turn = by_id.get(turn.parent or turn.origin or "")
    return ""


class _Cast:
    """The conversations of one session. A tree is known by its first turn, its root."""

    def __init__(
        self,
        graph: Graph,
        trees: dict[Node, list[Node]],
        instruction: str | Sequence[str],
        also: Collection[Node],
    ):
        self.noise = graph.noise
        self.trees = trees
        self.lost = also
        self.lines: dict[Node, list[Node]] = {}
        self.handed: dict[Node, list[Node]] = {}
        """The conversations that go on from each one, under other tools or another system prompt."""
        for root in trees:
            self.lines.setdefault(root.line, []).append(root)
            if root.handed_on is not None:
                self.handed.setdefault(root.handed_on.root, []).append(root)
        given = (instruction,) if isinstance(instruction, str) else instruction
        self.instruction, *self.later = [text.strip() for text in given] or [""]
        # What was rendered anew has no parent, but it went on all the same.
        went_on = {n.parent or n.origin for n in graph.nodes if n.parent is not None or n.reason in _GOES_ON}
        went_on |= {before for n in graph.nodes for before in (n.handed_on, n.shares)} | set(also)
        self.seen = {node for nodes in trees.values() for node in nodes if node.delivered or node in went_on}
        self.summarised = {n.origin.root for n in graph.nodes if n.reason is ForkReason.COMPACTION and n.origin}
        self.main, self.why_main = self._choose()
        self.known: dict[Node, Part] = {self.main: Part(TurnRole.MAIN, self.why_main)}

    def parts(self) -> dict[Node, Part]:
        for root in self.trees:
            if root not in self.known:
                self.known[root] = self._of_tree(root)
        return {node: self._of_turn(node, root) for root, nodes in self.trees.items() for node in nodes}

    # The main conversation

    def _choose(self) -> tuple[Node, str]:
        roots = [root for root in self.trees if not self.seen.isdisjoint(self.trees[root])] or list(self.trees)
        said = [root for root in roots if root.ruled == TurnRole.MAIN]
        if said:
            return said[0], "setting roles"
        # What another engine was asked is never what the session is about, unless nothing else was.
        roots = [root for root in roots if not _frozen(root)] or roots
        roots = [root for root in roots if not root.ruled] or roots
        carriers = [root for root in roots if self._carries(root, "user")]
        carriers = carriers or [root for root in roots if self._carries(root, "system")]
        if carriers:
            # A title call quotes the instruction, and a sub-agent may be handed it.
            return min(carriers, key=self._unlikely), "carries the instruction"
        most = max(roots, key=lambda root: (root.has_tools, self._sampled(root)))
        return most, "sampled most; no conversation carries the instruction"

    def _carries(self, root: Node, role: str) -> bool:
        return bool(self.instruction) and any(m.role == role and self.instruction in m.text for m in root.new)

    def _unlikely(self, root: Node) -> tuple[bool, bool, bool]:
        """Sorts those that carry the instruction; the first of the same kind comes first."""
        line = self._line(root)
        turns = sum(len(self.trees[other]) for other in line)
        return bool(root.hints.parent_session), not any(other.has_tools for other in line), turns == 1

    def _line(self, root: Node) -> list[Node]:
        """The conversations that go on from one another, this one included."""
        return self.lines[root.line]

    def _sampled(self, root: Node) -> int:
        return sum(len(node.sampled) for other in self._line(root) for node in self.trees[other])

    # The others

    def _of_tree(self, root: Node) -> Part:
        if _told_by_header(root, self.main):
            return Part(TurnRole.SUBAGENT, "header names another agent or a parent session")
        before = root.handed_on
        if before is not None:
            return self._handed_on(root, before)
        if self._later_step(root):
            return Part(TurnRole.MAIN, "carries the instruction of a later step")
        if root.reason is ForkReason.COMPACTION and root.origin is not None:
            of = self._known(root.origin)
            if of is TurnRole.SUBAGENT:
                return Part(of, f"continues the sub-agent of #{root.origin.index} from a summary")
            return Part(TurnRole.COMPACTION, f"continues #{root.origin.index} from a summary")
        if self._again(root):
            return Part(TurnRole.MAIN, "carries the instruction after main")
        caller = root.origin if root.origin is not None and _calls(root.origin) else None
        if caller is not None and root.reason is not ForkReason.SIDE:
            return Part(TurnRole.SUBAGENT, f"began while a tool call of #{caller.index} was open")
        if _frozen(root):
            return Part(TurnRole.SIDE, "asked another engine about something else than main")
        if self.main.has_tools and not root.has_tools:
            if root in self.lost and self._may_summarise(root):
                return Part(TurnRole.COMPACTION, "failed; quotes main, whose history was then changed")
            return Part(TurnRole.SIDE, "no tools, beside a main with tools")
        return Part(TurnRole.SUBAGENT, "another conversation than main")

    def _known(self, node: Node) -> TurnRole:
        """The role of an earlier conversation."""
        root = node.root
        if root not in self.known:
            self.known[root] = self._of_tree(root) if root in self.trees else Part(TurnRole.MAIN, "")
        return self.known[root].role

    def _handed_on(self, root: Node, before: Node) -> Part:
        """The part of a conversation whose history is that of another one, under other tools or another system prompt."""
        how = _CHANGED[root.reason] if root.reason is not None and root.reason in _CHANGED else "another way"
        tools = before.root.has_tools or self.main.has_tools
        if root in self.summarised and not root.has_tools:
            return Part(TurnRole.COMPACTION, _SUMMARISED)
        answered = not _calls(before) and root.system != before.system
        if root in self.lost and not root.has_tools and not answered:
            return Part(TurnRole.COMPACTION, f"failed; no tools over the history of #{before.index}")
        if self._beside(root, before):
            if tools and not root.has_tools:
                return Part(TurnRole.SIDE, f"no tools over the history of #{before.index}, which goes on without it")
            return Part(TurnRole.SUBAGENT, f"over the history of #{before.index}, which goes on without it")
        if tools and not root.has_tools and answered:
            return Part(TurnRole.SIDE, f"no tools and another system prompt after the answer of #{before.index}")
        return Part(self._known(before), f"continues #{before.index} under {how}")

    def _may_summarise(self, root: Node) -> bool:
        """Whether a failed call quotes a reply of main, whose history the harness changed afterwards."""
        line = [node for other in self._line(self.main) for node in self.trees[other]]
        said = "\n".join(message.text for message in root.new if message.role == "user")
        changed = any(node.index > root.index and node.reason in _REWRITTEN for node in line)
        return changed and any(node.index < root.index and quotes(said, node) for node in line)

    def _beside(self, root: Node, before: Node) -> bool:
        """Whether the conversation that this one left goes on without anything that was said here.

        One that went on before counts where the system prompt is another: that is no way to take something back.
        """
        alike = root.system == before.system
        since = (root if alike else before).index
        mine = self._descendants(root)
        others = [
            node
            for other in self._line(root)
            if other not in mine and not (alike and other.system != before.system)
            for node in self.trees[other]
            if node.index > since and node in self.seen and not _told_by_header(node, self.main)
        ]
        going_on = [node for node in others if _goes_on_from(node, before)]
        if not going_on:
            return False
        said = _Said(self.noise, [node for other in mine for node in self.trees[other]])
        return not all(said.held_by(node, root) for node in going_on)

    def _descendants(self, root: Node) -> set[Node]:
        """The conversation and all that go on from it."""
        found = {root}
        waiting = [root]
        while waiting:
            more = self.handed.get(waiting.pop(), ())
            found.update(more)
            waiting.extend(more)
        return found

    def _later_step(self, root: Node) -> bool:
        """Whether the instruction of a further step is given to it, under tools if main has any."""
        if root.index < self.main.index or _frozen(root) or (self.main.has_tools and not root.has_tools):
            return False
        said = [message.text for message in root.new if message.role == "user"]
        return any(later and later in text for later in self.later for text in said)

    def _again(self, root: Node) -> bool:
        """Whether the instruction is given once more, to what takes the place of a main that never goes on."""
        if not self._carries(root, "user") or root.index < self.main.index or _frozen(root):
            return False
        if self.main.has_tools and not root.has_tools:
            return False
        if (root.system, root.key) == (self.main.system, self.main.key):
            return root.reason in (ForkReason.UNMATCHED, None)
        line = [node for other in self._line(self.main) for node in self.trees[other] if node in self.seen]
        return all(node.index < root.index for node in line)

    # One turn

    def _of_turn(self, node: Node, root: Node) -> Part:
        part = self.known[root]
        if node not in self.seen:
            return Part(TurnRole.DISCARDED, "never delivered, and no request goes on from it")
        if node.ruled:
            return Part(TurnRole(node.ruled), "setting roles")
        if _told_by_header(node, self.main):
            return Part(TurnRole.SUBAGENT, "header names another agent or a parent session")
        before = node.parent or node.continued
        if before is None:
            return part
        what = f" ({node.reason})" if node.reason is not None else ""
        return replace(part, reason=f"continues #{before.index}{what}")


def _goes_on_from(node: Node, before: Node) -> bool:
    """Whether a turn comes after `before` in its conversation, and not beside it."""
    turn: Node | None = node
    while turn is not None and turn.index > before.index:
        edited = turn.origin if turn.reason is ForkReason.HISTORY_EDITED else None
        sibling = turn.reason is ForkReason.SIBLING
        turn = edited or turn.parent or (None if sibling else turn.continued or turn.handed_on)
    return turn is before


class _Said:
    """What was said in some conversations, to be found in the requests of another."""

    def __init__(self, noise: Sequence[re.Pattern[str]], turns: Sequence[Node]):
        replies = [node.reply for node in turns if node.reply is not None]
        self._noise = noise
        self._replies = {node.reply_fingerprint for node in turns if node.reply_fingerprint}
        self._calls = {bare_id(call.id) for reply in replies for call in reply.tool_calls}
        self._texts = [text for reply in replies if len(text := reply.text.strip()) >= QUOTED]

    def held_by(self, node: Node, root: Node) -> bool:
        """Whether a turn, or one that it goes on from since `root` began, holds some of it."""
        turn: Node | None = node
        while turn is not None and turn.index > root.index:
            if any(self._in(message) for message in turn.new):
                return True
            turn = turn.parent or turn.continued
        return False

    def _in(self, message: Message) -> bool:
        """Whether a message is one of the replies, edited or not, or a user's that quotes one."""
        if message.role == "assistant" and (
            fingerprint.of(message, self._noise) in self._replies
            or any(bare_id(call.id) in self._calls for call in message.tool_calls)
        ):
            return True
        return message.role in ("assistant", "user") and any(text in message.text for text in self._texts)


def _frozen(root: Node) -> bool:
    return root.untrained is Untrained.FROZEN


def _calls(node: Node) -> bool:
    return node.reply is not None and bool(node.reply.tool_calls)


def _told_by_header(node: Node, main: Node) -> bool:
    hints, own = node.hints, main.hints
    return bool(hints.agent and hints.agent != own.agent) or bool(
        hints.parent_session and hints.parent_session != own.parent_session
    )
