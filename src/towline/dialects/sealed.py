"""Opaque texts that clients carry and send back untouched: signatures of thinking, encrypted reasoning.

They hold the reasoning itself, packed, so that a client that keeps only the signature still sends the reasoning back. They
are no secret and no proof: whatever a harness sends is read with bounds, and what is not ours reads as nothing.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode

_MARK = b"TWL1"
_LONGEST = 4 * 1024 * 1024


def seal(text: str) -> str:
    return b64encode(_MARK + zlib.compress(text.encode("utf-8", "surrogatepass"), 1)).decode()


def unseal(sealed: str) -> str | None:
    """The text that was sealed; `None` for anything else."""
    if len(sealed) > _LONGEST:
        return None
    try:
        data = b64decode(sealed, validate=True)
        if not data.startswith(_MARK):
            return None
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data[len(_MARK) :], _LONGEST)
        return text.decode("utf-8", "surrogatepass") if unpacker.eof else None
    except (ValueError, zlib.error):
        return None
