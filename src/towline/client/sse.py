"""Server-sent events, line by line."""

from __future__ import annotations

from pydantic import ValidationError

from towline.client.errors import BadAnswer
from towline.errors import TowlineError
from towline.schema import Event
from towline.schema.files import load_json


class Lines:
    """Collects the lines of one event; a blank line ends it."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def take(self, line: str) -> Event | None:
        """The event that this line completes, if it does. Comments, which keep the connection alive, are passed over."""
        if line:
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            return None
        text, self._data = "\n".join(self._data), []
        if not text:
            return None
        try:
            return Event.model_validate(load_json(text))
        except (ValidationError, TowlineError) as error:
            raise BadAnswer(f"not an event: {error}") from error
