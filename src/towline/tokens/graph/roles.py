"""The role of each turn in its session, and why.

Roles are assigned when the session is built, in this order: what a setting or a header says; `main`, the conversation with
the task's instruction, and whatever continues it; `compaction`; `subagent`; `side`. A turn that was never delivered, and
that no request continues, is `discarded` whatever its conversation. docs/roles.md has the rules with a picture.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from towline.common.untrusted.patterns import TextPattern
from towline.conversation import Message
from towline.schema import ForkReason, Trajectory, Turn, TurnRole, Untrained
from towline.tokens.graph import fingerprint
from towline.tokens.graph.graph import Graph, GraphNode
from towline.tokens.graph.lineage import MIN_QUOTE, quotes
from towline.tokens.graph.tool_results import bare_id

_CONTINUES = (None, ForkReason.IMAGE_UNREPORTED)
"""Reasons of turns that continue a conversation although their prompts are re-rendered."""
_REWRITTEN = (ForkReason.HISTORY_EDITED, ForkReason.COMPACTION, ForkReason.UNMATCHED)
"""Reasons of turns whose history the harness changed."""
_SUMMARY_REASON = "its reply is the summary that another conversation starts from"
_CHANGED = {
    ForkReason.TOOLS_CHANGED: "other tools",
    ForkReason.SYSTEM_CHANGED: "another system prompt",
    ForkReason.MODEL_CHANGED: "a model of another engine",
}


@dataclass(frozen=True, slots=True)
class RoleAssignment:
    """The role of a turn and the rule that assigned it."""

    role: TurnRole
    reason: str


def assign_roles(
    graph: Graph, instruction: str | Sequence[str] = "", *, also: Collection[GraphNode] = ()
) -> dict[GraphNode, RoleAssignment]:
    """A role for every finished turn. Turns in `also` failed; they get the role that they would have if answered.

    How a harness would have used a missing reply is unknown: a failed call that may have been for a summary of main
    counts as one. A task of several steps has several instructions, in order.
    """
    trees: dict[GraphNode, list[GraphNode]] = {}
    for node in graph.nodes:
        if node.finish is not None:
            trees.setdefault(node.root, []).append(node)
    return _RoleAssigner(graph, trees, instruction, also).assignments() if trees else {}


def last_answer(trajectory: Trajectory) -> str:
    """The last text of main and what continues it, across hand-offs and compactions; summaries do not count."""
    by_id = {turn.id: turn for turn in trajectory.turns}
    line = [turn for turn in trajectory.turns if turn.role in (TurnRole.MAIN, TurnRole.COMPACTION)]
    summaries = {turn.origin for turn in line if turn.reason is ForkReason.COMPACTION}
    turn: Turn | None = max(line, key=lambda turn: turn.index, default=None)
    answers = {turn.id for turn in line} - summaries
    while turn is not None:
        text = str(turn.reply.get("text") or "")
        if text.strip() and turn.id in answers:
            return text
        turn = by_id.get(turn.parent or turn.origin or "")
    return ""


class _RoleAssigner:
    """The conversations of one session. A tree is identified by its first turn, its root."""

    def __init__(
        self,
        graph: Graph,
        trees: dict[GraphNode, list[GraphNode]],
        instruction: str | Sequence[str],
        also: Collection[GraphNode],
    ):
        self.noise = graph.noise
        self.trees = trees
        self.failed = also
        self.lines: dict[GraphNode, list[GraphNode]] = {}
        self.handed: dict[GraphNode, list[GraphNode]] = {}
        """The conversations that continue each one under other tools or another system prompt."""
        for root in trees:
            self.lines.setdefault(root.line_root, []).append(root)
            if root.handed_over_from is not None:
                self.handed.setdefault(root.handed_over_from.root, []).append(root)
        given = (instruction,) if isinstance(instruction, str) else instruction
        self.instruction, *self.later_instructions = [text.strip() for text in given] or [""]
        # A turn that was re-rendered has no parent, but it continues a conversation all the same.
        continued = {n.parent or n.origin for n in graph.nodes if n.parent is not None or n.reason in _CONTINUES}
        continued |= {before for n in graph.nodes for before in (n.handed_over_from, n.appended_turn)} | set(also)
        self.seen = {node for nodes in trees.values() for node in nodes if node.delivered or node in continued}
        self.summarized = {n.origin.root: n for n in graph.nodes if n.reason is ForkReason.COMPACTION and n.origin}
        """The conversations that another one starts from, with its first turn."""
        self.main, self.why_main = self._choose_main()
        self.assigned: dict[GraphNode, RoleAssignment] = {self.main: RoleAssignment(TurnRole.MAIN, self.why_main)}

    def assignments(self) -> dict[GraphNode, RoleAssignment]:
        for root in self.trees:
            if root not in self.assigned:
                self.assigned[root] = self._assign_tree(root)
        return {node: self._assign_turn(node, root) for root, nodes in self.trees.items() for node in nodes}

    # The main conversation

    def _choose_main(self) -> tuple[GraphNode, str]:
        roots = [root for root in self.trees if not self.seen.isdisjoint(self.trees[root])] or list(self.trees)
        ruled = [root for root in roots if root.role_override == TurnRole.MAIN]
        if ruled:
            return ruled[0], "setting roles"
        # A conversation with another engine is main only if there is no other.
        roots = [root for root in roots if not _frozen(root)] or roots
        roots = [root for root in roots if not root.role_override] or roots
        carriers = [root for root in roots if self._carries(root, "user")]
        carriers = carriers or [root for root in roots if self._carries(root, "system")]
        if carriers:
            # A title call quotes the instruction, and a sub-agent may be given it.
            return min(carriers, key=self._main_sort_key), "carries the instruction"
        most = max(roots, key=lambda root: (root.has_tools, self._sampled(root)))
        return most, "sampled most; no conversation carries the instruction"

    def _carries(self, root: GraphNode, role: str) -> bool:
        return bool(self.instruction) and any(m.role == role and self.instruction in m.text for m in root.new)

    def _main_sort_key(self, root: GraphNode) -> tuple[bool, bool, bool]:
        """Sort key of conversations with the instruction; of equal ones the first wins."""
        line = self._line(root)
        turns = sum(len(self.trees[other]) for other in line)
        return bool(root.hints.parent_session), not any(other.has_tools for other in line), turns == 1

    def _line(self, root: GraphNode) -> list[GraphNode]:
        """The conversations that continue one another, this one included."""
        return self.lines[root.line_root]

    def _sampled(self, root: GraphNode) -> int:
        return sum(len(node.sampled) for other in self._line(root) for node in self.trees[other])

    # The others

    def _assign_tree(self, root: GraphNode) -> RoleAssignment:
        if _named_by_header(root, self.main):
            return RoleAssignment(TurnRole.SUBAGENT, "header names another agent or a parent session")
        before = root.handed_over_from
        if before is not None:
            return self._assign_handed_over(root, before)
        if self._later_step(root):
            return RoleAssignment(TurnRole.MAIN, "carries the instruction of a later step")
        if root.reason is ForkReason.COMPACTION and root.origin is not None:
            of = self._role_of_compaction(root)
            if of is TurnRole.SUBAGENT:
                return RoleAssignment(of, f"continues the sub-agent of #{root.origin.index} from a summary")
            return RoleAssignment(of, f"continues #{root.origin.index} from a summary")
        if self._asks_for_summary(root):
            return RoleAssignment(self._role_of_summary(root), _SUMMARY_REASON)
        if self._restarts_main(root):
            return RoleAssignment(TurnRole.MAIN, "carries the instruction after main")
        caller = root.origin if root.origin is not None and _calls(root.origin) else None
        if caller is not None and root.reason is not ForkReason.SIDE:
            return RoleAssignment(TurnRole.SUBAGENT, f"began while a tool call of #{caller.index} was open")
        if _frozen(root):
            return RoleAssignment(TurnRole.SIDE, "another engine, and not about main's task")
        if self.main.has_tools and not root.has_tools:
            if root in self.failed and self._may_summarize(root):
                return RoleAssignment(TurnRole.COMPACTION, "failed; quotes main, whose history was then changed")
            return RoleAssignment(TurnRole.SIDE, "no tools, beside a main with tools")
        return RoleAssignment(TurnRole.SUBAGENT, "a conversation other than main")

    def _role_of(self, node: GraphNode) -> TurnRole:
        """The role of the conversation of an earlier turn."""
        root = node.root
        if root not in self.assigned:
            self.assigned[root] = self._assign_tree(root) if root in self.trees else RoleAssignment(TurnRole.MAIN, "")
        return self.assigned[root].role

    def _asks_for_summary(self, root: GraphNode) -> bool:
        """Whether it is a call without tools whose reply another conversation starts from."""
        aside = root.handed_over_from is not None or root.reason is ForkReason.SIDE
        return root in self.summarized and not root.has_tools and aside

    def _role_of_summary(self, root: GraphNode) -> TurnRole:
        """The role of a call for a summary: that of the conversation which starts from it."""
        return self._role_of_compaction(self.summarized[root])

    def _role_of_compaction(self, root: GraphNode) -> TurnRole:
        """`compaction`, or `subagent` if a sub-agent was compacted. Only looks at conversations from before the summary."""
        source = root.origin
        if source is not None and self._asks_for_summary(source.root):
            before = [n for n in self.trees if n.index < source.root.index and n.system == root.system]
            mine = [n for n in before if n.line_root is self.main.line_root]
            source = source.root.handed_over_from or next(reversed(mine or before), None)
        of = self._role_of(source) if source is not None else TurnRole.COMPACTION
        return TurnRole.SUBAGENT if of is TurnRole.SUBAGENT else TurnRole.COMPACTION

    def _assign_handed_over(self, root: GraphNode, before: GraphNode) -> RoleAssignment:
        """The role of a conversation whose history is that of another, under other tools or another system prompt."""
        how = _CHANGED[root.reason] if root.reason is not None and root.reason in _CHANGED else "another way"
        tools = before.root.has_tools or self.main.has_tools
        if self._asks_for_summary(root):
            return RoleAssignment(self._role_of_summary(root), _SUMMARY_REASON)
        answered = not _calls(before) and root.system != before.system
        if root in self.failed and not root.has_tools and not answered:
            return RoleAssignment(TurnRole.COMPACTION, f"failed; no tools over the history of #{before.index}")
        if self._branches_off(root, before):
            if tools and not root.has_tools:
                return RoleAssignment(
                    TurnRole.SIDE, f"no tools over the history of #{before.index}, which continues without it"
                )
            return RoleAssignment(TurnRole.SUBAGENT, f"over the history of #{before.index}, which continues without it")
        if tools and not root.has_tools and answered:
            return RoleAssignment(
                TurnRole.SIDE, f"no tools and another system prompt after the answer of #{before.index}"
            )
        return RoleAssignment(self._role_of(before), f"continues #{before.index} under {how}")

    def _may_summarize(self, root: GraphNode) -> bool:
        """Whether a failed call quotes a reply of main, whose history the harness changed afterwards (a summary)."""
        line = [node for other in self._line(self.main) for node in self.trees[other]]
        user_text = "\n".join(message.text for message in root.new if message.role == "user")
        changed = any(node.index > root.index and node.reason in _REWRITTEN for node in line)
        return changed and any(node.index < root.index and quotes(user_text, node) for node in line)

    def _branches_off(self, root: GraphNode, before: GraphNode) -> bool:
        """Whether the conversation that this one branched from continues without any content of this one.

        With another system prompt, a continuation from before this one counts too: it cannot be an undo.
        """
        alike = root.system == before.system
        since = (root if alike else before).index
        mine = self._descendants(root)
        others = [
            node
            for other in self._line(root)
            if other not in mine and not (alike and other.system != before.system)
            for node in self.trees[other]
            if node.index > since and node in self.seen and not _named_by_header(node, self.main)
        ]
        continuing = [node for node in others if _comes_after(node, before)]
        if not continuing:
            return False
        content = _Content(self.noise, [node for other in mine for node in self.trees[other]])
        return not all(content.is_in(node, root) for node in continuing)

    def _descendants(self, root: GraphNode) -> set[GraphNode]:
        """The conversation and all that continue it."""
        found = {root}
        waiting = [root]
        while waiting:
            more = self.handed.get(waiting.pop(), ())
            found.update(more)
            waiting.extend(more)
        return found

    def _later_step(self, root: GraphNode) -> bool:
        """Whether it is given the instruction of a later step, with tools if main has any."""
        if root.index < self.main.index or _frozen(root) or (self.main.has_tools and not root.has_tools):
            return False
        texts = [message.text for message in root.new if message.role == "user"]
        return any(later and later in text for later in self.later_instructions for text in texts)

    def _restarts_main(self, root: GraphNode) -> bool:
        """Whether it is given the instruction again and replaces a main that never continues."""
        # A hand-off may collapse the history into one message in the assistant's name.
        carries = self._carries(root, "user") or self._carries(root, "assistant")
        if not carries or root.index < self.main.index or _frozen(root):
            return False
        if self.main.has_tools and not root.has_tools:
            return False
        if (root.system, root.key) == (self.main.system, self.main.key):
            return root.reason in (ForkReason.UNMATCHED, None)
        line = [node for other in self._line(self.main) for node in self.trees[other] if node in self.seen]
        return all(node.index < root.index for node in line)

    # One turn

    def _assign_turn(self, node: GraphNode, root: GraphNode) -> RoleAssignment:
        part = self.assigned[root]
        if node not in self.seen:
            return RoleAssignment(TurnRole.DISCARDED, "never delivered, and no request continues it")
        if node.role_override:
            return RoleAssignment(TurnRole(node.role_override), "setting roles")
        if _named_by_header(node, self.main):
            return RoleAssignment(TurnRole.SUBAGENT, "header names another agent or a parent session")
        before = node.parent or node.continued
        if before is None:
            return part
        what = f" ({node.reason})" if node.reason is not None else ""
        return replace(part, reason=f"continues #{before.index}{what}")


def _comes_after(node: GraphNode, before: GraphNode) -> bool:
    """Whether a turn comes after `before` in its conversation, not on another branch."""
    turn: GraphNode | None = node
    while turn is not None and turn.index > before.index:
        edited = turn.origin if turn.reason is ForkReason.HISTORY_EDITED else None
        sibling = turn.reason is ForkReason.SIBLING
        turn = edited or turn.parent or (None if sibling else turn.continued or turn.handed_over_from)
    return turn is before


class _Content:
    """The content of some conversations, to be found in the requests of another."""

    def __init__(self, noise: Sequence[TextPattern], turns: Sequence[GraphNode]):
        replies = [node.reply for node in turns if node.reply is not None]
        self._noise = noise
        self._replies = {node.reply_fingerprint for node in turns if node.reply_fingerprint}
        self._calls = {bare_id(call.id) for reply in replies for call in reply.tool_calls}
        self._texts = [text for reply in replies if len(text := reply.text.strip()) >= MIN_QUOTE]

    def is_in(self, node: GraphNode, root: GraphNode) -> bool:
        """Whether the request of a turn, or of one it continues since `root` began, contains some of it."""
        turn: GraphNode | None = node
        while turn is not None and turn.index > root.index:
            if any(self._in_message(message) for message in turn.new):
                return True
            turn = turn.parent or turn.continued
        return False

    def _in_message(self, message: Message) -> bool:
        """Whether a message is one of the replies, edited or not, or a user message that quotes one."""
        if message.role == "assistant" and (
            fingerprint.of(message, self._noise) in self._replies
            or any(bare_id(call.id) in self._calls for call in message.tool_calls)
        ):
            return True
        return message.role in ("assistant", "user") and any(text in message.text for text in self._texts)


def _frozen(root: GraphNode) -> bool:
    return root.untrained is Untrained.FROZEN


def _calls(node: GraphNode) -> bool:
    return node.reply is not None and bool(node.reply.tool_calls)


def _named_by_header(node: GraphNode, main: GraphNode) -> bool:
    hints, own = node.hints, main.hints
    return bool(hints.agent and hints.agent != own.agent) or bool(
        hints.parent_session and hints.parent_session != own.parent_session
    )
