"""Callbacks through which long work reports its progress."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str], None]
"""Called with one line that says what is being done."""
OnCount = Callable[[int, int, str], None]
"""Called with the number of steps done, their total, and a label."""
