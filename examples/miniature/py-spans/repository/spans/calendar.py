"""Meetings of several people, in minutes since midnight."""

from spans.span import Span, merge, subtract


class Calendar:
    def __init__(self, opens=9 * 60, closes=17 * 60):
        self.day = Span(opens, closes)
        self._meetings = {}

    def add(self, person, start, end):
        meeting = Span(start, end)
        if not meeting.overlaps(self.day):
            raise ValueError("the meeting is outside the working day")
        self._meetings.setdefault(person, []).append(meeting)

    def busy(self, *people):
        """When at least one of the people is busy."""
        return merge(span for person in people for span in self._meetings.get(person, []))

    def free(self, *people, at_least=1):
        """When all of the people are free, for at least so many minutes."""
        return [span for span in subtract(self.day, self.busy(*people)) if span.length >= at_least]
