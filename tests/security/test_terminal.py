"""Attacks on the terminal of a person who looks at what agents, tasks and servers wrote."""

from __future__ import annotations

import io
import json
import logging
import re
from typing import Any

import pytest
from rich.live import Live
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from support.security.attack import attack, without
from towline.cli import terminal
from towline.common.text import ascii_json
from towline.common.untrusted.inert_console import InertConsole

HOSTILE = {
    "colour": "\x1b[31mred\x1b[0m",
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "link": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "clear": "\x1b[2J\x1b[H",
    "query": "\x1b[6n",
    "csi": "\x9b31m",
    "osc": "\x9d0;owned\x9c",
    "dcs": "\x90q\x9c",
    "delete": "\x7f\x7f",
    "bidi": "\u202egnp.exe\u202c",
    "isolate": "\u2066evil\u2069",
    "zero width": "a\u200bb\u2060c\ufeff",
    "line": "one\u2028two\u0085three",
    "tags": "\U000e0001\U000e0041",
    "shift": "\x0e\x0f",
}
STRIPPED = {"return": "safe\rrm -rf", "backspace": "safe\b\b\b\bevil", "bell": "\x07"}
"""What rich takes out of text by itself."""
_ACTS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e0fff]")
_OURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
"""What a console itself sends: styles, and the cursor of a live display."""


def _acted_on(output: str, hostile: str) -> list[str]:
    """The characters of the hostile text that reached the terminal as they were."""
    if hostile in output:
        return [hostile]
    return _ACTS.findall(_OURS.sub("", output))


def _shown(text: str, way: str) -> str:
    out = io.StringIO()
    console = InertConsole(file=out, force_terminal=True, width=200)
    if way == "print":
        console.print(text, markup=False, highlight=False)
    elif way == "soft":
        console.print(Text(text), soft_wrap=True)
    elif way == "table":
        table = Table("a", title=text)
        table.add_row(text)
        table.add_row(Text(text, "bold red"))
        console.print(table)
    elif way == "panel":
        console.print(Panel(text, title=Text(text)))
    elif way == "tree":
        tree = Tree(Text(text))
        tree.add(Text(text))
        console.print(tree)
    elif way == "live":
        with Live(Text(text), console=console, auto_refresh=False) as live:
            live.update(Text(text), refresh=True)
    elif way == "progress":
        with Progress(console=console, auto_refresh=False) as progress:
            progress.add_task(terminal.escape_markup(text))
            progress.refresh()
    return out.getvalue()


def _as_is(text: str) -> str:
    return text


@attack("51", guard=without(("towline.common.untrusted.inert_console.inert", _as_is)))
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("way", ["print", "table", "soft"])
def test_text_acts_on_the_terminal(name: str, way: str) -> Any:
    return _acted_on(_shown(HOSTILE[name], way), HOSTILE[name])


@attack("51", guard=without(("towline.common.untrusted.inert_console.inert", _as_is)))
@pytest.mark.parametrize("way", ["panel", "tree", "live", "progress"])
def test_text_acts_on_the_terminal_in_every_display(way: str) -> Any:
    return _acted_on(_shown(HOSTILE["csi"], way), HOSTILE["csi"])


@attack("51", guard=without(("towline.cli.terminal.escape", lambda text: text.replace("[", "\\["))))
@pytest.mark.parametrize(
    "text", ["\\[bold red]evil", "\\\\\\[link=http://evil.example]x", "a\\[/]b", "\\[blink]x", "\\[conceal]x"]
)
def test_text_styles_itself(text: str) -> Any:
    out = io.StringIO()
    console = InertConsole(file=out, force_terminal=True, width=200, highlight=False)
    try:
        console.print(terminal.escape_markup(text))
    except Exception as error:
        return error
    return out.getvalue() != f"{text}\n"


@attack("51", guard=without(("towline.cli.terminal.inert", _as_is)))
@pytest.mark.parametrize("name", ["colour", "title", "csi", "bidi"])
def test_log_lines_act_on_the_terminal(name: str) -> Any:
    record = logging.LogRecord("towline", logging.WARNING, "", 0, "session failed: %s", (HOSTILE[name],), None)
    line = terminal.RedactingFormatter(logging.Formatter("%(message)s")).format(record)
    return _acted_on(line, HOSTILE[name])


@attack("51", guard=without(("towline.cli.terminal.InertConsole", terminal.Console)))
@pytest.mark.parametrize("name", ["colour", "csi", "bidi"])
def test_errors_act_on_the_terminal(name: str, capsys: pytest.CaptureFixture[str]) -> Any:
    terminal.print_error(f"the service answered: {HOSTILE[name]}")
    return _acted_on(capsys.readouterr().err, HOSTILE[name])


@attack("51", guard=without((f"{__name__}.ascii_json", _as_is)))
@pytest.mark.parametrize("name", ["csi", "bidi", "tags", "line"])
def test_json_acts_on_the_terminal(name: str) -> Any:
    text = json.dumps({"error": HOSTILE[name]}, ensure_ascii=False)
    shown = ascii_json(text)
    assert json.loads(shown) == {"error": HOSTILE[name]}
    return _acted_on(shown, HOSTILE[name])


@pytest.mark.parametrize("name", STRIPPED)
@pytest.mark.parametrize("way", ["print", "table", "soft", "panel"])
def test_text_cannot_write_over_text(name: str, way: str) -> None:
    assert not _acted_on(_shown(STRIPPED[name], way), STRIPPED[name])


def test_ordinary_text_is_unchanged() -> None:
    text = "plain [x] text, ü ñ 漢字 🙂 → ok"
    for way in ("print", "table"):
        assert text in _shown(text, way)
