"""Budgets: how many tokens, sessions, seconds and how much money a run may use, and what is left of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from towline.errors import ConfigError
from towline.trainers.curriculum.store import Spending

KINDS = ("tokens", "sessions", "seconds", "money")


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens cost, in any currency."""

    prompt: float = 0.0
    sampled: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Price:
        """`PROMPT:SAMPLED`, per million tokens."""
        prompt, colon, sampled = text.partition(":")
        try:
            made = cls(float(prompt), float(sampled))
        except ValueError:
            made = cls(-1.0)
        if not colon or not made.prompt >= 0 or not made.sampled >= 0:
            raise ConfigError(f"the price {text!r} is not of the form PROMPT:SAMPLED, per million tokens")
        return made

    def of(self, spent: Spending) -> float:
        return (self.prompt * spent.prompt_tokens + self.sampled * spent.sampled_tokens) / 1e6


@dataclass(frozen=True, slots=True)
class RunBudget:
    """Limits of a run; `None` for no limit."""

    tokens: float | None = None
    """Prompt and sampled tokens."""
    sessions: float | None = None
    seconds: float | None = None
    """Wall time of the run, over all restarts."""
    money: float | None = None
    price: Price = field(default_factory=Price)

    @classmethod
    def parse(cls, given: Sequence[str], price: str = "") -> RunBudget:
        """From `kind=amount` texts."""
        limits: dict[str, float] = {}
        for text in given:
            kind, equals, amount = text.partition("=")
            try:
                value = float(amount) if equals and kind in KINDS else -1.0
            except ValueError:
                value = -1.0
            if not value > 0:
                raise ConfigError(f"--budget {text!r} is not of the form KIND=AMOUNT with one of: {', '.join(KINDS)}")
            limits[kind] = value
        if "money" in limits and not price:
            raise ConfigError("a budget of money needs --price PROMPT:SAMPLED, per million tokens")
        return cls(**limits, price=Price.parse(price) if price else Price())

    def used(self, spent: Spending) -> dict[str, float]:
        return {
            "tokens": float(spent.prompt_tokens + spent.sampled_tokens),
            "sessions": float(spent.sessions),
            "seconds": spent.seconds,
            "money": self.price.of(spent),
        }

    def remainder(self, spent: Spending) -> dict[str, float]:
        """What is left of each limit, never below 0."""
        limits = {"tokens": self.tokens, "sessions": self.sessions, "seconds": self.seconds, "money": self.money}
        used = self.used(spent)
        return {kind: max(0.0, limit - used[kind]) for kind, limit in limits.items() if limit is not None}

    def exhausted(self, spent: Spending) -> str:
        """The first limit that is used up; empty if none is."""
        return next((kind for kind, left in self.remainder(spent).items() if left <= 0), "")

    def line(self, spent: Spending) -> str:
        """What is left, in one line; empty without limits."""
        left = self.remainder(spent)
        return ", ".join(
            f"{amount:,.2f} {kind}" if kind == "money" else f"{amount:,.0f} {kind}" for kind, amount in left.items()
        )

    def as_json(self, spent: Spending) -> dict[str, Any]:
        return {
            "used": self.used(spent),
            "remainder": self.remainder(spent),
            "exhausted": self.exhausted(spent) or None,
        }
