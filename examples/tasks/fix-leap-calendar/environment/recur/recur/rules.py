from calendar import monthrange
from datetime import date, timedelta


def weekly(start: date, count: int) -> list[date]:
    """`count` dates, seven days apart, the first is `start`."""
    if count < 0:
        raise ValueError("count must not be negative")
    return [start + timedelta(weeks=week) for week in range(count)]


def monthly(start: date, count: int) -> list[date]:
    """`count` dates, one in each month."""
    dates = [start]
    while len(dates) < count:
        dates.append(_next_month(dates[-1]))
    return dates


def yearly(start: date, count: int) -> list[date]:
    """`count` dates, one in each year."""
    dates = [start]
    while len(dates) < count:
        last = dates[-1]
        dates.append(_fitting(last.year + 1, last.month, last.day))
    return dates


def _next_month(day: date) -> date:
    year, month = (day.year + 1, 1) if day.month == 12 else (day.year, day.month + 1)
    return _fitting(year, month, day.day)


def _fitting(year: int, month: int, day: int) -> date:
    """The day, or the last one that the month has."""
    return date(year, month, min(day, monthrange(year, month)[1]))
