"""Every dialect, in one list."""

from towline.dialects.base import Dialect
from towline.dialects.chat import ChatDialect
from towline.dialects.google import GoogleDialect
from towline.dialects.messages import MessagesDialect
from towline.dialects.responses import ResponsesDialect


def all_dialects() -> list[Dialect]:
    """Every dialect that the gateway serves; the first one answers unknown paths."""
    return [ChatDialect(), ResponsesDialect(), MessagesDialect(), GoogleDialect()]
