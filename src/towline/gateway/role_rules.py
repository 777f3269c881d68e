"""The role that a setting gives a call: `session.roles`, by model name, system prompt and tools."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import takewhile

from towline.config import RoleRule
from towline.conversation import Request


def ruled(rules: Sequence[RoleRule], request: Request) -> str:
    """The role of the first rule that matches the request; empty if none does."""
    return next((rule.role.value for rule in rules if _matches(rule, request)), "")


def _matches(rule: RoleRule, request: Request) -> bool:
    if rule.model is not None and not fnmatchcase(request.model, rule.model):
        return False
    if rule.system is not None:
        leading = takewhile(lambda message: message.role == "system", request.messages)
        if not re.search(rule.system, "\n".join(message.text for message in leading)):
            return False
    if rule.tools is None:
        return True
    if not rule.tools:
        return not request.tools
    return any(fnmatchcase(tool.name, rule.tools) for tool in request.tools)
