"""Markers for what a model cannot see: each in its place, and nothing else added or taken away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.conversation import Media, Message
from towline.tokens.templates.media import content_parts, hidden_media_flags

WORDS = st.text(st.sampled_from("ab \n"), max_size=6)


def message(*parts: str) -> Message:
    """Text with media where a part is `<kind>`."""
    text, media = "", []
    for number, part in enumerate(parts):
        if part.startswith("<"):
            media.append(Media(part[1:-1], f"{number}", "https://x", len(text)))
        else:
            text += part
    return Message("user", text, media=tuple(media))


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        (("<image>",), "[image]"),
        (("See ", "<image>"), "See [image]"),
        (("See:", "<image>", "Well?"), "See:\n[image]\nWell?"),
        (("See:\n", "<image>", " Well?"), "See:\n[image] Well?"),
        (("<image>", "<image>", "both"), "[image]\n[image]\nboth"),
        (("a", "<file>", "b", "<audio>"), "a\n[file]\nb\n[audio]"),
    ],
)
def test_markers(parts: tuple[str, ...], shown: str) -> None:
    assert content_parts(message(*parts), ()) == [shown]


@given(st.lists(WORDS | st.sampled_from(["<image>", "<video>"]), max_size=6))
def test_everything_keeps_its_order(parts: list[str]) -> None:
    """All that is there is the text and the markers, with line breaks between them at most."""
    expected = [f"[{part[1:-1]}]" if part.startswith("<") else part for part in parts]
    shown = "".join(str(part) for part in content_parts(message(*parts), ()))
    assert "".join(shown.split()) == "".join("".join(expected).split())
    assert len(shown) <= len("".join(expected)) + 2 * sum(part.startswith("<") for part in parts)


def test_flags() -> None:
    said = [message("a", "<image>"), message("<file>", "<image>"), message("b")]
    assert hidden_media_flags(said, lambda _: ()) == ["file_not_shown", "image_not_shown"]
    assert hidden_media_flags(said, lambda m: [item for item in m.media if item.kind == "image"]) == ["file_not_shown"]
    assert hidden_media_flags(said[2:], lambda _: ()) == []


def test_shown_media_are_content_parts() -> None:
    said = message("See:", "<image>", "and", "<file>", "<image>")
    first, file, last = said.media
    assert content_parts(said, ()) == ["See:\n[image]\nand\n[file]\n[image]"]
    assert content_parts(said, (first, last)) == ["See:", first, "and\n[file]", last]
    assert content_parts(said, (file,)) == ["See:\n[image]\nand", file, "[image]"]
    assert content_parts(message("<image>"), message("<image>").media) == list(message("<image>").media)
    assert content_parts(message(), ()) == [""]
