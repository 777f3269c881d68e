"""Named points in the code where a test can kill the process, to prove what survives a crash.

`TOWLINE_CRASH_AT="name"` or `"name:nth"` in the environment kills the process with SIGKILL when that point is reached for
the nth time: no handler runs, no buffer is flushed, exactly as with `kill -9`. The variable is read once, at import.
Without it a crash point is one comparison.
"""

from __future__ import annotations

import os
import signal
import threading

from towline.errors import ConfigError

VARIABLE = "TOWLINE_CRASH_AT"


def _parse(setting: str) -> tuple[str | None, int]:
    name, colon, nth = setting.partition(":")
    if colon and not (nth.isdecimal() and int(nth) > 0):
        raise ConfigError(f"{VARIABLE}={setting!r}: use 'name' or 'name:nth', counting from 1")
    return name or None, int(nth) if colon else 1


_name, _left = _parse(os.environ.get(VARIABLE, ""))
_counting = threading.Lock()


def crash_point(name: str) -> None:
    """Kill the process here if `TOWLINE_CRASH_AT` names this point."""
    if name != _name:
        return
    global _left
    with _counting:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
