"""The engines of a gateway, and which of them answers to which model name of a harness.

A lane is one engine with its codec. The policy is one of them, and the only one whose turns are trained; the others are
frozen: for side calls, for a judge. Nothing is shared between lanes: each has its own vocabulary, stop ids and context, and
no conversation goes on from one to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from towline.conversation import Media, Message
from towline.engines.base import Engine, Seeing
from towline.errors import ApiError, ConfigError, ErrorKind
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
    _placeholders: Bounded[str, Placeholder | None] = field(default_factory=lambda: Bounded(_PLACEHOLDERS), repr=False)

    def __post_init__(self) -> None:
        self.model = self.model or self.name

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
            owner = next((lane for lane in self._reached(models) if lane.model == model), None)
            if owner is not None:
                return owner
            name = next((name for pattern, name in models.items() if fnmatchcase(model, pattern)), POLICY)
        return self[name]

    def names(self, models: Mapping[str, str]) -> list[str]:
        """The model names that a session may choose from: of its engines, and those it gives them itself."""
        given = (pattern for pattern in models if not any(sign in pattern for sign in "*?["))
        return list(dict.fromkeys([*(lane.model for lane in self._reached(models)), *given]))

    def _reached(self, models: Mapping[str, str]) -> list[Lane]:
        """The lanes that a session reaches: the policy, and those that its mapping names."""
        names = dict.fromkeys([POLICY, *models.values()])
        return [self._by_name[name] for name in names if name in self._by_name]
