"""The engines of a gateway, and which of them answers which model name of a harness.

A route is one engine with its codec. The policy is one of them, and the only one whose turns are trained; the others are
frozen: for side calls, for a judge. Nothing is shared between routes: each has its own vocabulary, stop ids and context, and
no conversation continues from one to another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from towline.common.images import ImagePlaceholder
from towline.common.mappings import BoundedDict
from towline.config import STALL_SECONDS
from towline.conversation import Media, Message
from towline.engines.base import AcceptsImages, Engine
from towline.engines.stalls import PauseState, ReportsPauses
from towline.errors import ApiError, ConfigError, EngineError, ErrorKind
from towline.schema import POLICY
from towline.tokens.codec import ModelCodec

_PLACEHOLDERS = 4096
"""Number of images whose placeholders are cached."""


@dataclass(eq=False)
class ModelRoute:
    """One engine with its codec."""

    engine: Engine
    codec: ModelCodec
    name: str = POLICY
    model: str = ""
    """The name of its model in `/v1/models`; defaults to the route's own name."""
    trained: bool = False
    stall_seconds: float = STALL_SECONDS
    """How long a turn may wait for its next token before the engine counts as stalled."""
    holds: PauseState = field(default_factory=PauseState, repr=False)
    """Whether budgets are on hold because the engine is paused or unavailable."""
    watchers: list[Callable[[EngineError | None, float], None]] = field(default_factory=list, repr=False)
    """Called after every turn that the engine answered (None) or failed, with the monotonic time it began."""
    _usable: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    _placeholders: BoundedDict[str, ImagePlaceholder | None] = field(
        default_factory=lambda: BoundedDict(_PLACEHOLDERS), repr=False
    )

    def __post_init__(self) -> None:
        self.model = self.model or self.name
        self._usable.set()
        if isinstance(self.engine, ReportsPauses):
            self.engine.pauses.subscribe(self._engine_held)

    def _engine_held(self, held: bool) -> None:
        (self.holds.add if held else self.holds.remove)("engine")

    def block(self, blocked: bool) -> None:
        """Make further turns wait because the engine is unavailable; with `False`, release them."""
        if blocked:
            self._usable.clear()
            self.holds.add("unusable")
        else:
            self._usable.set()
            self.holds.remove("unusable")

    async def usable(self) -> None:
        """Wait until turns may be sampled."""
        await self._usable.wait()

    def report(self, error: EngineError | None, began: float) -> None:
        """A turn that began at the (monotonic) time has ended at the engine."""
        for watcher in self.watchers:
            watcher(error, began)

    async def resolve_images(self, messages: Sequence[Message]) -> dict[str, ImagePlaceholder]:
        """By digest, the placeholder of each image of the messages in a prompt; none for images the model cannot see."""
        engine = self.engine
        images = {m.digest: m for message in messages for m in message.media if m.kind == "image"}
        if not images or not isinstance(engine, AcceptsImages):
            return {}
        fresh = [image for digest, image in images.items() if digest not in self._placeholders]
        found = {digest: self._placeholders[digest] for digest in images if digest in self._placeholders}
        found |= await self._render(engine, fresh) if fresh else {}
        return {digest: placeholder for digest, placeholder in found.items() if placeholder is not None}

    async def _render(self, engine: AcceptsImages, media: Sequence[Media]) -> dict[str, ImagePlaceholder | None]:
        made = dict(zip((image.digest for image in media), await engine.render_media(media), strict=True))
        for digest, placeholder in made.items():
            self._placeholders[digest] = placeholder
        return made


class ModelRoutes:
    """The routes of a gateway by name."""

    def __init__(self, policy: ModelRoute, others: Mapping[str, ModelRoute]):
        for name, route in others.items():
            if name == POLICY or route.name != name or route.trained:
                raise ConfigError(
                    f"engine {name!r}: an additional engine needs a name other than {POLICY!r}, and is frozen"
                )
        self.policy = policy
        self._by_name = {POLICY: policy, **others}

    def __iter__(self) -> Iterator[ModelRoute]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> ModelRoute:
        route = self._by_name.get(name)
        if route is None:
            # The settings changed since the session was opened.
            raise ApiError(
                ErrorKind.NOT_FOUND, f"engine {name!r} of this session is no longer configured; add it to `engines`"
            )
        return route

    def unknown(self, models: Mapping[str, str]) -> str | None:
        """The first pattern that names an unknown engine."""
        return next((pattern for pattern, name in models.items() if name not in self._by_name), None)

    def of(self, model: str, models: Mapping[str, str]) -> ModelRoute:
        """The route for a model name. Names take precedence over patterns, the mapping's names over the models' own."""
        name = models.get(model)
        if name is None:
            owner = next((route for route in self.reached(models) if route.model == model), None)
            if owner is not None:
                return owner
            name = next((name for pattern, name in models.items() if fnmatchcase(model, pattern)), POLICY)
        return self[name]

    def names(self, models: Mapping[str, str]) -> list[str]:
        """The model names that a session can choose from: those of its engines, and those that its mapping defines."""
        given = (pattern for pattern in models if not any(wildcard in pattern for wildcard in "*?["))
        return list(dict.fromkeys([*(route.model for route in self.reached(models)), *given]))

    def reached(self, models: Mapping[str, str]) -> list[ModelRoute]:
        """The routes of a session: the policy, and those that its mapping names."""
        names = dict.fromkeys([POLICY, *models.values()])
        return [self._by_name[name] for name in names if name in self._by_name]
