"""The journal: an append-only, checksummed log of turns, written before a harness sees its reply.

Invariant: what `append` has acknowledged is in the log after the crash that the mode survives, in order, exactly once.
A record that was never acknowledged may be there or not; half a record never is.

| mode    | `append` returns after                     | process killed     | machine crash, power loss         |
|---------|--------------------------------------------|--------------------|-----------------------------------|
| `GROUP` | fdatasync of the batch that contains it    | survives           | survives                          |
| `OS`    | write() to the kernel                      | survives           | newest segment may lose or tear   |
| `NONE`  | hand-over to the writer thread's memory    | may lose the newest| newest segment may lose or tear   |

A journal is a folder of numbered segments. A segment has a versioned header, frames, and, once it is complete, a seal with
its number of records, synced before its successor is created. So only the newest segment can be torn, and a truncation of
any other is detected. A frame's checksum covers its segment and offset: a frame is valid only where it was written, and
bytes of a payload cannot pass for a frame.

Damage that a crash explains (a torn end of the newest segment) is repaired at opening. Any other damage is
`JournalCorrupt`, including a damaged frame followed by a valid one: acknowledged records may be lost in it. With a
quarantine the journal opens nevertheless: damaged segments are moved there, and replaced by their valid records.

A process never appends to a segment of another process: after a failed sync the kernel may keep pages in memory, marked
clean, that never reached the disk. An unsealed segment is therefore copied, synced and sealed at opening.

Why not a library: SQLite, LMDB and RocksDB are built for lookups and updates, which a write-ahead log of turns never needs,
and cost a database transaction per turn. The journal needs one sequential write and one shared fdatasync per batch from an
event loop, records that embed numpy arrays without a copy, per-session compaction, and damage that is reported instead of
silently skipped. The file format is stable: `_VERSION` in `segments` changes only with a migration.

`segments` has the files and the encoding of records, `log` the open journal.
"""

from towline.gateway.journal.log import Journal, SyncMode, replay
from towline.gateway.journal.segments import Disk, JournalCorrupt, JournalError, Record, RecordError, decode, encode

__all__ = [
    "Disk",
    "Journal",
    "JournalCorrupt",
    "JournalError",
    "Record",
    "RecordError",
    "SyncMode",
    "decode",
    "encode",
    "replay",
]
