"""Garbage collection in a long-running server.

Every request creates thousands of short-lived objects, which reference counting frees at once; the cyclic collector finds
almost nothing among them. With Python's defaults it traverses everything that is loaded over and over, which takes a third
of a busy gateway's CPU. So the objects of start-up are frozen once, and collections are rare.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG, _MIDDLE, _OLD = 20_000, 20, 20
"""Thresholds of the three generations."""


@contextmanager
def gc_tuning() -> Iterator[None]:
    """Collect rarely, and never what is loaded now, until the block ends."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
