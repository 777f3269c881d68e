"""Limits on what a client may send to the service before, and while, it is heard."""

from __future__ import annotations

from pydantic import Field

from towline.config.section import Section


class HttpLimits(Section):
    """Limits per connection and per client address. They apply before a key is known, to every client."""

    header_bytes: int = Field(64 * 1024, ge=1024, le=1024**2)
    """Largest request line and headers together, trailers included."""
    headers: int = Field(128, ge=16, le=1000)
    """Maximum number of headers."""
    header_seconds: float = Field(10.0, gt=0, le=600)
    """How long the headers of a request may take to arrive, from the first byte, or from the connection."""
    body_seconds: float = Field(300.0, gt=0, le=86_400)
    """How long the body of a request may take to arrive."""
    idle_seconds: float = Field(300.0, gt=0, le=86_400)
    """How long a connection may stay open between two requests, or without taking any of its response."""
    connections: int = Field(4096, ge=1, le=1_000_000)
    """Maximum number of connections. At the limit, the oldest one that never sent a valid key is closed."""
    connections_per_address: int = Field(1024, ge=1, le=1_000_000)
    """The same per client address. Behind a proxy all clients have the proxy's address."""
    key_guesses: int = Field(20, ge=1, le=100_000)
    """Unknown keys per minute and client address; then 429 for every key that was not used before."""
