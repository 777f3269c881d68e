"""Pass rates, choices and spending on disk, in one SQLite file.

Invariants: what a method returned, or stored, survives a kill at any moment (`synchronous=FULL`). The choice for a
number is made once: asked again, it is the same task, so that a resumed run submits what it submitted before. A result
is counted once, however often it is delivered.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from towline.errors import TowlineError

FILE = "curriculum.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS choices (number INTEGER PRIMARY KEY, task_id TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS groups (
    result_id TEXT PRIMARY KEY, task_id TEXT NOT NULL, version INTEGER NOT NULL, sessions INTEGER NOT NULL,
    scored INTEGER NOT NULL, passed INTEGER NOT NULL, reward REAL NOT NULL, varied INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, sampled_tokens INTEGER NOT NULL, seconds REAL NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS groups_by_task ON groups (task_id, version);
CREATE TABLE IF NOT EXISTS clock (id INTEGER PRIMARY KEY CHECK (id = 0), seconds REAL NOT NULL) STRICT;
"""


class CurriculumError(TowlineError):
    """A pass-rate store that cannot be opened; the message says what to do."""


@dataclass(frozen=True, slots=True)
class TaskRate:
    """The scored sessions of one task under one policy version."""

    task_id: str
    version: int
    groups: int
    scored: int
    passed: int
    mean_reward: float
    zero_variance: int
    """Groups whose sessions all had the same reward: nothing can be learned from them."""

    @property
    def rate(self) -> float:
        return self.passed / self.scored if self.scored else 0.0


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """One group of sessions of a task."""

    result_id: str
    task_id: str
    version: int
    """The policy version that the group was sampled with: the newest of its tokens."""
    rewards: Sequence[float]
    """Of the sessions that were scored."""
    sessions: int
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    """Run time of its sessions, added up."""


@dataclass(frozen=True, slots=True)
class Spending:
    """What a run has used so far."""

    sessions: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    session_seconds: float = 0.0
    seconds: float = 0.0
    """Wall time of the runs, as far as it was reported."""


class CurriculumStore:
    """The file of one training run. One process writes; others may read."""

    def __init__(self, path: Path):
        """`path`: the file, or the folder of a run."""
        file = path / FILE if path.is_dir() else path
        self.path = file
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(file, isolation_level=None, check_same_thread=False, timeout=30.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_TABLES)
        except sqlite3.Error as error:
            raise CurriculumError(
                f"{file} is not a pass-rate store: {error}; move it away to start a new one"
            ) from error

    def close(self) -> None:
        self._db.close()

    def choice(self, number: int) -> str | None:
        """The task that was chosen for a number."""
        row = self._db.execute("SELECT task_id FROM choices WHERE number = ?", (number,)).fetchone()
        return None if row is None else str(row[0])

    def choose(self, number: int, task_id: str) -> str:
        """Store the choice for a number; the task that was chosen first counts."""
        with self._lock:
            self._db.execute("INSERT OR IGNORE INTO choices VALUES (?, ?)", (number, task_id))
            return self.choice(number) or task_id

    def chosen(self) -> dict[str, int]:
        """How often each task was chosen."""
        return dict(self._db.execute("SELECT task_id, count(*) FROM choices GROUP BY task_id"))

    def add(self, outcomes: Iterable[GroupOutcome], pass_at: float) -> None:
        """Count groups, in one transaction; a result that was counted before changes nothing."""
        rows = [
            (
                one.result_id,
                one.task_id,
                one.version,
                one.sessions,
                len(one.rewards),
                sum(reward >= pass_at for reward in one.rewards),
                float(sum(one.rewards)),
                int(len(set(one.rewards)) > 1),
                one.prompt_tokens,
                one.sampled_tokens,
                one.seconds,
            )
            for one in outcomes
        ]
        with self._lock, self._transaction():
            self._db.executemany("INSERT OR IGNORE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def rates(self) -> list[TaskRate]:
        """Pass rates by task and policy version."""
        rows = self._db.execute(
            "SELECT task_id, version, count(*), sum(scored), sum(passed), sum(reward), "
            "sum(scored > 0 AND NOT varied) FROM groups GROUP BY task_id, version ORDER BY task_id, version"
        )
        return [
            TaskRate(task_id, version, groups, scored, passed, reward / scored if scored else 0.0, same)
            for task_id, version, groups, scored, passed, reward, same in rows
        ]

    def spending(self) -> Spending:
        found = self._db.execute(
            "SELECT coalesce(sum(sessions), 0), coalesce(sum(prompt_tokens), 0), coalesce(sum(sampled_tokens), 0), "
            "coalesce(sum(seconds), 0) FROM groups"
        ).fetchone()
        clock = self._db.execute("SELECT seconds FROM clock").fetchone()
        sessions, prompt, sampled, session_seconds = found
        return Spending(sessions, prompt, sampled, session_seconds, clock[0] if clock else 0.0)

    def add_seconds(self, seconds: float) -> None:
        """Add wall time of the run."""
        with self._lock:
            self._db.execute(
                "INSERT INTO clock VALUES (0, ?) ON CONFLICT (id) DO UPDATE SET seconds = seconds + excluded.seconds",
                (seconds,),
            )
