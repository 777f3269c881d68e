"""Seeds of random tests: each is printed, continuous integration always uses the same, and an option may set it."""

from __future__ import annotations

import os
import random


def chosen_seed(given: int | None = None) -> int:
    """The given seed, else a new one by hand and a fixed one in continuous integration."""
    seed = given if given is not None else 20261118 if os.environ.get("CI") else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return seed
