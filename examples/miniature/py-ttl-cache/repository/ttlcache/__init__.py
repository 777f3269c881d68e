"""A small cache whose entries expire."""

from ttlcache.cache import TTLCache
from ttlcache.memo import memoize

__all__ = ["TTLCache", "memoize"]
