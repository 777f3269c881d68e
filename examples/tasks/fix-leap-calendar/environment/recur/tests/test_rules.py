import unittest
from datetime import date

from recur import monthly, weekly, yearly


class Rules(unittest.TestCase):
    def test_weekly(self):
        assert weekly(date(2024, 2, 26), 2) == [date(2024, 2, 26), date(2024, 3, 4)]

    def test_monthly(self):
        assert monthly(date(2023, 11, 5), 3) == [date(2023, 11, 5), date(2023, 12, 5), date(2024, 1, 5)]

    def test_yearly(self):
        assert yearly(date(2024, 2, 29), 2) == [date(2024, 2, 29), date(2025, 2, 28)]
