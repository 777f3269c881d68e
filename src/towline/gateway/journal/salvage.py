"""A damaged journal made whole: the damaged files are kept as they are elsewhere, and their valid records stay.

Every segment that a crash does not explain is replaced, in one step, by a sealed one with the records in it that are still
valid where they stand. Segments behind a gap move up. A crash in the middle leaves some records twice, which readers bear.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from towline.gateway.journal.segments import (
    Disk,
    JournalCorrupt,
    SegmentReader,
    UnknownFormat,
    rewrite,
    segment_path,
    sync_folder,
    valid_payloads,
)
from towline.quarantine import Quarantine


def make_whole(folder: Path, quarantine: Quarantine, disk: Disk) -> None:
    """Repair every segment of a journal that is not open."""
    for draft in folder.glob("[0-9]*.tmp"):
        if draft.is_dir():
            quarantine.move(draft, "a file should be there")
    files = {int(path.stem): path for path in folder.iterdir() if re.fullmatch(r"\d{8,}\.seg", path.name)}
    numbers = sorted(files)
    for place, number in enumerate(numbers):
        target = numbers[0] + place
        payloads = _kept(folder, number, newest=number == numbers[-1], quarantine=quarantine)
        if payloads is None and target == number:
            continue
        rewrite(folder, target, valid_payloads(folder, number) if payloads is None else payloads, disk, "recover")
        if target != number:
            segment_path(folder, number).unlink(missing_ok=True)
            sync_folder(folder)


def _kept(folder: Path, number: int, *, newest: bool, quarantine: Quarantine) -> Iterator[bytes] | None:
    """The records that are left of a damaged segment; `None` for one that is whole."""
    path = segment_path(folder, number)
    reader = SegmentReader(folder, number, newest=newest)
    try:
        for _ in reader:
            pass
    except UnknownFormat as error:
        quarantine.copy(path, str(error))
        return iter(())
    except JournalCorrupt as error:
        quarantine.copy(path, f"{error.reason}, at offset {error.offset}")
        return valid_payloads(folder, number)
    except OSError as error:
        # A folder in its place, or a disk that cannot read it.
        quarantine.move(path, str(error))
        return iter(())
    return None
