"""Entries expire a fixed time after they were written; the least recently used one goes when there is no room."""

import time
from collections import OrderedDict


class TTLCache:
    def __init__(self, limit, seconds, clock=time.monotonic):
        if limit < 1:
            raise ValueError("a cache needs room for at least one entry")
        self.limit = limit
        self.seconds = seconds
        self._clock = clock
        self._entries = OrderedDict()
        self.hits = self.misses = 0

    def get(self, key, default=None):
        entry = self._entries.get(key)
        if entry is None or self._expired(entry):
            self._entries.pop(key, None)
            self.misses += 1
            return default
        self.hits += 1
        self._entries[key] = (entry[0], self._clock())
        self._entries.move_to_end(key)
        return entry[0]

    def set(self, key, value):
        self._entries.pop(key, None)
        while len(self._entries) >= self.limit:
            self._entries.popitem(last=False)
        self._entries[key] = (value, self._clock())

    def purge(self):
        """Drop what has expired; how many entries that were."""
        expired = [key for key, entry in self._entries.items() if self._expired(entry)]
        for key in expired:
            del self._entries[key]
        return len(expired)

    def _expired(self, entry):
        return self._clock() - entry[1] >= self.seconds

    def __len__(self):
        return len(self._entries)

    def __contains__(self, key):
        entry = self._entries.get(key)
        return entry is not None and not self._expired(entry)
