"""Arithmetic with months."""

from datetime import date

_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def is_leap(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in_month(year, month):
    return 29 if month == 2 and is_leap(year) else _DAYS[month - 1]


def add_months(day, months):
    """The same day so many months later, or the last one of that month if it is shorter."""
    year, month = day.year, day.month + months
    while month > 12:
        year, month = year + 1, month - 12
    return date(year, month, min(day.day, days_in_month(year, month)))
