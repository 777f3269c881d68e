import unittest

from ttlcache import TTLCache, memoize


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class CacheTest(unittest.TestCase):
    def setUp(self):
        self.clock = Clock()
        self.cache = TTLCache(2, 10, clock=self.clock)

    def test_a_written_value_is_read(self):
        self.cache.set("a", 1)
        self.assertEqual((self.cache.get("a"), self.cache.hits), (1, 1))

    def test_an_old_entry_is_gone(self):
        self.cache.set("a", 1)
        self.clock.now = 10
        self.assertEqual(self.cache.get("a", "none"), "none")

    def test_the_least_recently_used_goes_first(self):
        self.cache.set("a", 1)
        self.cache.set("b", 2)
        self.cache.get("a")
        self.cache.set("c", 3)
        self.assertEqual([key in self.cache for key in "abc"], [True, False, True])

    def test_purge_counts(self):
        self.cache.set("a", 1)
        self.clock.now = 11
        self.assertEqual(self.cache.purge(), 1)

    def test_writing_renews(self):
        self.cache.set("a", 1)
        self.clock.now = 6
        self.cache.set("a", 2)
        self.clock.now = 12
        self.assertEqual(self.cache.get("a"), 2)


class MemoTest(unittest.TestCase):
    def test_a_call_is_made_once(self):
        calls = []
        double = memoize(clock=Clock())(lambda x: calls.append(x) or 2 * x)
        self.assertEqual((double(2), double(2), calls), (4, 4, [2]))
