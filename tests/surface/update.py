"""Write the frozen surface anew: `python tests/surface/update.py`. Entries are added; none goes without `--remove`.

With `--data` the data of this version is written too, which later versions have to open.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from surface import scenario, snapshot


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--remove", action="store_true", help="also remove and change entries: this breaks users")
    parser.add_argument("--data", action="store_true", help="also write the data of this version")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "data"
        folder.mkdir()
        now = snapshot.everything(folder)
        if chosen.data:
            pack(folder)
    frozen = snapshot.read()
    problems = snapshot.broken(frozen, now)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems and not chosen.remove:
        print("nothing written: the surface changes only by addition; --remove does it all the same", file=sys.stderr)
        return 1
    if not chosen.remove:
        for name, table in frozen.items():
            now[name] |= table
    snapshot.write(now)
    return 0


def pack(folder: Path) -> None:
    for path in [*folder.rglob("sandboxes"), *folder.rglob("tensorboard")]:
        shutil.rmtree(path)
    for path in folder.rglob("curves.png"):
        path.unlink()
    with tarfile.open(scenario.ARCHIVE, "w:xz", preset=9) as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name, filter=_nameless)


def _nameless(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    sys.exit(main())
