"""Array types of tokens and what comes with each token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
"""Token ids, policy versions or turn numbers: one entry per token."""
Floats = npt.NDArray[np.float32]
"""Logprobs: one entry per token."""

LOGPROB_SLACK = 1e-6
"""How far above 0 rounding may put a logprob."""
