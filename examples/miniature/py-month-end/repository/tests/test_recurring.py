import unittest
from datetime import date

from recurring import Monthly, Yearly, add_months, days_in_month, take


class MonthsTest(unittest.TestCase):
    def test_leap_years(self):
        self.assertEqual([days_in_month(year, 2) for year in (1900, 2000, 2023, 2024)], [28, 29, 28, 29])

    def test_a_month_later(self):
        self.assertEqual(add_months(date(2023, 12, 5), 1), date(2024, 1, 5))

    def test_the_last_day_of_a_shorter_month(self):
        self.assertEqual(add_months(date(2023, 1, 31), 1), date(2023, 2, 28))

    def test_many_months_later(self):
        self.assertEqual(add_months(date(2023, 1, 5), 25), date(2025, 2, 5))


class RulesTest(unittest.TestCase):
    def test_every_other_month(self):
        self.assertEqual(take(2, Monthly(date(2023, 1, 5), 2)), [date(2023, 1, 5), date(2023, 3, 5)])

    def test_yearly(self):
        self.assertEqual(take(2, Yearly(date(2023, 1, 5))), [date(2023, 1, 5), date(2024, 1, 5)])

    def test_after(self):
        self.assertEqual(Monthly(date(2023, 1, 5)).after(date(2023, 3, 5)), date(2023, 4, 5))

    def test_no_rule_stands_still(self):
        with self.assertRaises(ValueError):
            Monthly(date(2023, 1, 5), 0)
