import unittest

from spans import Calendar, Span, merge, subtract


class SpanTest(unittest.TestCase):
    def test_touching_spans_become_one(self):
        self.assertEqual(merge([Span(0, 5), Span(5, 9)]), [Span(0, 9)])

    def test_separate_spans_stay(self):
        self.assertEqual(merge([Span(6, 9), Span(0, 5)]), [Span(0, 5), Span(6, 9)])

    def test_empty_spans_vanish(self):
        self.assertEqual(merge([Span(3, 3)]), [])

    def test_no_span_ends_before_it_starts(self):
        with self.assertRaises(ValueError):
            Span(3, 2)

    def test_subtract(self):
        self.assertEqual(subtract(Span(0, 10), [Span(2, 4)]), [Span(0, 2), Span(4, 10)])


class CalendarTest(unittest.TestCase):
    def test_free_between_meetings(self):
        calendar = Calendar(0, 100)
        calendar.add("a", 10, 20)
        calendar.add("b", 40, 50)
        self.assertEqual(calendar.free("a", "b", at_least=15), [Span(20, 40), Span(50, 100)])
