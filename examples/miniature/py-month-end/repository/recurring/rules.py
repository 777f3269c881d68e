"""Rules give an endless sequence of dates, beginning with their first."""

from itertools import islice

from recurring.months import add_months


class Monthly:
    def __init__(self, first, every=1):
        if every < 1:
            raise ValueError("a rule needs a positive number of months")
        self.first = first
        self.every = every

    def __iter__(self):
        day = self.first
        while True:
            yield day
            day = add_months(day, self.every)

    def after(self, day):
        """The first date of the rule that is later than `day`."""
        return next(found for found in self if found > day)


class Yearly(Monthly):
    def __init__(self, first, every=1):
        super().__init__(first, every * 12)


def take(number, rule):
    return list(islice(rule, number))
