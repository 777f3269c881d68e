"""Moves the wall clock of a Python process by the seconds that a file names, while it runs.

On `PYTHONPATH` of a server and its node hosts it has the effect of a stepped system clock: `time.time` jumps, and monotonic
clocks and timers do not. The file is read at most every 50 ms.
"""

import os
import time

_FILE = os.environ.get("TOWLINE_CHAOS_CLOCK", "")
_REAL, _REAL_NS = time.time, time.time_ns
_state = [0.0, 0.0]


def _offset():
    now = time.monotonic()
    if now - _state[1] > 0.05:
        _state[1] = now
        try:
            with open(_FILE) as file:
                _state[0] = float(file.read() or 0.0)
        except (OSError, ValueError):
            pass
    return _state[0]


if _FILE:
    time.time = lambda: _REAL() + _offset()
    time.time_ns = lambda: _REAL_NS() + int(_offset() * 1e9)
