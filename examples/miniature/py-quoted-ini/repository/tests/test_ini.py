import unittest

from quoted_ini import IniError, dumps, loads


class ReadTest(unittest.TestCase):
    def test_sections_and_values(self):
        self.assertEqual(loads("a = 1\n[b]\nc = 2\n"), {"": {"a": "1"}, "b": {"c": "2"}})

    def test_comments(self):
        self.assertEqual(loads("# one\n; two\na = 1 # three\nb = 2 ; four\n"), {"": {"a": "1", "b": "2"}})

    def test_a_line_without_a_name_is_named(self):
        with self.assertRaises(IniError) as caught:
            loads("a = 1\n= 2\n")
        self.assertEqual(caught.exception.line, 2)

    def test_an_open_section_is_an_error(self):
        with self.assertRaises(IniError):
            loads("[a\n")

    def test_a_value_may_contain_an_equals_sign(self):
        self.assertEqual(loads("a = b=c"), {"": {"a": "b=c"}})


class WriteTest(unittest.TestCase):
    def test_plain_values_come_back(self):
        sections = {"a": {"b": "c d", "e": ""}, "f": {"g": "1"}}
        self.assertEqual(loads(dumps(sections)), sections)
