"""Upstream URLs as replicas: in place of a router, the workers that it lists.

sglang-router and vLLM's router hide what a token's version needs: which worker sampled, its label, its context length, its
pause. So a router's workers are replicas themselves, called directly, and its listing is read again as time goes by: workers
join and leave with it. A URL that lists no workers is a server itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp

from towline.engines.base import Engine
from towline.errors import EngineError

_LISTINGS = ("/workers", "/list_workers")
"""Where routers list their workers: sglang-router and vLLM's router; older routers."""
_RANK = re.compile(r"@\d+$")
"""The data-parallel rank at the end of a worker's URL: ranks of one server are one replica."""
_TIMEOUT = 10.0


class ReplicaListing(Protocol):
    """Where a pool's replicas are, as it changes."""

    interval: float
    """Seconds between two readings."""

    async def replicas(self) -> Mapping[str, str]:
        """URLs by name of the replica."""
        ...

    def make(self, url: str) -> Engine:
        """The engine for a replica."""
        ...


class Upstreams:
    """The replicas behind URLs that are servers or routers."""

    def __init__(
        self, urls: Sequence[str], make: Callable[[str], Engine], *, api_key: str = "", interval: float = 15.0
    ):
        self.urls = urls
        self.interval = interval
        self._make = make
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._listed: dict[str, list[str]] = {}
        """The workers that each router listed last."""

    def make(self, url: str) -> Engine:
        return self._make(url)

    async def replicas(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as http:
            for url in self.urls:
                for one in await self._workers(http, url) or [url]:
                    found[urlsplit(one).netloc] = one
        return found

    async def _workers(self, http: aiohttp.ClientSession, url: str) -> list[str]:
        """The workers of a router, or those it listed last if it cannot be reached; empty for a server."""
        base = url.rstrip("/").removesuffix("/v1")
        for path in _LISTINGS:
            try:
                async with http.get(base + path) as response:
                    answer = await response.json() if response.status == 200 else None
            except (aiohttp.ClientError, TimeoutError, ValueError):
                return self._listed.get(url, [])
            workers = read_workers(answer, base)
            if workers:
                self._listed[url] = workers
                return workers
        return []


def read_workers(answer: Any, router: str) -> list[str]:
    """The URLs in a router's listing; empty if it is none. Raises `EngineError` for workers that cannot be called."""
    if not isinstance(answer, Mapping):
        return []
    listed = answer.get("workers", answer.get("urls"))
    if not isinstance(listed, list):
        return []
    urls: list[str] = []
    for worker in listed:
        entry = worker if isinstance(worker, Mapping) else {"url": worker}
        kind = str(entry.get("worker_type", "regular"))
        if kind.lower() != "regular":
            raise EngineError(
                f"the router at {router} has {kind} workers: servers that split prefill and decode cannot be called one by "
                "one; attach a router of regular workers, or the servers themselves"
            )
        url = _RANK.sub("", str(entry.get("url", "")))
        if urlsplit(url).scheme not in ("http", "https"):
            raise EngineError(f"the router at {router} lists the worker {url!r}, which has no HTTP address")
        urls.append(url)
    return list(dict.fromkeys(urls))
