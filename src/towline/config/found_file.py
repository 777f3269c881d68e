"""A settings file that was found in the working folder, and that the user did not name.

Such a file may have come with a repository or a data set. It cannot send anything to other machines, read variables, weaken
sandboxes, run code or write outside its own folder: those settings need a file that the user names with `--config` or
`TOWLINE_CONFIG`. Every setting is in one of the lists below; one that is in none is refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from towline.common.untrusted.data_files import DataFolder, UnsafePath
from towline.errors import ConfigError

VARIABLE = "TOWLINE_CONFIG"
"""Names the settings file, as `--config` does."""

FREE = frozenset(
    {
        *("log", "session"),
        *(f"gateway.{name}" for name in ("port", "control_port", "journal", "body_bytes", "ping_seconds")),
        *(f"gateway.{name}" for name in ("orphan_seconds", "drain_seconds", "sessions")),
        *(f"model.{name}" for name in ("renderer", "format", "special_text", "name")),
        *(
            f"engine.{name}"
            for name in ("kind", "model", "stall_seconds", "start_seconds", "seed", "threads", "max_batch", "context")
        ),
        *(f"node.{name}" for name in ("init_workers", "run_workers", "build_workers", "evaluate_workers")),
        *(f"node.{name}" for name in ("start_limit", "ahead", "warm", "seconds", "hold_seconds", "looping")),
        *(f"node.{name}" for name in ("resources", "log_bytes", "artifact_bytes")),
        *(f"images.{name}" for name in ("base", "pull")),
        *(f"server.{name}" for name in ("port", "nodes", "lost_seconds", "queue", "lease_seconds", "wait_seconds")),
        *(f"server.{name}" for name in ("keep_seconds", "silent_seconds", "pacing_seconds", "events", "body_bytes")),
        *(f"server.{name}" for name in ("stop_seconds", "callback_tries", "quarantine_deaths")),
    }
)
"""Numbers and choices that stay on this machine and in its sandboxes."""
INSIDE = frozenset({"gateway.data", "server.data", "model.folder", "model.template"})
"""Paths: only plain ones below the folder of the file, not through links."""
NAMED_ONLY = frozenset(
    {
        *("gateway.host", "gateway.control_host", "gateway.public_url"),
        *(
            "gateway.connections",
            "gateway.budgets",
            "gateway.image_hosts",
            "gateway.image_bytes",
            "gateway.image_seconds",
        ),
        *("engine.urls", "engine.key_variable", "engines"),
        *("node.egress", "node.total_memory_mb", "node.total_pids"),
        *("node.sandbox", "node.bases", "node.cache", "node.cache_bytes"),
        *("images.network", "images.insecure_registries", "images.mirrors", "images.store_bytes"),
        *("images.names", "images.allowed", "roots"),
        *("server.host", "server.database", "server.segments", "server.callback_hosts"),
        *("server.trust_submitters", "server.submitters_may", "server.trust_tasks"),
        *("server.auth", "server.tls_cert", "server.tls_key", "server.allowed_hosts", "server.http"),
        *("server.limits", "server.tenants"),
        "cluster",
    }
)
"""Addresses, keys, sandbox kinds, commands, shared folders, limits against hostile programs, and who is trusted."""


def check_found_file(path: Path) -> None:
    """Raise `ConfigError` if a settings file that was found sets what only a named one may."""
    try:
        text = DataFolder(path.parent).read_text(path.name)
        refused = [name for name in _keys(tomllib.loads(text)) if not _allowed(name[0], name[1], path)]
    except UnsafePath as error:
        raise ConfigError(f"{error}; {_how(path)}") from error
    if refused:
        names = ", ".join(dict.fromkeys(name for name, _ in refused))
        raise ConfigError(
            f"{path}: {names}: cannot be set by a settings file that was only found in the working folder; {_how(path)}"
        )


def _how(path: Path) -> str:
    return f"if you trust the file, name it: --config {path}, or {VARIABLE}={path}"


def _allowed(name: str, value: Any, path: Path) -> bool:
    if _covers(FREE, name):
        return True
    return name in INSIDE and isinstance(value, str) and _stays_inside(path.parent, value)


def _stays_inside(folder: Path, value: str) -> bool:
    try:
        DataFolder(folder).find(value)
    except UnsafePath:
        return False
    except FileNotFoundError:
        # Not there yet: a plain path that is created below the folder, or a missing file that is reported where it is used.
        return True
    except OSError:
        return False
    return True


def _covers(names: frozenset[str], name: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in names for length in range(1, len(parts) + 1))


def _keys(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the file by its path: a decision is about a section, or about one key of it."""
    for name, value in table.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and not _covers(FREE | NAMED_ONLY, path) and value:
            yield from _keys(value, f"{path}.")
        else:
            yield path, value
