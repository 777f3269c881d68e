"""When something comes round again."""

from recur.rules import monthly, weekly, yearly

__all__ = ["monthly", "weekly", "yearly"]
