"""Dates that come back."""

from recurring.months import add_months, days_in_month
from recurring.rules import Monthly, Yearly, take

__all__ = ["Monthly", "Yearly", "add_months", "days_in_month", "take"]
