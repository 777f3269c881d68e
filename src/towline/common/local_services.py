"""Services that run on this machine for this user, so that its clients find their keys.

`towline serve` records where it listens and where its admin key is, in a file that only the user can read. A client
without a key looks there. A record counts only while its service holds a lock on it, and only on the machine, since the
boot, and in the network namespace in which it was written: a key is never sent to another service that has taken the port.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

from towline.common.private_files import is_private, private_folder, read_private
from towline.errors import ConfigError

_LOOPBACK = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class LocalService:
    """A service of this user on this machine."""

    url: str
    """Its own loopback address: another program can listen on the same port of another one."""
    key: str
    """Its admin key."""


@contextlib.contextmanager
def announced(url: str, key_file: Path) -> Iterator[None]:
    """Record a service for as long as the block runs. Nothing is recorded if the user has no writable state folder."""
    place = _place(url)
    lock = None
    if place is not None:
        with contextlib.suppress(OSError, ConfigError):
            private_folder(place.parent)
            lock = _write_locked(place, {"url": _local_url(url), "key_file": str(key_file.absolute())})
    try:
        yield
    finally:
        if place is not None and lock is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(lock), os.stat(place)):
                    place.unlink()
            os.close(lock)


def _write_locked(place: Path, record: dict[str, str | None]) -> int:
    """Write a record that is locked before it is visible; returns the descriptor that holds the lock."""
    draft = place.with_suffix(f".{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps(record).encode())
        os.replace(draft, place)
    except BaseException:
        os.close(descriptor)
        draft.unlink(missing_ok=True)
        raise
    return descriptor


def find_service(url: str) -> LocalService | None:
    """The service of this user at a loopback URL, if it runs."""
    place = _place(url)
    text = _locked_text(place) if place is not None else None
    if text is None:
        return None
    try:
        found = json.loads(text)
        address, path = str(found["url"]), Path(found["key_file"])
    except (ValueError, KeyError, TypeError):
        return None
    key = read_private(path)
    return LocalService(address, key.strip()) if key and key.strip() else None


def _locked_text(place: Path) -> str | None:
    """The text of a record whose service runs."""
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not is_private(os.fstat(descriptor)):
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().decode("utf-8", "replace")
        except OSError:
            return None
    return None


def _local_url(url: str) -> str | None:
    """The URL with a loopback address as its host; `None` if it is not on this machine's loopback."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        return None
    host = _LOOPBACK.get(host, host)
    if not (host.startswith("127.") or host == "::1"):
        return None
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port or (443 if parts.scheme == 'https' else 80)}"


def _place(url: str) -> Path | None:
    """The file of the service at a URL, in this boot and network namespace."""
    local = _local_url(url)
    if local is None:
        return None
    try:
        where = f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {os.readlink('/proc/thread-self/ns/net')}"
        base = Path(os.environ.get("XDG_STATE_HOME", ""))
        folder = base if base.is_absolute() else Path.home() / ".local" / "state"
    except (OSError, RuntimeError):
        return None
    return folder / "towline" / "services" / f"{sha256(f'{where} {local}'.encode()).hexdigest()[:32]}.json"
