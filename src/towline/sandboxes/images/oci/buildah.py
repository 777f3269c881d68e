"""Runs buildah over the node's own image store, in the namespaces of `namespace.py`; never the user's store or settings.

Any number of processes share a store. Each operation holds a shared lock and leaves a marker while it runs; whoever finds
the store idle and a marker in it removes what an interrupted operation left. The store is a cache, bounded by `max_bytes`:
it is emptied when an operation ends and more than half is used, and an operation that would exceed the bound is ended.

Credentials come from the file that `REGISTRY_AUTH_FILE` names, and from nowhere else; builds do not see them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from towline.sandboxes.base import SandboxError, Unsupported
from towline.sandboxes.images.oci import namespace
from towline.sandboxes.images.oci.operation import OnLine, StoreOperation
from towline.sandboxes.subprocesses import isolated_python

AUTH_VARIABLE = "REGISTRY_AUTH_FILE"
NEEDED = {"buildah": "buildah", "bwrap": "bubblewrap", "tar": "tar"}
"""Programs and the packages that have them."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_POLL_SECONDS = 0.1
_WATCH_SECONDS = 2.0
"""Seconds between two looks at the size of the store."""
_CLEAN_SECONDS = 600.0
_POLICY = {"default": [{"type": "insecureAcceptAnything"}]}
_POLICY_FILES = ("/etc/containers/policy.json",)
_CLEAN = "buildah rm --all >/dev/null 2>&1; rm -rf work tmp; mkdir -p work tmp home"
_EMPTY = "rm -rf storage work tmp home && mkdir work tmp home"
log = logging.getLogger("towline.sandboxes")


@dataclass(frozen=True, slots=True)
class Registries:
    """How registries are reached."""

    insecure: Collection[str] = ()
    """Hosts (`name:port`) that may be asked over plain HTTP."""
    mirrors: Mapping[str, str] = field(default_factory=dict)
    """Registries and the mirrors that are asked first."""


class Buildah:
    """The image store below one folder."""

    def __init__(self, folder: Path, *, max_bytes: int, registries: Registries | None = None):
        self.folder = folder
        self.max_bytes = max_bytes
        self._registries = registries or Registries()
        mapping = namespace.image_user_mapping()
        self._owner = mapping.outside(0)
        # The files of a store belong to the users inside: other users, another store.
        self._store = folder / f"store-{self._owner}-{mapping.mapped}"
        self._made = False

    @staticmethod
    def missing() -> list[str]:
        """The packages that this machine lacks to pull and build images."""
        return [package for program, package in NEEDED.items() if shutil.which(program) is None]

    async def run(
        self,
        command: Sequence[str],
        *,
        what: str,
        seconds: float,
        network: bool = False,
        credentials: bool = False,
        stdin: IO[bytes] | None = None,
        take_output: Callable[[IO[bytes]], object] | None = None,
        on_line: OnLine | None = None,
    ) -> str:
        """Run a command in the store, and return its standard output, or give it to `take_output`, in a thread.

        `on_line` receives the other output by line. `BuildahError` if the command fails, takes too long or makes the store
        too large. Whatever happens, no process of it is left.
        """
        if missing := self.missing():
            raise Unsupported(f"{what} needs {' and '.join(missing)}, which this machine does not have")
        async with self._in_store():
            operation = StoreOperation(what, on_line)
            await self._start(
                operation,
                command,
                network=network,
                credentials=credentials,
                stdin=stdin,
                raw_output=take_output is not None,
            )
            watching = asyncio.ensure_future(self._too_large())
            try:
                return await operation.finish(seconds, watching, take_output)
            finally:
                watching.cancel()
                await operation.end()

    async def empty(self) -> bool:
        """Remove all images and build layers, unless an operation is running; whether they were removed."""
        await asyncio.to_thread(self._make)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _lock(lock, fcntl.LOCK_EX):
                return False
            await self._script(_EMPTY)
            await asyncio.to_thread(self._remove_markers)
            return True
        finally:
            os.close(lock)

    async def used(self) -> int:
        """Bytes of the store."""
        if self.missing() or not await asyncio.to_thread(self._store.is_dir):
            return 0
        return int((await self._script("du -sxk .")).split()[0]) * 1024

    async def shrink(self) -> None:
        """Empty the store if more than half of its bound is used and no operation is running."""
        if await self.used() > self.max_bytes // 2 and await self.empty():
            log.info("the image store in %s was emptied: more than half of its limit was used", self.folder)

    async def _script(self, script: str) -> str:
        """The output of a short script in the store, which takes no part in its locks."""
        await asyncio.to_thread(self._make)
        operation = StoreOperation("the image store")
        await self._start(operation, ("sh", "-c", script))
        try:
            return await operation.finish(_CLEAN_SECONDS)
        finally:
            await operation.end()

    async def _start(
        self,
        operation: StoreOperation,
        command: Sequence[str],
        *,
        network: bool = False,
        credentials: bool = False,
        stdin: IO[bytes] | None = None,
        raw_output: bool = False,
    ) -> None:
        with contextlib.ExitStack() as stack:
            auth = await asyncio.to_thread(_auth_file) if credentials else None
            secret = stack.enter_context(contextlib.closing(auth)).fileno() if auth is not None else -1
            theirs, operation.life = os.pipe()
            stack.callback(os.close, theirs)
            output = subprocess.PIPE
            if raw_output:
                operation.output, output = os.pipe()
                stack.callback(os.close, output)
            helper = isolated_python(namespace.PROGRAM, self._store, int(network), theirs, secret, *command)
            operation.process = await asyncio.create_subprocess_exec(
                *helper,
                stdin=stdin if stdin is not None else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                pass_fds=[theirs, *([secret] if secret >= 0 else [])],
                env=self._environment(credentials=credentials, auth=secret >= 0),
                start_new_session=True,
            )

    @contextlib.asynccontextmanager
    async def _in_store(self) -> AsyncIterator[None]:
        """Hold the store's shared lock and a marker; clean up after operations that were interrupted."""
        await asyncio.to_thread(self._make)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        marker = self.folder / "active" / secrets.token_hex(8)
        try:
            if _lock(lock, fcntl.LOCK_EX) and await asyncio.to_thread(self._remove_markers):
                await self._script(_CLEAN)
            while not _lock(lock, fcntl.LOCK_SH):  # noqa: ASYNC110 - another process holds it
                await asyncio.sleep(_POLL_SECONDS)
            await asyncio.to_thread(marker.touch)
            yield
            await asyncio.to_thread(marker.unlink)
        finally:
            os.close(lock)

    def _remove_markers(self) -> bool:
        """Whether there were markers of interrupted operations. Call with the exclusive lock."""
        left = list((self.folder / "active").iterdir())
        for marker in left:
            marker.unlink()
        return bool(left)

    async def _too_large(self) -> str:
        """Why the operation has to end, once the store is larger than its bound. Measured when the disk gets fuller."""
        step = max(self.max_bytes // 16, 1)
        free = await asyncio.to_thread(_free_bytes, self._store)
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            now = await asyncio.to_thread(_free_bytes, self._store)
            if now > free - step:
                continue
            free = now
            if await self.used() > self.max_bytes:
                return f"the image store is larger than {self.max_bytes:,} bytes; raise `images.store_bytes`"

    def _make(self) -> None:
        if self._made:
            return
        (self.folder / "active").mkdir(parents=True, exist_ok=True, mode=0o700)
        self._store.mkdir(exist_ok=True, mode=0o700)
        for name in ("work", "tmp", "home"):
            folder = self._store / name
            folder.mkdir(exist_ok=True, mode=0o700)
            if os.geteuid() == 0:
                os.chown(folder, self._owner, self._owner)
        self._write(self._storage_name, _storage_text())
        self._write(self._registries_name, registries_text(self._registries))
        self._write("policy.json", json.dumps(_POLICY))
        self._made = True

    def _write(self, name: str, text: str) -> None:
        """A settings file in the store, complete or absent."""
        path = self._store / name
        if not path.exists():
            new = self._store / f"{name}.{secrets.token_hex(4)}"
            new.write_text(text)
            new.chmod(0o644)
            new.rename(path)

    @property
    def _storage_name(self) -> str:
        return f"storage-{_short_hash(_storage_text())}.conf"

    @property
    def _registries_name(self) -> str:
        return f"registries-{_short_hash(registries_text(self._registries))}.conf"

    @property
    def policy(self) -> list[str]:
        """The option for a signature policy: the machine's own where there is one, else none is required."""
        if any(os.path.exists(path) for path in _POLICY_FILES):
            return []
        return ["--signature-policy", f"{namespace.STORE}/policy.json"]

    def _environment(self, *, credentials: bool, auth: bool) -> dict[str, str]:
        inside = namespace.STORE
        made = {
            "PATH": os.environ.get("PATH", _PATH) + ":" + _PATH,
            "HOME": f"{inside}/home",
            "TMPDIR": f"{inside}/tmp",
            "XDG_RUNTIME_DIR": "/run",
            "CONTAINERS_STORAGE_CONF": f"{inside}/{self._storage_name}",
            "CONTAINERS_REGISTRIES_CONF": f"{inside}/{self._registries_name}",
            "BUILDAH_ISOLATION": "chroot",
            # As `buildah unshare` says it: root of a user namespace, not of the machine.
            "_CONTAINERS_USERNS_CONFIGURED": "done",
            "_CONTAINERS_ROOTLESS_UID": str(namespace.USER_ID),
            "_CONTAINERS_ROOTLESS_GID": str(namespace.USER_ID),
        }
        if auth:
            made[AUTH_VARIABLE] = namespace.AUTH
        if credentials:
            for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"):
                if name in os.environ:
                    made[name] = os.environ[name]
        return made


def _storage_text() -> str:
    inside = namespace.STORE
    lines = [
        "[storage]",
        'driver = "overlay"',
        # Mounts are private to one operation, and so is what is recorded about them.
        'runroot = "/run/containers"',
        f'graphroot = "{inside}/storage"',
        f'rootless_storage_path = "{inside}/storage"',
        "[storage.options.overlay]",
        # With a single user id, every file belongs to it.
        f'ignore_chown_errors = "{str(namespace.image_user_mapping().mapped == 1).lower()}"',
    ]
    return "\n".join([*lines, ""])


def registries_text(registries: Registries) -> str:
    """The registries.conf of these settings."""
    insecure = set(registries.insecure)
    lines: list[str] = []
    for name in sorted(insecure | set(registries.mirrors)):
        lines += ["[[registry]]", f"location = {json.dumps(name)}", f"insecure = {str(name in insecure).lower()}"]
        if name in registries.mirrors:
            mirror = registries.mirrors[name]
            host = mirror.partition("/")[0]
            plain = str(host in insecure).lower()
            lines += ["[[registry.mirror]]", f"location = {json.dumps(mirror)}", f"insecure = {plain}"]
    return "\n".join([*lines, ""])


def _auth_file() -> IO[bytes] | None:
    """The content of the file of credentials, in memory: neither its path nor its owner means anything inside."""
    path = os.environ.get(AUTH_VARIABLE)
    if not path:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise SandboxError(
            f"cannot read the registry credentials {path} ({AUTH_VARIABLE}): {error.strerror}"
        ) from error
    file = os.fdopen(os.memfd_create("auth", os.MFD_CLOEXEC), "wb+")
    file.write(content)
    file.seek(0)
    return file


def _lock(lock: int, how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _free_bytes(folder: Path) -> int:
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
