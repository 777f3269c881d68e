"""The garbage collector of a process that serves for long.

Every request makes thousands of short-lived objects, which reference counting frees at once; the cyclic collector finds
next to nothing among them. With Python's defaults it looks through everything that is loaded, again and again, for a
third of a busy gateway's CPU. So what start-up left is set aside once, and collections are rare.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG, _MIDDLE, _OLD = 20_000, 20, 20
"""Objects made but not freed before the youngest are looked through; how many such rounds before the next older ones."""


@contextmanager
def serving_for_long() -> Iterator[None]:
    """Collect seldom, and never what is loaded now, until the block ends."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
