"""Names that the service gives out."""

from __future__ import annotations

import re
import secrets

from towline.schema import Unit

_RESULT = re.compile(r"(session|group)-([1-9][0-9]{0,17})-([0-9a-f]{8})")


def session_id(task_id: str, sample: int, attempt: int) -> str:
    """A fresh name that begins with the task's; no two attempts share one."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", task_id).strip("-._")[:60] or "session"
    return f"{slug}-{sample}-{attempt}-{secrets.token_hex(4)}"


def result_id(unit: Unit | str, seq: int, token: str) -> str:
    """Names a result for ever: the token is the store's own, so that results of two stores are never confused."""
    return f"{unit}-{seq}-{token}"


def parse_result_id(name: str, token: str) -> tuple[Unit, int] | None:
    """Unit and number of a result of this store; `None` for anything else."""
    found = _RESULT.fullmatch(name)
    return (Unit(found[1]), int(found[2])) if found and found[3] == token else None
