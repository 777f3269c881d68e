"""The four dialects as simulated harnesses speak them; `base` is the shape they share inside the audit."""

from __future__ import annotations

from towline.audit.tongues.base import REASONING, Refused, Told, Tongue, Wired
from towline.audit.tongues.chat import Chat
from towline.audit.tongues.google import Google
from towline.audit.tongues.messages import Messages
from towline.audit.tongues.responses import Responses

__all__ = ["DIALECTS", "REASONING", "Refused", "Told", "Tongue", "Wired", "tongue"]

DIALECTS = ("chat", "responses", "messages", "google")


def tongue(dialect: str, *, open_reasoning: bool) -> Tongue:
    """A harness's way to speak a dialect. Without `open_reasoning` it gets reasoning as signatures, where those exist."""
    if dialect == "responses":
        return Responses(open_reasoning=open_reasoning)
    if dialect == "messages":
        return Messages(open_reasoning=open_reasoning)
    return Google(open_reasoning=open_reasoning) if dialect == "google" else Chat()
