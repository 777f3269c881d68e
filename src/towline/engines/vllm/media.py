"""Images for a vLLM server, as functions of data.

What stands for an image is found by rendering a message that holds nothing else. A turn is then sent with the template's own
token in the place of each placeholder and the images beside it; the server expands the prompt, and tells what it made of
it: that must be the very prompt that was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from towline.conversation import Media
from towline.engines.base import Ids, SampleRequest
from towline.errors import EngineError
from towline.images import Placeholder

RENDER = "/v1/chat/completions/render"
PROBE = Media(
    "image",
    "",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAADgAAAA4CAIAAAAn5KxJAAAARElEQVR42u3OQQkAAAgEsItjRCMay4cphMECLNXzQkRFRU"
    "VFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRc8CPfE7AD+J8GEAAAAASUVORK5CYII=",
)
"""A picture that any model which sees can be shown."""
_AROUND = 8


def question(model: str, media: Media) -> dict[str, Any]:
    """The body that renders one image."""
    part = {"type": "image_url", "image_url": {"url": media.url}}
    return {"model": model, "messages": [{"role": "user", "content": [part]}]}


def placeholder(answer: Mapping[str, Any]) -> Placeholder | None:
    """What a rendered message says of its image; `None` if it holds none."""
    features = answer.get("features") or {}
    places, keys = (features.get(name, {}).get("image") or [] for name in ("mm_placeholders", "mm_hashes"))
    if len(places) != 1 or len(keys) != 1:
        return None
    ids = np.asarray(answer["token_ids"], np.int32)
    start, end = int(places[0]["offset"]), int(places[0]["offset"]) + int(places[0]["length"])
    return Placeholder(ids[start:end], ids[max(0, start - _AROUND) : start], ids[end : end + _AROUND], str(keys[0]))


def shown(request: SampleRequest) -> dict[str, Any]:
    """The fields that show a turn its images: the prompt as the template wrote it, and the images in order."""
    parts: list[Ids] = []
    place = 0
    for image in request.media:
        parts += (request.prompt[place : image.start], np.asarray(image.written, np.int32))
        place = image.start + image.length
    parts.append(request.prompt[place:])
    content = [{"type": "image_url", "url": image.media.url} for image in request.media]
    return {"token_ids": np.concatenate(parts).tolist(), "content_parts": content, "return_token_ids": True}


def check(event: Mapping[str, Any], request: SampleRequest) -> bool:
    """Whether an event tells the prompt; raises if that is not the one that was meant."""
    told = event.get("prompt_token_ids")
    if told is None:
        return False
    if not np.array_equal(np.asarray(told, np.int32), request.prompt):
        raise EngineError(
            f"the server made a prompt of {len(told)} tokens, not the {len(request.prompt)} that were meant"
        )
    ranges = [(place["offset"], place["length"]) for place in (event.get("mm_placeholders") or {}).get("image", ())]
    meant = [(image.start, image.length) for image in request.media]
    if ranges and ranges != meant:
        raise EngineError(f"the server put images at {ranges}, not at {meant}")
    return True
