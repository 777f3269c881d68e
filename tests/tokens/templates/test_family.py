"""For a family with a renderer of its own, the bridge and the sentinel give the same ids after a turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.tokens.conversations import DAY, TOOLS, call, real, result, system, templated, user
from towline.conversation import Message, ToolCall
from towline.errors import ConfigError
from towline.schema import ForkReason
from towline.tokens.codec import CannotContinue, RenderContext
from towline.tokens.loading import make_codec
from towline.tokens.templates.family import FamilyCodec
from towline.tokens.templates.sentinel import SentinelCodec

FAMILIES = {
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3.5",
    "qwen3_6": "qwen3.5",
    "qwen3_8": "qwen3.8",
    "glm4moe": "glm-4.5",
    "nemotron_3_nano": "nemotron-3",
    "nemotron_3_super": "nemotron-3",
    "nemotron_3_ultra": "nemotron-3-ultra",
}
"""By template, the first renderer in the package's own order that does what the template does."""
FRAME = RenderContext(TOOLS, {}, lambda: DAY)
WORDS = st.sampled_from(
    [
        "ok",
        "a\nb",
        " padded ",
        "\n\nx\n\n",
        "",
        "{}",
        "<|im_end|>",
        "<think>no</think>",
        "</think>",
        "</tool_response>",
        "é🎉",
    ]
)


def test_families_are_detected_by_behaviour() -> None:
    for name, family in FAMILIES.items():
        assert templated(name).name == f"renderers:{family}"
    assert real("qwen3").name == "renderers:qwen3"
    for name in ("qwen2_5", "qwen3_training", "qwen3_5_nothink", "llama3_2", "phi3", "gptoss", "deepseekv3"):
        assert templated(name).name == "sentinel"


def sampled(codec: SentinelCodec, reply: Message) -> list[int]:
    return codec.write(reply.text, reply.reasoning, reply.tool_calls, FRAME)


@pytest.mark.parametrize("name", FAMILIES)
def test_messages_in_odd_places(name: str) -> None:
    """A bridge may take a system message in the middle where its template refuses one; else they agree."""
    family, sentinel = templated(name), templated(name, renderer="sentinel")
    reply = Message("assistant", "An answer.", "Thinking.")
    before = [system(), user("Go.")]
    prompt = np.asarray(family.prompt(before, FRAME).ids, np.int32)
    ids = np.asarray(sampled(family, reply), np.int32)
    stray = Message("tool", "stray", name="bash", tool_call_id="x")
    for new in ([system("QUICK"), user("LAST")], [user("LAST"), system("QUICK")], [stray, user("LAST")]):
        try:
            expected = sentinel.extend(before, reply, prompt, ids, new, FRAME).ids
        except CannotContinue:
            if name == "glm4moe":
                with pytest.raises(CannotContinue):
                    family.extend(before, reply, prompt, ids, new, FRAME)
            else:
                text = family.tokenizer.decode(family.extend(before, reply, prompt, ids, new, FRAME).ids)
                assert all(message.text in text for message in new)
        else:
            assert family.extend(before, reply, prompt, ids, new, FRAME).ids == expected


@st.composite
def following(draw: st.DrawFn) -> tuple[Message, list[Message]]:
    """A reply and what a harness may send after it."""
    thought = draw(st.sampled_from(["Thinking.", "Long\n\nthought", None]))
    if draw(st.booleans()):
        new = [user(draw(WORDS)) for _ in range(draw(st.integers(1, 2)))]
        return Message("assistant", "An answer.", thought), new
    calls = tuple(ToolCall(f"call{i}", "bash", {"command": f"c{i}"}) for i in range(draw(st.integers(1, 3))))
    results = [result(c, draw(WORDS), name="bash") for c in calls]
    return Message("assistant", draw(st.sampled_from(["", "Words."])), thought, calls), [
        *results,
        *(user(draw(WORDS)) for _ in range(draw(st.integers(0, 1)))),
    ]


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_bridge_and_sentinel_agree(name: str, data: st.DataObject) -> None:
    family, sentinel = templated(name), templated(name, renderer="sentinel")
    reply, new = data.draw(following())
    arguments = data.draw(st.sampled_from([{}, {}, {"enable_thinking": False}, {"enable_thinking": True}]))
    frame = RenderContext(data.draw(st.sampled_from([(), TOOLS])), arguments, lambda: DAY)
    before = [system(), user(data.draw(WORDS))]
    prompt = np.asarray(family.prompt(before, frame).ids, np.int32)
    ids = np.asarray(sampled(family, reply), np.int32)
    made = [codec.extend(before, reply, prompt[-64:], ids, new, frame) for codec in (family, sentinel)]
    assert made[0].ids == made[1].ids
    assert made[0].special_text == made[1].special_text


@pytest.mark.parametrize("name", FAMILIES)
def test_bridge_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the bridge takes renders nothing; whatever it does not take goes through the sentinel."""
    codec = templated(name)
    before = [system(), user("Go.")]
    reply = Message("assistant", "", "Thinking.", (call("bash", command="ls"),))
    prompt = np.asarray(codec.prompt(before, FRAME).ids, np.int32)
    ids = np.asarray(sampled(codec, reply), np.int32)
    new = [result(reply.tool_calls[0], "ok", name="bash")]
    expected = codec.extend(before, reply, prompt, ids, new, FRAME)
    rendered = []
    render = codec.template.render
    monkeypatch.setattr(codec.template, "render", lambda *a, **k: rendered.append(1) or render(*a, **k))
    assert codec.extend(before, reply, prompt, ids, new, FRAME).ids == expected.ids
    assert not rendered
    for after, cut, prefill in (
        ([*new, Message("assistant", "FOREIGN"), user("x")], ids, False),
        ([*new, Message("assistant", "PREFILL")], ids, True),
        (new, ids[:-1], False),
    ):
        made = codec.extend(before, reply, prompt, cut, after, FRAME, prefill=prefill)
        assert rendered
        assert made.forced == (len(cut) < len(ids))
        rendered.clear()


def test_a_bridge_that_fails_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = templated("qwen3")
    reply = Message("assistant", "Yes.", "Hm.")
    ids = np.asarray(sampled(codec, reply), np.int32)
    prompt = np.asarray(codec.prompt([user("?")], FRAME).ids, np.int32)
    expected = codec.extend([user("?")], reply, prompt, ids, [user("And?")], FRAME)

    class Failing:
        def bridge_to_next_turn(self, *_: object, **__: object) -> None:
            raise ValueError("not these messages")

    monkeypatch.setattr(codec, "_renderer", lambda _: Failing())
    assert codec.extend([user("?")], reply, prompt, ids, [user("And?")], FRAME) == expected


def test_unknown_arguments_and_families() -> None:
    codec = real("qwen3")
    assert isinstance(codec, FamilyCodec)
    odd = RenderContext(TOOLS, {"never_heard_of": 1}, lambda: DAY)
    reply = Message("assistant", "Yes.", "Hm.")
    ids = np.asarray(sampled(codec, reply), np.int32)
    prompt = np.asarray(codec.prompt([user("?")], odd).ids, np.int32)
    plain = real("qwen3", renderer="sentinel")
    new = [user("And?")]
    assert (
        codec.extend([user("?")], reply, prompt, ids, new, odd).ids
        == plain.extend([user("?")], reply, prompt, ids, new, odd).ids
    )
    with pytest.raises(ConfigError, match="does not know the family"):
        make_codec(codec.tokenizer, codec.template, renderer="no-such-family")
    with pytest.raises(ConfigError, match="does not fit"):
        make_codec(codec.tokenizer, codec.template, renderer="kimi-k2")


def test_stop_rule_comes_first() -> None:
    codec = templated("glm4moe")
    reply = Message("assistant", "", None, (call("bash", command="ls"),))
    ids = sampled(codec, reply)
    wrong = np.asarray([*ids[:-1], codec.tokenizer.id_of("<|user|>")], np.int32)
    with pytest.raises(CannotContinue) as problem:
        codec.extend([user("x")], reply, wrong[:5], wrong, [result(reply.tool_calls[0], "ok", name="bash")], FRAME)
    assert problem.value.reason is ForkReason.STOP_MISMATCH
