"""The `[gateway.budgets]` section: what one session may take of the gateway.

A harness runs untrusted code, so everything that it can ask for has a ceiling that no real harness reaches. What exceeds a
ceiling is refused in the harness's own API and attributed to it: a budget never fails a session as infrastructure.
"""

from __future__ import annotations

from pydantic import Field

from towline.config.section import Section


class SessionBudgets(Section):
    """Ceilings per session. A request over one is refused; a session that uses up `journal_bytes` or `refusals` ends, with
    end reason `limit`."""

    connections: int = Field(128, ge=1)
    """Most open connections. Further ones get status 429 and are closed."""
    buffered_bytes: int = Field(128 * 1024 * 1024, ge=1024)
    """Most bytes of request bodies that are being received at once."""
    header_bytes: int = Field(64 * 1024, ge=1024)
    """Most bytes of a request's headers."""
    header_seconds: float = Field(30.0, gt=0)
    """Longest time from a connection's first byte, or from its beginning, to the end of the request's headers."""
    body_seconds: float = Field(120.0, gt=0)
    """Longest time for a request's body to arrive."""
    idle_seconds: float = Field(900.0, gt=0)
    """How long a connection may be idle between two requests."""
    values: int = Field(500_000, ge=100)
    """Most JSON values in a request, at any depth."""
    messages: int = Field(20_000, ge=1)
    """Most messages, or history items, in a request."""
    tools: int = Field(2_000, ge=1)
    """Most tools in a request."""
    turns_in_flight: int = Field(128, ge=1)
    """Most turns that are sampled at once; `n` choices are `n` turns."""
    request_rate: float = Field(50.0, gt=0)
    """Requests per second, over time."""
    request_burst: int = Field(1_000, ge=1)
    """Requests that may exceed the rate before further ones are refused."""
    journal_bytes: int = Field(1024**3, ge=1024)
    """Most bytes that the session's turns write to the journal, images included."""
    refusals: int = Field(10_000, ge=1)
    """Requests and connections that may be refused; then the session ends."""
