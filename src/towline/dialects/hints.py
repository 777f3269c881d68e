"""What headers say about a call: its session, sub-agent and context window, and whether it is a retry.

Each harness has its own header names. For every hint the names are tried in order; the first usable value wins. Hints
inform roles and lineage; they never decide a match, so an absent or odd header is not an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from towline.conversation import Hints

_MAX_LENGTH = 256
"""Longer values are ignored: they are no identifiers, and hints are recorded with every turn."""

SESSION = (
    "x-claude-code-session-id",
    # Sub-agents of Codex name a thread as their parent; they share one session id.
    "thread-id",
    "thread_id",
    "x-session-id",
    "session-id",
    "session_id",
    "x-qwen-code-session-id",
    "x-opencode-session",
    "x-conversation-id",
    "conversation-id",
    "conversation_id",
    "x-session-affinity",
)
PARENT_SESSION = ("x-parent-session-id", "x-codex-parent-thread-id")
AGENT = ("x-claude-code-agent-id", "x-codex-agent-id", "x-openai-subagent")
WINDOW = ("x-codex-window-id",)
IDEMPOTENCY = ("idempotency-key", "x-idempotency-key")
RETRY_COUNT = "x-stainless-retry-count"
_NAMES = frozenset((*SESSION, *PARENT_SESSION, *AGENT, *WINDOW, *IDEMPOTENCY, RETRY_COUNT))


def read_hints(headers: Mapping[str, str]) -> Hints:
    """The hints of one call; header names are in lower case."""
    found = {name: value for name, value in headers.items() if name in _NAMES and 0 < len(value) <= _MAX_LENGTH}
    if not found:
        return Hints()
    return Hints(
        session=_first(found, SESSION),
        parent_session=_first(found, PARENT_SESSION),
        agent=_first(found, AGENT),
        window=_first(found, WINDOW),
        retry=_is_positive(found.get(RETRY_COUNT, "")),
        idempotency_key=_first(found, IDEMPOTENCY),
    )


def _first(found: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := found.get(name, ""))), "")


def _is_positive(count: str) -> bool:
    return count.isascii() and count.isdecimal() and count.strip("0") != ""
