"""The log of a command: for a person at a terminal, as plain lines in a file or a pipe, or as JSON."""

from __future__ import annotations

import json
import logging
import time

from rich.console import Console
from rich.logging import RichHandler

from towline.config import LogFormat

_OWN = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}
"""What every record has; whatever else is there was given with `extra`."""


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the fields that the record was given."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        told |= {name: value for name, value in record.__dict__.items() if name not in _OWN}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def log(console: Console, style: LogFormat = "text") -> None:
    """Log warnings to where the console writes. Off a terminal no line is wrapped, whatever its length."""
    handler: logging.Handler
    if style == "text" and console.is_terminal:
        handler = RichHandler(console=console)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(console.file)
        plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        handler.setFormatter(JsonLines() if style == "json" else plain)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
