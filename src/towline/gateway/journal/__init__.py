"""The journal: an append-only, checksummed log of turns, written before a harness sees its reply.

Invariant: what `append` has acknowledged is in the log after the crash that the mode survives, in order, exactly once.
A record that was never acknowledged may be there or not; half a record never is.

| mode    | `append` returns after                     | process killed     | machine crash, power loss         |
|---------|--------------------------------------------|--------------------|-----------------------------------|
| `GROUP` | fdatasync of the batch that holds it       | survives           | survives                          |
| `OS`    | write() to the kernel                      | survives           | newest segment may lose or tear   |
| `NONE`  | hand-over to the writer thread's memory    | may lose the newest| newest segment may lose or tear   |

A journal is a folder of numbered segments. A segment has a versioned header, frames, and, once it is complete, a seal
that holds its number of records, synced before its successor is created. So only the newest segment can be torn, and a
cut in any other is noticed. A frame's checksum covers its segment and offset: a valid frame is valid only where it was
written, and bytes of a payload cannot pass for one.

Damage that a crash explains (a torn end of the newest segment) is repaired at opening. Any other is `JournalCorrupt`,
including a damaged frame with a valid one behind it: acknowledged records may be in there. With a quarantine the journal
opens nevertheless: damaged segments are kept there as they are, and replaced by their valid records (`salvage`).

A process never appends to a segment of another: the kernel may hold pages in memory, marked clean, that a failed sync
never brought to the disk. An unsealed segment is therefore copied, synced and sealed at opening.

`codec` makes bytes of records, `segments` are the files, `salvage` repairs them, `log` is the open journal.
"""

from towline.gateway.journal.codec import JournalError, Record, RecordError, decode, encode
from towline.gateway.journal.log import Journal, SyncMode, replay
from towline.gateway.journal.segments import Disk, JournalCorrupt

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
