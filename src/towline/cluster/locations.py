"""Where segments are stored: a local folder or an fsspec URL. Names are relative and use `/`.

Invariant: once `write` has returned, the file is complete and durable under its name; a name never has half a file.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from towline.common.files import sync_folder, write_atomically
from towline.errors import ConfigError

_CACHED = 64 * 2**20
"""Bytes of remote files kept in memory: the sessions of one segment are read one after the other."""


class Location(Protocol):
    """A folder of files, local or remote."""

    @property
    def name(self) -> str:
        """The folder or URL, as the store records it."""
        ...

    def write(self, name: str, data: pa.Buffer | bytes) -> None: ...

    def open(self, name: str) -> pa.NativeFile:
        """Open a file for reading. Raises `FileNotFoundError`, or another `OSError` if it cannot be read."""
        ...

    def exists(self, name: str) -> bool:
        """Whether the file exists; raises `OSError` if the location is down."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file; a missing one is fine."""
        ...

    def find(self, folder: str = "") -> Iterator[str]:
        """The names of all complete files in a folder and below it."""
        ...

    def folders(self) -> list[str]:
        """The names of the folders at the top."""
        ...

    def tidy(self, folder: str) -> None:
        """Remove incomplete files of dead writers from a folder."""
        ...


def open_location(place: str | Path) -> Location:
    """`place` is a folder, or a URL such as `s3://bucket/prefix`."""
    if isinstance(place, str) and "://" in place:
        return RemoteLocation(place)
    return LocalFolder(Path(place))


class LocalFolder:
    """A folder on this machine."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def name(self) -> str:
        return str(self.folder.absolute())

    def write(self, name: str, data: pa.Buffer | bytes) -> None:
        path = self.folder / name
        _make_folder(path.parent, self.folder)
        write_atomically(path, data, mode=0o600)

    def open(self, name: str) -> pa.NativeFile:
        # Not memory-mapped: a file that shrinks while it is mapped kills the process.
        return pa.OSFile(str(self.folder / name))

    def exists(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def delete(self, name: str) -> None:
        path = self.folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def find(self, folder: str = "") -> Iterator[str]:
        for path in sorted((self.folder / folder).rglob("*")):
            if path.suffix != ".tmp" and path.is_file():
                yield path.relative_to(self.folder).as_posix()

    def folders(self) -> list[str]:
        if not self.folder.is_dir():
            return []
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir())

    def tidy(self, folder: str) -> None:
        for path in (self.folder / folder).rglob("*.tmp"):
            path.unlink(missing_ok=True)


class RemoteLocation:
    """An fsspec URL. Reads are cached."""

    def __init__(self, place: str):
        try:
            from fsspec.core import url_to_fs

            self._remote, root = url_to_fs(place)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"server.segments {place!r} cannot be used: {error}") from error
        self._root = str(root).rstrip("/")
        self._name = place.rstrip("/")
        self._cache: OrderedDict[str, pa.Buffer] = OrderedDict()
        self._caching = threading.Lock()

    @property
    def name(self) -> str:
        return self._name

    def write(self, name: str, data: pa.Buffer | bytes) -> None:
        with self._reaching(name):
            self._remote.pipe_file(self._path(name), data if isinstance(data, bytes) else data.to_pybytes())

    def open(self, name: str) -> pa.NativeFile:
        with self._caching:
            data = self._cache.get(name)
        if data is not None:
            return pa.BufferReader(data)
        with self._reaching(name):
            data = pa.py_buffer(self._remote.cat_file(self._path(name)))
        with self._caching:
            self._cache[name] = data
            while sum(one.size for one in self._cache.values()) > _CACHED:
                self._cache.popitem(last=False)
        return pa.BufferReader(data)

    def exists(self, name: str) -> bool:
        with self._reaching(name):
            try:
                # Not from a listing that is remembered: others write here too.
                self._remote.invalidate_cache()
                return bool(self._remote.info(self._path(name))["type"] == "file")
            except FileNotFoundError:
                return False

    def delete(self, name: str) -> None:
        with self._caching:
            self._cache.pop(name, None)
        with self._reaching(name), contextlib.suppress(FileNotFoundError):
            self._remote.rm_file(self._path(name))

    def find(self, folder: str = "") -> Iterator[str]:
        root = self._path(folder) if folder else self._root
        yield from (self._relative(path) for path in self._listed(lambda: self._remote.find(root)))

    def folders(self) -> list[str]:
        found = self._listed(lambda: self._remote.ls(self._root, detail=True))
        return sorted(self._relative(one["name"]) for one in found if one["type"] == "directory")

    def tidy(self, folder: str) -> None:
        """Nothing to do: an object exists completely or not at all."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _relative(self, path: str) -> str:
        return str(path).strip("/").removeprefix(self._root.strip("/")).strip("/")

    def _listed(self, listing: Callable[[], Iterable[Any]]) -> list[Any]:
        with self._reaching("its files"):
            self._remote.invalidate_cache()
            try:
                return list(listing())
            except FileNotFoundError:
                return []

    @contextlib.contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        """Turn the drivers' own errors into `OSError`."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self._name}: {what}: {type(error).__name__}: {error}") from error


def _make_folder(folder: Path, root: Path) -> None:
    """Create a folder so that its name is durable too, up to the root."""
    if folder.is_dir():
        return
    if folder == root:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return
    _make_folder(folder.parent, root)
    folder.mkdir(exist_ok=True, mode=0o700)
    sync_folder(folder.parent)
