"""Help texts: short lines that say the default."""

from __future__ import annotations

from collections.abc import Iterator

import click
import typer.main

from towline.cli import app

LONGEST = 80


def commands(command: click.Command, path: str = "towline") -> Iterator[tuple[str, click.Command]]:
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{path} {name}")


def test_every_help_line_is_short_and_says_the_default() -> None:
    wrong = []
    for path, command in commands(typer.main.get_command(app)):
        first = " ".join((command.help or "").split("\n\n")[0].split())
        if not 0 < len(first) <= LONGEST:
            wrong.append(f"{path}: {len(first)} characters: {first}")
        for parameter in command.params:
            text = getattr(parameter, "help", None) or ""
            if parameter.name in ("help", "install_completion", "show_completion"):
                continue
            if not 0 < len(text) <= LONGEST:
                wrong.append(f"{path} {parameter.name}: {len(text)} characters: {text}")
            # typer prints every default but none, empty text and a flag that is off.
            shown = parameter.required or not any(parameter.default is empty for empty in (None, "", False))
            if parameter.param_type_name == "option" and not shown and "Default: " not in text:
                wrong.append(f"{path} {parameter.name} does not say its default: {text}")
    assert not wrong, "\n".join(wrong)
