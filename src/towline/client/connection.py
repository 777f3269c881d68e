"""Where the service is, and how an answer becomes a value, an error, or another attempt. Shared by both clients."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import httpx

from towline.client import calls
from towline.client.calls import Call
from towline.client.errors import ClientError, Unreachable
from towline.client.retry import AGAIN, Backoff, retry_after

URL, KEY = "TOWLINE_URL", "TOWLINE_KEY"
DEFAULT_URL = "http://127.0.0.1:8600"


class Connection:
    """The address and key of a service, the client's patience, and the rules of one exchange."""

    def __init__(self, url: str | None, key: str | None, timeout: float, patience: float):
        self.url = (url or os.environ.get(URL) or DEFAULT_URL).rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ClientError(f"{self.url!r} is not the URL of a service, such as {DEFAULT_URL}")
        self._key = os.environ.get(KEY, "") if key is None else key
        self.timeout = timeout
        self.patience = patience

    def options(self) -> dict[str, Any]:
        """What an httpx client of this service is made with."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        return {"base_url": self.url, "headers": headers, "timeout": self.timeout}

    def request(self, call: Call[Any]) -> dict[str, Any]:
        headers = {"Accept": call.accept} | ({"Content-Type": "application/json"} if call.body is not None else {})
        return {
            "method": call.method,
            "url": call.path,
            "params": call.params,
            "content": call.body,
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout, read=self.timeout + call.waits),
        }

    def backoff(self) -> Backoff:
        return Backoff(self.patience)

    def listening(self, after: int | None) -> dict[str, Any]:
        """A request for events; silence longer than the read timeout means that the connection is dead."""
        resumed = {} if after is None else {"Last-Event-ID": str(after)}
        return {"headers": {"Accept": "text/event-stream"} | resumed, "timeout": self.timeout}

    def answered(self, call: Call[Any], answer: httpx.Response) -> bool:
        """Whether this is the service's answer to the call; a proxy before it answers in its own words."""
        spoken = answer.headers.get("Content-Type", "").startswith("application/json")
        return answer.is_success or (answer.status_code in call.also and spoken)

    def refused(self, answer: httpx.Response, backoff: Backoff) -> float:
        """The seconds to pause before another attempt; raises for what another attempt does not change."""
        if answer.status_code in AGAIN:
            pause = backoff.pause(retry_after(answer.headers.get("Retry-After")))
            if pause is not None:
                return pause
        raise calls.failure(answer.status_code, answer.content)

    def broken(self, error: httpx.HTTPError, backoff: Backoff) -> float:
        """The seconds to pause after a connection that failed; raises when patience is at its end."""
        passing = isinstance(error, httpx.NetworkError | httpx.TimeoutException | httpx.RemoteProtocolError)
        pause = backoff.pause() if passing else None
        if pause is None:
            said = str(error) or type(error).__name__
            raise Unreachable(f"no answer from {self.url}, {backoff.attempts} attempts: {said}") from error
        return pause
