"""How many sessions failed for reasons of infrastructure, by reason, and whether that is more than a run accepts.

Failed sessions are in no score and no training row; a run in which too many of them failed says nothing about the policy,
so the commands that run many sessions end with an error above a stated share.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from towline.schema.vocabulary import FailureReason

_SHOWN = 300
"""Characters of an example error that a message quotes."""


@dataclass
class FailureTally:
    """Failures among the sessions of a run."""

    sessions: int = 0
    """Sessions that ended, failed ones included; cancelled ones are not counted."""
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """The latest error for each reason."""

    def add_ended(self, count: int = 1) -> None:
        """Count sessions that ended without a failure."""
        self.sessions += count

    def add_failed(self, reason: FailureReason | None, error: str | None) -> None:
        name = (reason or FailureReason.INTERNAL).value
        self.sessions += 1
        self.reasons[name] += 1
        self.examples[name] = " ".join((error or "no error was recorded").split())[:_SHOWN]

    @property
    def failed(self) -> int:
        return self.reasons.total()

    @property
    def share(self) -> float:
        """Failed sessions among all that ended; 0 before the first has ended."""
        return self.failed / self.sessions if self.sessions else 0.0

    def as_json(self) -> dict[str, int]:
        """Failures by reason, most frequent first."""
        return dict(self.reasons.most_common())

    def exceeds(self, most: float) -> bool:
        return self.share > most

    def message(self, most: float) -> str:
        """Why a run in which failures exceed `most` ends with an error."""
        counts = ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())
        example = self.examples[self.reasons.most_common(1)[0][0]] if self.reasons else ""
        return (
            f"infrastructure failed {self.failed} of {self.sessions} sessions ({self.share:.0%}), more than the accepted "
            f"{most:.0%} (--max-failed): {counts}. Most frequent error: {example}"
        )
