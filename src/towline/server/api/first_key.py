"""The admin key of the first start: in `admin.key` in the data folder, for the user that runs the service.

Every start without an admin key in the store makes a new one, whatever the file holds: a key that was revoked, or deleted
with its row, never works again.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from towline.common.private_files import read_private, write_private
from towline.schema import Role
from towline.server.api.auth import KeyStore, new_secret
from towline.server.errors import Unauthorized

log = logging.getLogger("towline.server")
NAME = "admin.key"


async def ensure_admin_key(keys: KeyStore, data: Path) -> Path | None:
    """The file with an admin key that works, which is created if the store has no admin key; else `None`.

    The file is durable before the key works: a crash in between leaves a file without effect, which the next start replaces.
    """
    path = data / NAME
    if not any(Role.ADMIN in key.roles for key in await keys.list()):
        secret = new_secret()
        await asyncio.to_thread(write_private, path, secret + "\n")
        await keys.create(NAME, [Role.ADMIN], key=secret)
        return path
    given = await asyncio.to_thread(read_private, path)
    if given is None:
        if path.exists():
            log.warning("%s is ignored: it must be a file with mode 600 of the user that runs the service", path)
        return None
    try:
        caller = await keys.caller(f"Bearer {given.strip()}")
    except Unauthorized:
        return None
    return path if caller.may() else None
