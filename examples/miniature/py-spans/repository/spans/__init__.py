"""Half-open spans of time and what can be computed from them."""

from spans.calendar import Calendar
from spans.span import Span, merge, subtract

__all__ = ["Calendar", "Span", "merge", "subtract"]
