"""Clients of the four dialects, as simulated harnesses use them; `base` is the request shape they share in the audit."""

from __future__ import annotations

from towline.audit.clients.base import REASONING_FIELDS, DialectClient, GatewayRefused, WireJson, WireRequest
from towline.audit.clients.google import GoogleClient
from towline.audit.clients.messages import MessagesClient
from towline.audit.clients.openai import ChatClient, ResponsesClient

__all__ = ["DIALECTS", "REASONING_FIELDS", "DialectClient", "GatewayRefused", "WireJson", "WireRequest", "make_client"]

DIALECTS = ("chat", "responses", "messages", "google")


def make_client(dialect: str, *, open_reasoning: bool) -> DialectClient:
    """A client of a dialect. Without `open_reasoning` it gets reasoning only as signatures, where the dialect has them."""
    if dialect == "responses":
        return ResponsesClient(open_reasoning=open_reasoning)
    if dialect == "messages":
        return MessagesClient(open_reasoning=open_reasoning)
    return GoogleClient(open_reasoning=open_reasoning) if dialect == "google" else ChatClient()
