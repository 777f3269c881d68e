"""Where damaged files go: kept as they are, never deleted, each named in one line of the log."""

from __future__ import annotations

import logging
import secrets
import shutil
from pathlib import Path

log = logging.getLogger("towline.quarantine")
FOLDER = "quarantine"


class Quarantine:
    """A folder for what cannot be read. Nothing reads from it; people do."""

    def __init__(self, folder: Path):
        self.folder = folder

    def move(self, path: Path, why: str) -> Path:
        """Move a file or folder here, under a name of its own."""
        place = self._place(path.name)
        # Not `rename` alone: the quarantine may be on another file system.
        shutil.move(path, place)
        self._tell(path, place, why)
        return place

    def copy(self, path: Path, why: str) -> Path:
        """Keep the file as it is now; it is about to be replaced."""
        place = self._place(path.name)
        shutil.copy2(path, place)
        self._tell(path, place, why)
        return place

    def place(self, name: str, why: str) -> Path:
        """A path here that is free, for something that the caller writes."""
        place = self._place(name)
        self._tell(Path(name), place, why)
        return place

    def make_folder(self, path: Path) -> None:
        """Make a folder with those above it; what stands in its place and is no folder comes here."""
        if path.exists() and not path.is_dir():
            self.move(path, "a folder should be there")
        path.mkdir(parents=True, exist_ok=True)

    def _place(self, name: str) -> Path:
        if self.folder.exists() and not self.folder.is_dir():
            self.folder.rename(self.folder.with_name(f"{self.folder.name}-{secrets.token_hex(4)}"))
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / name
        return place if not place.exists() else self.folder / f"{name}-{secrets.token_hex(4)}"

    def _tell(self, path: Path, place: Path, why: str) -> None:
        log.error("damaged: %s: %s; kept as it is in %s", path, " ".join(why.split())[:300], place)
