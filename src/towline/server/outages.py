"""An outage in a few log lines, however many calls meet it: when it begins, once a minute, and when it is over."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("towline.server")
_EVERY = 60.0
"""Seconds between two lines; and without a call for so long, the next one meets a new outage."""


class Outage:
    def __init__(self, what: str):
        self.what = what
        """What is away."""
        self.reason = ""
        """What the last call met; empty while there is no outage."""
        self._began = 0.0
        self._latest = 0.0
        self._said = 0.0
        self._calls = 0

    def met(self, reason: str) -> None:
        """A call failed on it."""
        now = time.monotonic()
        if not self.reason or now - self._latest > _EVERY:
            self._began, self._calls = now, 0
        self.reason, self._latest = reason, now
        self._calls += 1
        if self._calls == 1:
            self._said = now
            log.warning("%s away, calls are tried again until it is back: %s", self.what, reason)
        elif now - self._said >= _EVERY:
            self._said = now
            log.warning(
                "%s still away after %.0f s and %d calls: %s", self.what, now - self._began, self._calls, reason
            )

    def over(self) -> None:
        """A call succeeded."""
        if self.reason:
            self.reason = ""
            log.warning(
                "%s back after %.0f s; %d calls met the outage", self.what, self._latest - self._began, self._calls
            )
