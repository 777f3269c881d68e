"""Sections of `name = value` lines; `#` and `;` start a comment."""

from quoted_ini.values import strip_comment


class IniError(ValueError):
    """A line that cannot be read; `line` is its number, from 1."""

    def __init__(self, line, reason):
        super().__init__(f"line {line}: {reason}")
        self.line = line


def loads(text):
    """The sections by name, each with its values by name. Values before the first section are in the section ''."""
    sections = {}
    current = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        if line.startswith("["):
            name, bracket, rest = line[1:].partition("]")
            if not bracket or strip_comment(rest):
                raise IniError(number, "a section is a name in brackets")
            current = name.strip()
            sections.setdefault(current, {})
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise IniError(number, "expected `name = value`")
        try:
            sections.setdefault(current, {})[name.strip()] = strip_comment(value)
        except ValueError as error:
            raise IniError(number, str(error)) from error
    return sections
