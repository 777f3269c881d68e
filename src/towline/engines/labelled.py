"""Servers whose weights carry a label: the version of each token, when a trainer replaces the weights by its own means.

vLLM and SGLang label their weights and report the label of every turn, some as spans of tokens. `LabelledEngine` follows
these labels, so that a push that this process knows nothing of gives each token its version, without a pause and without
losing the replica.

Invariant: a token has the version of the label that it was sampled under. Only two things are a restart, which makes the
replica leave its pool: a label of an older version than the one in use when the turn began, and an unknown label under which
the server samples differently than before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from towline.common.background import BackgroundTasks
from towline.engines.base import EngineUnreachable
from towline.engines.remote import ActiveTurn, RemoteEngine
from towline.engines.server_checks import ProbeAnswer
from towline.engines.version_stamp import version_spans
from towline.engines.weight_labels import MIXED_VERSIONS, WeightLabels, is_version, parse_version
from towline.errors import EngineError

log = logging.getLogger("towline.engines")
_SAME = 1e-3
"""The largest difference of two logprobs under the same weights."""


class LabelledEngine(RemoteEngine):
    def __init__(self, url: str, *, api_key: str = "", timeout: float = 3600.0, patience: float = 60.0):
        super().__init__(url, api_key=api_key, timeout=timeout, patience=patience)
        self._labels = WeightLabels()
        self._foreign: set[str] = set()
        """Labels of weights that this engine must not sample from."""
        self._identifying = asyncio.Lock()
        self._probe_answer: ProbeAnswer | None = None
        """The response to the probe under the weights in use; None if not known."""
        self._background = BackgroundTasks()

    @abstractmethod
    async def _read_label(self) -> str | None:
        """The label that the server reports now; None if it reports none."""

    @abstractmethod
    async def _write_label(self, version: int) -> None:
        """Label the server's weights with a version."""

    @abstractmethod
    async def _probe(self, salt: str) -> ProbeAnswer:
        """A greedy response to a fixed prompt; `salt` is part of the key of the server's prefix cache."""

    @property
    def _salt(self) -> str:
        """Part of the server's cache key: no keys or values cross versions, however the weights are replaced."""
        return f"towline-weights-{self._version}"

    # Labels

    def _note_start(self, label: str | None) -> None:
        """Note the label of a server that is being started: a number is a version, any other word is version 0."""
        self._foreign.clear()
        self._labels = WeightLabels()
        if label is not None:
            self._version = parse_version(label) if is_version(label) else 0
            self._labels.note(label, self._version)

    async def _stamp(
        self, turn: ActiveTurn, fresh: int, label: str | None, spans: Sequence[tuple[str, int, int]], *, streamed: bool
    ) -> None:
        """Stamp the `fresh` tokens that have just arrived: by spans of the whole turn, else by the server's label.

        Raises `EngineUnreachable` if the labels are those of a server that was restarted.
        """
        if spans:
            known = {name: await self._version_of(name, turn) for name, _, _ in spans}
            turn.versions = version_spans(((known[name], start, end) for name, start, end in spans), len(turn.ids))
            self._follow(spans[-1][0], known[spans[-1][0]])
            return
        version = max(self._version, turn.version)
        if label is not None:
            version = await self._version_of(label, turn)
            self._follow(label, version)
        if streamed:
            turn.stamp([version] * fresh)
        elif version != turn.version:
            turn.flags = (MIXED_VERSIONS,)

    async def _version_of(self, label: str, turn: ActiveTurn) -> int:
        version = self._labels.version_of(label)
        if version is None:
            version = await self._identify(label, turn)
        if version < turn.version:
            turn.drop()
            raise EngineUnreachable(
                f"{self.url} has the weights {label!r} in place of {self._labels.current!r}: it was restarted"
            )
        return version

    async def _identify(self, label: str, turn: ActiveTurn) -> int:
        """The version of a label that is not known: the one in use, if the server samples as before."""
        async with self._identifying:
            if label not in self._labels.words:
                if label in self._foreign or not await self.same_weights():
                    self._foreign.add(label)
                    turn.drop()
                    raise EngineUnreachable(
                        f"{self.url} has the weights {label!r}, which are not those of {self._labels.current!r}: it was "
                        "restarted, or its trainer must label weights with numbers or announce their version"
                    )
                self._labels.note(label, self._version)
        return self._labels.words[label]

    def _follow(self, label: str, version: int) -> None:
        """The server has the weights of this version now, as far as it is not an old response."""
        if version > self._version:
            log.info("%s has the weights of version %d", self.url, version)
            self._version, self._probe_answer = version, None
        if version == self._version:
            self._labels.note(label, version)

    # Versions that a trainer announces

    async def announce(self, version: int | None) -> int:
        async with self._updating:
            label = await self._read_label()
            reported = None if label is None or not is_version(label) else parse_version(label)
            if version is None:
                if reported is None:
                    raise EngineError(
                        f"{self.url} reports no version of its weights (their label is {label!r}): announce a number, or "
                        "have the trainer label the weights that it pushes"
                    )
                version = reported
            if version < max(self._version, reported or 0):
                raise EngineError(
                    f"{self.url} has weights of version {max(self._version, reported or 0)}, later than the announced "
                    f"version {version}"
                )
            if label is not None:
                if reported != version:
                    await self._write_label(version)
                self._labels.note(str(version), version)
            if version != self._version:
                self._version, self._probe_answer = version, None
            if label is None:
                # Not awaited: the trainer may announce while the server is paused.
                self._background.start(self._remember())
            return version

    async def _remember(self) -> None:
        """Note how the server samples, to recognise its weights later: without labels nothing else does."""
        version = self._version
        with contextlib.suppress(EngineError):
            answer = await self._probe(_fresh_salt())
            if version == self._version:
                self._probe_answer = answer

    async def same_weights(self) -> bool:
        before = self._probe_answer
        if before is None:
            return False
        now = await self._probe(_fresh_salt())
        return bool(
            np.array_equal(before.ids, now.ids) and np.abs(before.logprobs - now.logprobs).max(initial=0.0) <= _SAME
        )

    async def close(self) -> None:
        await self._background.close()
        await super().close()


def _fresh_salt() -> str:
    """A key under which nothing is cached."""
    return f"towline-probe-{secrets.token_hex(6)}"
