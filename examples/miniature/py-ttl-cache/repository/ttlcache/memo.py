"""A decorator that remembers what a function returned."""

import functools

from ttlcache.cache import TTLCache

_MISSING = object()


def memoize(limit=128, seconds=60.0, **options):
    def decorate(function):
        cache = TTLCache(limit, seconds, **options)

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            key = (args, tuple(sorted(kwargs.items())))
            value = cache.get(key, _MISSING)
            if value is _MISSING:
                value = function(*args, **kwargs)
                cache.set(key, value)
            return value

        wrapper.cache = cache
        return wrapper

    return decorate
