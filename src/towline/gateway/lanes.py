"""The engines of a gateway, and which of them answers to which model name of a harness.

A lane is one engine with its codec. The policy is one of them, and the only one whose turns are trained; the others are
frozen: for side calls, for a judge. Nothing is shared between lanes: each has its own vocabulary, stop ids and context, and
no conversation goes on from one to another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from towline.config import STALL_SECONDS
from towline.conversation import Media, Message
from towline.engines.base import Engine, Seeing
from towline.engines.holds import Holding, Holds
from towline.errors import ApiError, ConfigError, EngineError, ErrorKind
from towline.images import Placeholder
from towline.schema import POLICY
from towline.tokens.bounded import Bounded
from towline.tokens.codec import Codec

_PLACEHOLDERS = 4096
"""Images whose placeholders are remembered."""


@dataclass(eq=False)
class Lane:
    """One engine with its codec."""

    engine: Engine
    codec: Codec
    name: str = POLICY
    model: str = ""
    """The name of its model for `/v1/models`; the lane's own name if there is none."""
    trained: bool = False
    stall_seconds: float = STALL_SECONDS
    """Longest that the engine may be asked for a turn without a token."""
    holds: Holds = field(default_factory=Holds, repr=False)
    """Whether its time is on hold: the engine is paused or unusable."""
    watchers: list[Callable[[EngineError | None], None]] = field(default_factory=list, repr=False)
    """Told of every turn that the engine has answered (None) or failed."""
    _usable: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    _placeholders: Bounded[str, Placeholder | None] = field(default_factory=lambda: Bounded(_PLACEHOLDERS), repr=False)

    def __post_init__(self) -> None:
        self.model = self.model or self.name
        self._usable.set()
        if isinstance(self.engine, Holding):
            self.engine.holds.watch(self._engine_held)

    def _engine_held(self, held: bool) -> None:
        (self.holds.hold if held else self.holds.release)("engine")

    def block(self, blocked: bool) -> None:
        """Hold back further turns, since the engine cannot be used; with `False`, let them go."""
        if blocked:
            self._usable.clear()
            self.holds.hold("unusable")
        else:
            self._usable.set()
            self.holds.release("unusable")

    async def usable(self) -> None:
        """Return once turns are not held back."""
        await self._usable.wait()

    def report(self, error: EngineError | None) -> None:
        """A turn has ended at the engine."""
        for watcher in self.watchers:
            watcher(error)

    async def look(self, messages: Sequence[Message]) -> dict[str, Placeholder]:
        """What stands for each image of the messages in a prompt, by digest; nothing for those the model cannot see."""
        engine = self.engine
        images = {m.digest: m for message in messages for m in message.media if m.kind == "image"}
        if not images or not isinstance(engine, Seeing):
            return {}
        fresh = [image for digest, image in images.items() if digest not in self._placeholders]
        found = {digest: self._placeholders[digest] for digest in images if digest in self._placeholders}
        found |= await self._rendered(engine, fresh) if fresh else {}
        return {digest: placeholder for digest, placeholder in found.items() if placeholder is not None}

    async def _rendered(self, engine: Seeing, media: Sequence[Media]) -> dict[str, Placeholder | None]:
        made = dict(zip((image.digest for image in media), await engine.render_media(media), strict=True))
        for digest, placeholder in made.items():
            self._placeholders[digest] = placeholder
        return made


class Lanes:
    """The lanes of a gateway by name."""

    def __init__(self, policy: Lane, others: Mapping[str, Lane]):
        for name, lane in others.items():
            if name == POLICY or lane.name != name or lane.trained:
                raise ConfigError(f"engine {name!r}: a further engine has its own name, not {POLICY!r}, and is frozen")
        self.policy = policy
        self._by_name = {POLICY: policy, **others}

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Lane:
        lane = self._by_name.get(name)
        if lane is None:
            # The settings changed while the session was open.
            raise ApiError(ErrorKind.NOT_FOUND, f"the engine {name!r} of this session is no longer there")
        return lane

    def unknown(self, models: Mapping[str, str]) -> str | None:
        """The first pattern that names an engine which is not there."""
        return next((pattern for pattern, name in models.items() if name not in self._by_name), None)

    def of(self, model: str, models: Mapping[str, str]) -> Lane:
        """The lane that answers to a model name. Names stand before patterns, the mapping's before the models' own."""
        name = models.get(model)
        if name is None:
            owner = next((lane for lane in self.reached(models) if lane.model == model), None)
            if owner is not None:
                return owner
            name = next((name for pattern, name in models.items() if fnmatchcase(model, pattern)), POLICY)
        return self[name]

    def names(self, models: Mapping[str, str]) -> list[str]:
        """The model names that a session may choose from: of its engines, and those it gives them itself."""
        given = (pattern for pattern in models if not any(sign in pattern for sign in "*?["))
        return list(dict.fromkeys([*(lane.model for lane in self.reached(models)), *given]))

    def reached(self, models: Mapping[str, str]) -> list[Lane]:
        """The lanes that a session reaches: the policy, and those that its mapping names."""
        names = dict.fromkeys([POLICY, *models.values()])
        return [self._by_name[name] for name in names if name in self._by_name]
