"""A stand-in for a vision engine: the documented shapes of vLLM around the scripted engine.

There is no vision model here. `render` answers as `POST /v1/chat/completions/render` does for a message with one image: the
ids of the rendered prompt with as many image tokens as the image needs, and `features` with the image's hash and the range
of its placeholder. `generate` takes what `POST /inference/v1/generate` takes, ids with one image token for each of
`content_parts`, expands them, and tells the prompt that it made. In between stands what the engine for vLLM does
(`engines/vllm/wire.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np

from towline.common.arrays import Ids
from towline.common.images import ImagePlaceholder
from towline.conversation import Media, Message
from towline.dialects.media import from_url
from towline.engines.base import Sample, SampleRequest
from towline.engines.scripted import Script, ScriptedEngine
from towline.engines.vllm import wire
from towline.errors import BadRequest, EngineError
from towline.tokens.codec import RenderContext
from towline.tokens.templates.sentinel import SentinelCodec

BROKEN = "data:image/png;base64,YnJva2Vu"
Json = dict[str, Any]


def width(digest: str) -> int:
    """Tokens per image."""
    return 3 + int(digest[:2], 16) % 29


class SeeingStandIn(ScriptedEngine):
    def __init__(self, codec: SentinelCodec, script: Script | None = None, **options: Any):
        super().__init__(codec, script, **options)
        pad = codec.tokenizer.id_of("<|image_pad|>")
        assert pad is not None
        self.pad = pad
        self.rendered: list[str] = []
        """The digest of every image that was rendered, as often as it was."""
        self.told: dict[str, Json] = {}
        """What `generate` answered for a turn."""
        self._template = codec

    # What the server would do

    def render(self, body: Json) -> Json:
        ((part,),) = (message["content"] for message in body["messages"])
        url = part["image_url"]["url"]
        if url == BROKEN:
            raise BadRequest(f"the image at {BROKEN} cannot be fetched")
        image = from_url("image", url, 0, "")
        self.rendered.append(image.digest)
        frame = RenderContext(images={image.digest: ImagePlaceholder(None)})
        ids = np.asarray(self._template.prompt([Message("user", media=(image,))], frame).ids, np.int32)
        expanded, places = self._expanded(ids, [image.digest])
        features = {"mm_hashes": {"image": [_key(image.digest)]}, "mm_placeholders": {"image": places}}
        return {"token_ids": expanded.tolist(), "features": features}

    def generate(self, body: Json) -> Json:
        digests = [from_url("image", part["url"], 0, "").digest for part in body["content_parts"]]
        expanded, places = self._expanded(np.asarray(body["token_ids"], np.int32), digests)
        return {"prompt_token_ids": expanded.tolist(), "mm_placeholders": {"image": places}}

    def _expanded(self, ids: Ids, digests: Sequence[str]) -> tuple[Ids, list[Json]]:
        """The ids with each image token repeated as its image needs; refuses what a vision model could not take."""
        places = np.flatnonzero(ids == self.pad).tolist()
        if len(places) != len(digests):
            raise EngineError(f"{len(places)} image tokens and {len(digests)} images")
        made: list[int] = []
        found: list[Json] = []
        before = 0
        for place, digest in zip(places, digests, strict=True):
            made += ids[before:place].tolist()
            found.append({"offset": len(made), "length": width(digest)})
            made += [self.pad] * width(digest)
            before = place + 1
        return np.asarray([*made, *ids[before:].tolist()], np.int32), found

    # What an engine does with it

    async def render_media(self, media: Sequence[Media]) -> Sequence[ImagePlaceholder | None]:
        return [wire.image_placeholder(self.render(wire.image_render_body("stand-in", item))) for item in media]

    async def sample(self, request: SampleRequest) -> Sample:
        if [image.key for image in request.media] != [_key(image.media.digest) for image in request.media]:
            raise EngineError("an image is no longer what it was")
        if self.pad in request.prompt or request.media:
            told = self.told[request.id] = self.generate(wire.image_fields(request))
            assert wire.check_rendered_prompt(told, request)
        return await super().sample(request)


class ExpandingStandIn(SeeingStandIn):
    """Has no way to render: it says what the model saw afterwards, with `echoes`, or not at all."""

    def __init__(self, codec: SentinelCodec, script: Script | None = None, *, echoes: bool, **options: Any):
        super().__init__(codec, script, **options)
        self._echoes = echoes
        self.saw: dict[str, Ids] = {}

    async def render_media(self, media: Sequence[Media]) -> Sequence[ImagePlaceholder | None]:
        return [ImagePlaceholder(None) for _ in media]

    async def sample(self, request: SampleRequest) -> Sample:
        prompt = np.asarray(self.generate(wire.image_fields(request))["prompt_token_ids"], np.int32)
        self.saw[request.id] = prompt
        sampled = await ScriptedEngine.sample(self, replace(request, prompt=prompt))
        return replace(sampled, prompt=prompt if self._echoes else None, prompt_tokens=len(prompt))


def _key(digest: str) -> str:
    return sha256(f"hash of {digest}".encode()).hexdigest()[:16]
