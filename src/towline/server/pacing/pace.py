"""Pacing: how many groups may start, and which may be delivered, so that none exceeds its consumer's staleness limit.

A consumer that declares `groups_per_update` (G) promises to use G groups per policy version, in the order it gets them.
Its groups are then jobs with deadlines. A group that started under version v and may be S versions old has to be in the
update of version v + S at the latest; its *slack* is v + S minus the current version. Every update has G slots. `taken`
slots are used up: groups that the consumer holds, and those that it has used since the version advanced.

Invariant: for every k, the groups with slack at most k and the taken slots together fit into the next k + 1 updates. A
group starts only if the invariant holds with it (admission), and is delivered only if the others still meet their
deadlines without its slot (delivery): the last slots of an update are withheld for older groups that still run. The
version advances when G slots are taken, and everything moves up by one update. So no group misses its deadline, the
earliest deadline can always be delivered, and a group that fails frees its slot at once.

A broken promise breaks the bound: a version that advances after fewer groups, or without any. Groups that missed their
deadline (negative slack) are ignored here, and dropped or flagged on delivery.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

Slack = int | None
"""Versions that may pass before a group is too old; `None`: no limit."""


def slack(started: int | None, bound: int | None, version: int) -> Slack:
    """The slack of a group whose oldest token has, or will have, version `started`."""
    if bound is None:
        return None
    return bound if started is None else started + bound - version


def taken_slots(used: int, in_hand: int, groups_per_update: int) -> int:
    """Slots that are used up. A consumer may exceed its promise by at most one group before the version advances."""
    return min(used, groups_per_update) + in_hand


@dataclass(slots=True)
class GroupPace:
    """The slots of one consumer."""

    groups_per_update: int
    taken: int
    waiting: list[int]
    """Slacks of the groups that have started and are not delivered, ascending; only those with a deadline to meet."""

    @classmethod
    def of(cls, groups_per_update: int, taken: int, slacks: Sequence[Slack]) -> GroupPace:
        return cls(groups_per_update, taken, sorted(one for one in slacks if one is not None and one >= 0))

    def admits(self, slack: Slack) -> bool:
        """Whether a group with this slack may start."""
        if slack is None:
            return True
        if slack < 0:
            return False
        sooner = bisect_right(self.waiting, slack)
        later = range(sooner, len(self.waiting))
        return self._fits(slack, sooner + 1) and all(self._fits(self.waiting[place], place + 2) for place in later)

    def admit(self, slack: Slack) -> None:
        """Record that a group starts."""
        if slack is not None:
            self.waiting.insert(bisect_right(self.waiting, slack), slack)

    def room(self, slack: Slack, most: int) -> int:
        """How many groups with this slack may start, up to `most`."""
        trial, count = GroupPace(self.groups_per_update, self.taken, list(self.waiting)), 0
        while count < most and trial.admits(slack):
            trial.admit(slack)
            count += 1
        return count

    def delivers(self, slack: Slack) -> bool:
        """Whether a waiting group with this slack may be delivered now."""
        sooner = [one for one in self.waiting if slack is None or one < slack]
        return all(self._fits(one, place + 2) for place, one in enumerate(sooner))

    def deliver(self, slack: Slack) -> None:
        """Record that a group is delivered."""
        if slack is not None and slack >= 0:
            self.waiting.remove(slack)
        self.taken += 1

    def _fits(self, slack: int, groups: int) -> bool:
        return groups + self.taken <= (slack + 1) * self.groups_per_update
