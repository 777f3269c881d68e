"""From sections back to a file."""

from quoted_ini.values import needs_quotes


def dumps(sections):
    lines = []
    for section, values in sections.items():
        if section:
            lines.append(f"[{section}]")
        for name, value in values.items():
            lines.append(f"{name} = {quote(value) if needs_quotes(value) else value}")
        lines.append("")
    return "\n".join(lines)


def quote(value):
    return '"' + value + '"'
