"""The provider APIs that harnesses speak."""

from towline.dialects.base import Dialect
from towline.dialects.chat import ChatDialect


def all_dialects() -> list[Dialect]:
    """Every dialect the gateway serves; the first answers paths that none of them names."""
    return [ChatDialect()]
