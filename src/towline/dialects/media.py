"""Images, sounds and files inside messages: known by the digest of their bytes, handed on as a URL.

The same picture sent as a data URL in two spellings has one digest. A remote file is known by its URL, since nothing is
fetched here. Only `data:`, `http:` and `https:` go on to an engine: any other scheme would let a harness name files of
the engine's machine.
"""

from __future__ import annotations

from binascii import a2b_base64
from hashlib import sha256
from urllib.parse import unquote_to_bytes

from towline.conversation import Media
from towline.dialects.reading import wrong_value


def from_url(kind: str, url: str, offset: int, where: str) -> Media:
    """Media behind a data URL or a remote one."""
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        head, comma, data = url.partition(",")
        if not comma:
            wrong_value(where, "it is a data URL without data")
        content = _decode(data, where) if head.lower().endswith(";base64") else unquote_to_bytes(data)
        return Media(kind, sha256(content).hexdigest(), url, offset)
    if not scheme.startswith(("http://", "https://")):
        wrong_value(where, "expected a data URL or an http(s) URL")
    return Media(kind, sha256(url.encode()).hexdigest(), url, offset)


def from_base64(kind: str, data: str, mime: str, offset: int, where: str) -> Media:
    """Media whose bytes are in the request as bare base64."""
    return Media(kind, sha256(_decode(data, where)).hexdigest(), f"data:{mime};base64,{data}", offset)


def _decode(data: str, where: str) -> bytes:
    compact = "".join(data.split())
    try:
        return a2b_base64(compact, strict_mode=True)
    except ValueError:
        wrong_value(where, "it is not valid base64")
