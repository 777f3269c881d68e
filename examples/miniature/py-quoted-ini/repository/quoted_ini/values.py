"""Values as they are written in a file."""


def strip_comment(text):
    """The value without blanks around it and without the comment behind it."""
    for mark in "#;":
        text = text.partition(mark)[0]
    return text.strip()


def needs_quotes(value):
    return value != value.strip() or any(character in value for character in '#;"\\\n\t')
