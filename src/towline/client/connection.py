"""The address of the service, and how a response becomes a value, an error, or a retry. Shared by both clients.

Every call of the service is idempotent, so a call that may not have arrived is sent again.
"""

from __future__ import annotations

import os
import random
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from towline.client import calls
from towline.client.calls import ApiCall
from towline.client.errors import ClientError, Unreachable
from towline.common.local_services import LocalService, find_service

RETRIED = frozenset({429, 502, 503, 504})
"""Statuses after which a call is retried."""


@dataclass
class RetryBackoff:
    """The pauses between the attempts of one call: exponential, with jitter."""

    patience: float
    """Seconds from the first attempt to the start of the last."""
    first: float = 0.1
    longest: float = 10.0
    began: float = field(default_factory=time.monotonic)
    attempts: int = 0

    def pause(self, asked: float | None = None) -> float | None:
        """Seconds until the next attempt, at least what the server asked for; `None` when the patience is used up."""
        grown = min(self.longest, self.first * 2.0 ** min(self.attempts, 30))
        self.attempts += 1
        wanted = max(random.uniform(grown / 2, grown), asked or 0.0)
        left = self.began + self.patience - time.monotonic()
        return wanted if wanted <= left else None


def retry_after(value: str | None) -> float | None:
    """The seconds of a `Retry-After` header; a date is left to the backoff."""
    try:
        seconds = float(value) if value is not None else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86_400 else None


URL, KEY, CA = "TOWLINE_URL", "TOWLINE_KEY", "TOWLINE_CA"
DEFAULT_URL = "http://127.0.0.1:8600"


class ServiceConnection:
    """Address and key of the service, the client's patience, and the rules of one request.

    Without a key, that of a service of this user on this machine is used, as `towline serve` records it. It is looked up
    when it is needed: the service may start after the client, or start again with another key.
    """

    def __init__(self, url: str | None, key: str | None, timeout: float, patience: float, ca: str | Path | None = None):
        self.url = (url or os.environ.get(URL) or DEFAULT_URL).rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ClientError(f"{self.url!r} is not the URL of a service, such as {DEFAULT_URL}")
        self._key = (os.environ.get(KEY) or None) if key is None else key
        self._ca = ca or os.environ.get(CA) or None
        self._local: LocalService | None = None
        self._older = False
        """Whether the service is of a version that needs the older form of calls."""
        self.timeout = timeout
        self.patience = patience

    def options(self) -> dict[str, Any]:
        """Options of an httpx client for this service."""
        options: dict[str, Any] = {"base_url": self.url, "timeout": self.timeout}
        if self._ca is not None:
            try:
                options["verify"] = ssl.create_default_context(cafile=str(self._ca))
            except (OSError, ssl.SSLError) as error:
                raise ClientError(f"cannot read the certificates in {self._ca} ({CA}): {error}") from error
        return options

    def request(self, call: ApiCall[Any]) -> dict[str, Any]:
        if self._older and call.older is not None:
            call = call.older
        base, authorization = self._credentials()
        content = {"Content-Type": "application/json"} if call.body is not None else {}
        return {
            "method": call.method,
            "url": base + call.path,
            "params": call.params,
            "content": call.body,
            "headers": {"Accept": call.accept} | content | authorization,
            "timeout": httpx.Timeout(self.timeout, read=self.timeout + call.waits),
        }

    def _credentials(self) -> tuple[str, dict[str, str]]:
        """The URL to send a request to, and its header with the key."""
        if self._key is not None:
            return self.url, {"Authorization": f"Bearer {self._key}"} if self._key else {}
        if self._local is None:
            self._local = find_service(self.url)
        if self._local is None:
            return self.url, {}
        # Its own address: the name in the URL can also lead to another program on the same port.
        path = urlsplit(self.url).path
        return self._local.url + path, {"Authorization": f"Bearer {self._local.key}"}

    def _look_again(self) -> bool:
        """Whether a key of this machine is found that is not the one just used."""
        if self._key is not None:
            return False
        before, self._local = self._local, find_service(self.url)
        return self._local is not None and self._local != before

    def backoff(self) -> RetryBackoff:
        return RetryBackoff(self.patience)

    def event_request(self, after: int | None) -> dict[str, Any]:
        """A request for events; silence longer than the read timeout means that the connection is dead."""
        base, authorization = self._credentials()
        resumed = {} if after is None else {"Last-Event-ID": str(after)}
        headers = {"Accept": "text/event-stream"} | resumed | authorization
        return {"method": "GET", "url": f"{base}/v1/events", "headers": headers, "timeout": self.timeout}

    def is_answer(self, call: ApiCall[Any], response: httpx.Response) -> bool:
        """Whether the response is the service's answer to the call, and not that of a proxy in front of it."""
        is_json = response.headers.get("Content-Type", "").startswith("application/json")
        return response.is_success or (response.status_code in call.also and is_json)

    def retry_pause(self, response: httpx.Response, backoff: RetryBackoff, call: ApiCall[Any] | None = None) -> float:
        """Seconds to pause before a retry; raises if a retry does not help."""
        if response.status_code == 405 and call is not None and call.older is not None and not self._older:
            self._older = True
            return 0.0
        if response.status_code == 401 and self._look_again():
            return 0.0
        if response.status_code in RETRIED:
            pause = backoff.pause(retry_after(response.headers.get("Retry-After")))
            if pause is not None:
                return pause
        raise calls.failure(response.status_code, response.content)

    def reconnect_pause(self, error: httpx.HTTPError, backoff: RetryBackoff) -> float:
        """Seconds to pause after a failed connection; raises `Unreachable` when the patience is used up."""
        self._local = None
        transient = isinstance(error, httpx.NetworkError | httpx.TimeoutException | httpx.RemoteProtocolError)
        pause = backoff.pause() if transient else None
        if pause is None:
            reason = str(error) or type(error).__name__
            raise Unreachable(f"no response from {self.url} after {backoff.attempts} attempts: {reason}") from error
        return pause
