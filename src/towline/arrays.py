"""The array types that tokens travel in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
"""Token ids, policy versions and turn numbers: one entry a token."""
Floats = npt.NDArray[np.float32]
"""Log-probabilities: one entry a token."""

LOGPROB_SLACK = 1e-6
"""How far above 0 a log probability may stand from rounding."""
