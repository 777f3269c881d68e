"""Remote images of a request: refused, or fetched by the gateway from hosts that the operator allows.

Invariant: no engine ever sees a URL that a harness sent. An engine that fetched it would reach, for a sandbox without a
network, every host that the engine can reach, and would carry data out in the URL. By default only media in the request
itself (`data:`) are accepted. An image of an allowed host is fetched here, without redirects, from an address that was
checked after it was resolved, up to a size and a time; the turn then contains the image itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from base64 import b64encode
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from towline.common.addresses import AddressRefused, Resolve, checked_addresses, is_allowed
from towline.conversation import Media, Message
from towline.errors import BadRequest

_CHUNK = 65_536
_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
FOLLOW_REDIRECTS = False
"""An allowed host may send on to any other: only what it serves itself is taken."""
_PORTS = {"http": 80, "https": 443}


class RemoteImages:
    """Fetches images from allowed hosts."""

    def __init__(self, hosts: Sequence[str], max_bytes: int, seconds: float, *, resolver: Resolve | None = None):
        self._hosts = tuple(hosts)
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._resolver = resolver

    async def fetch(self, media: Media) -> Media:
        """The same media with its content in it. Raises `BadRequest` with the reason."""
        refuse_remote(media, self._hosts)
        url = urlsplit(media.url)
        host, port = url.hostname or "", url.port or _PORTS[url.scheme.lower()]
        try:
            addresses = await checked_addresses(host, port, resolver=self._resolver)
            async with asyncio.timeout(self._seconds):
                kind, content = await self._get(media.url, host, addresses)
        except AddressRefused as error:
            raise BadRequest(f"the image {_shown(media.url)} is refused: {error}") from error
        except TimeoutError as error:
            raise BadRequest(f"the image {_shown(media.url)} did not arrive in {self._seconds:g} s") from error
        except aiohttp.ClientError as error:
            raise BadRequest(f"the image {_shown(media.url)} cannot be fetched: {error}") from error
        data = f"data:{kind};base64,{b64encode(content).decode()}"
        return replace(media, digest=hashlib.sha256(content).hexdigest(), url=data)

    async def _get(self, url: str, host: str, addresses: Sequence[str]) -> tuple[str, bytes]:
        connector = aiohttp.TCPConnector(resolver=_Pinned(addresses), use_dns_cache=False)
        async with (
            aiohttp.ClientSession(connector=connector, auto_decompress=False, trust_env=False) as web,
            web.get(url, allow_redirects=FOLLOW_REDIRECTS, headers={"accept": ", ".join(_TYPES)}) as answer,
        ):
            if answer.status != 200:
                raise BadRequest(f"the image {_shown(url)} cannot be fetched: status {answer.status}")
            kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind not in _TYPES or answer.headers.get("content-encoding", "identity") != "identity":
                raise BadRequest(f"{_shown(url)} is not an image of type {', '.join(_TYPES)}")
            content = bytearray()
            async for chunk in answer.content.iter_chunked(_CHUNK):
                content += chunk
                if len(content) > self._max_bytes:
                    raise BadRequest(f"the image {_shown(url)} is larger than {self._max_bytes} bytes")
            return kind, bytes(content)


def refuse_remote(media: Media, hosts: Sequence[str]) -> None:
    """Raise `BadRequest` unless media is an image whose host is allowed: the gateway is the only way out of a sandbox."""
    url = urlsplit(media.url)
    try:
        port = url.port or _PORTS.get(url.scheme.lower(), 0)
    except ValueError:
        port = 0
    if media.kind == "image" and port and not url.username and is_allowed(url.hostname or "", port, hosts):
        return
    raise BadRequest(
        f"the URL {_shown(media.url)} is not fetched: send the {media.kind} itself as a data URL or base64, or ask the "
        "operator to list its host in gateway.image_hosts"
    )


def remote_media(messages: Sequence[Message]) -> list[tuple[Message, Media]]:
    """The media of messages that are not in the messages themselves."""
    return [(message, media) for message in messages for media in message.media if media.url[:5].lower() != "data:"]


async def inline_remote_media(
    messages: Sequence[Message], fetched: MutableMapping[str, Media], images: RemoteImages
) -> bool:
    """Replace remote media of messages by their content, or raise `BadRequest`; whether there was any.

    `fetched` keeps them by URL, so that a history shows the same image in every request.
    """
    remote = remote_media(messages)
    for _, media in remote:
        if media.url not in fetched:
            fetched[media.url] = await images.fetch(media)
    for message, _ in remote:
        message.media = tuple(
            replace(fetched[media.url], offset=media.offset) if media.url in fetched else media
            for media in message.media
        )
        message.fingerprint = None
    return bool(remote)


def _shown(url: str) -> str:
    return url if len(url) <= 80 else url[:80] + "…"


class _Pinned(AbstractResolver):
    """Answers with the addresses that were checked."""

    def __init__(self, addresses: Sequence[str]):
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found: list[Any] = [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST,
            }
            for address in self._addresses
        ]
        return found

    async def close(self) -> None:
        """Nothing is held."""
