"""Images before an engine that sees: its own placeholder ids stand in the prompt, the row says which tokens are which
image, and the conversation continues exactly. The engine is a stand-in (`seeing_stand_in`); template and tokenizer are real."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engines.vision_stand_in import BROKEN, ExpandingStandIn, SeeingStandIn, width
from support.gateway.gateway_rig import (
    BASH,
    Body,
    Opened,
    Rig,
    assert_one_chain,
    chat,
    message_of,
    running_gateway,
    user,
)
from towline.conversation import Request, ToolCall
from towline.engines.base import AcceptsImages
from towline.engines.scripted import Say, ScriptedEngine
from towline.gateway.model_routes import ModelRoute
from towline.schema import Image, Trajectory, Untrained
from towline.tokens.loading import load_codec
from towline.tokens.templates.sentinel import SentinelCodec

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
OTHER = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
THIRD = "data:image/png;base64,dGhpcmQgc2hvdA=="
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
SCHEMA = BASH["function"]["parameters"]  # type: ignore[index]
"""A tool's parameters, in every dialect."""


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5_think"])
def seeing(request: pytest.FixtureRequest, assets: Path) -> SentinelCodec:
    """Templates that show images: one that only the sentinel continues, one whose family has a bridge."""
    return load_codec(assets / "tokenizers" / "qwen3", template=assets / "templates" / f"{request.param}.jinja")


@pytest.fixture(scope="module")
def vision(assets: Path) -> SentinelCodec:
    return load_codec(assets / "tokenizers" / "qwen3", template=assets / "templates" / "qwen3_vl.jinja")


def agent(request: Request) -> Say:
    if request.messages[-1].role == "user" and request.tools:
        return Say("Looking.", None, [ToolCall("", "bash", {"command": "shot"})])
    seen = sum(len(message.media) for message in request.messages)
    return Say(f"I was given {seen} images.")


def digest(data: str) -> str:
    from binascii import a2b_base64

    return sha256(a2b_base64(data.rpartition(",")[2])).hexdigest()


def tokens_of(data: str) -> int:
    return width(digest(data))


# The same conversation in each dialect: a picture in the question, another in the tool's result, then words alone.


class Chat:
    path, headers = "/v1/chat/completions", ("authorization", "Bearer ")

    def __init__(self) -> None:
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        parts = [{"type": "text", "text": "See "}, picture, {"type": "text", "text": "and take another."}]
        self.body: Body = {"model": "m", "tools": [BASH], "messages": [{"role": "user", "content": parts}]}

    def heard(self, answer: Body) -> str:
        self.body["messages"].append(message_of(answer))
        return str(self.body["messages"][-1].get("content") or "")

    def result(self, data: str) -> None:
        (call,) = self.body["messages"][-1]["tool_calls"]
        content = [{"type": "text", "text": "Here:"}, {"type": "image_url", "image_url": {"url": data}}]
        self.body["messages"].append({"role": "tool", "tool_call_id": call["id"], "content": content})

    def say(self, text: str) -> None:
        self.body["messages"].append(user(text))


class Responses:
    path, headers = "/v1/responses", ("authorization", "Bearer ")

    def __init__(self) -> None:
        parts = [
            {"type": "input_text", "text": "See "},
            {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
            {"type": "input_text", "text": "and take another."},
        ]
        tool = {"type": "function", "name": "bash", "description": "Runs a command.", "parameters": SCHEMA}
        self.body: Body = {"model": "m", "tools": [tool], "input": [{"role": "user", "content": parts}]}

    def heard(self, answer: Body) -> str:
        self.body["input"] += answer["output"]
        return "".join(p["text"] for item in answer["output"] if item["type"] == "message" for p in item["content"])

    def result(self, data: str) -> None:
        call = self.body["input"][-1]
        output = [{"type": "input_text", "text": "Here:"}, {"type": "input_image", "image_url": data}]
        self.body["input"].append({"type": "function_call_output", "call_id": call["call_id"], "output": output})

    def say(self, text: str) -> None:
        self.body["input"].append(user(text))


class Messages:
    path, headers = "/v1/messages", ("x-api-key", "")

    def __init__(self) -> None:
        parts = [
            {"type": "text", "text": "See "},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
            {"type": "text", "text": "and take another."},
        ]
        tool = {"name": "bash", "description": "Runs a command.", "input_schema": SCHEMA}
        self.body: Body = {"model": "m", "max_tokens": 200, "tools": [tool]}
        self.body["messages"] = [{"role": "user", "content": parts}]

    def heard(self, answer: Body) -> str:
        self.body["messages"].append({"role": "assistant", "content": answer["content"]})
        return "".join(part.get("text", "") for part in answer["content"])

    def result(self, data: str) -> None:
        call = self.body["messages"][-1]["content"][-1]
        if data.startswith("http"):
            source = {"type": "url", "url": data}
        else:
            source = {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}
        content = [{"type": "text", "text": "Here:"}, {"type": "image", "source": source}]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": content}
        self.body["messages"].append({"role": "user", "content": [result]})

    def say(self, text: str) -> None:
        self.body["messages"].append(user(text))


class Google:
    path, headers = "/v1beta/models/m:generateContent", ("x-goog-api-key", "")

    def __init__(self) -> None:
        parts = [
            {"text": "See "},
            {"inlineData": {"mimeType": "image/png", "data": PIXEL}},
            {"text": "and take another."},
        ]
        declared = {"name": "bash", "description": "Runs a command.", "parametersJsonSchema": SCHEMA}
        self.body: Body = {
            "tools": [{"functionDeclarations": [declared]}],
            "contents": [{"role": "user", "parts": parts}],
        }

    def heard(self, answer: Body) -> str:
        content = answer["candidates"][0]["content"]
        self.body["contents"].append(content)
        return "".join(part.get("text", "") for part in content["parts"])

    def result(self, data: str) -> None:
        call = next(part for part in self.body["contents"][-1]["parts"] if "functionCall" in part)["functionCall"]
        if data.startswith("http"):
            shown = {"fileData": {"mimeType": "image/png", "fileUri": data}}
        else:
            shown = {"inlineData": {"mimeType": "image/png", "data": data.partition(",")[2]}}
        response = {"id": call.get("id", ""), "name": "bash", "response": {"output": "Here:"}, "parts": [shown]}
        self.body["contents"].append({"role": "user", "parts": [{"functionResponse": response}]})

    def say(self, text: str) -> None:
        self.body["contents"].append({"role": "user", "parts": [{"text": text}]})


async def go_on(rig: Rig, session: Opened, talk: Any) -> str:
    """One call; what was answered."""
    name, lead = talk.headers
    headers = {name: lead + session.key}
    async with rig.web.post(session.root + talk.path, json=talk.body, headers=headers) as response:
        data = await response.read()
        assert response.status == 200, data
    return str(talk.heard(json.loads(data)))


def assert_seen(trajectory: Trajectory, engine: SeeingStandIn, *sources: str) -> None:
    """The row's images are these, each where its placeholder stands, which is where the engine was told."""
    (trace,) = trajectory.traces
    assert [image.digest for image in trace.images] == [digest(source) for source in sources]
    assert [image.length for image in trace.images] == [tokens_of(source) for source in sources]
    assert [image.url for image in trace.images] == [source if source.startswith("http") else "" for source in sources]
    pads = np.flatnonzero(trace.token_ids == engine.pad)
    assert pads.tolist() == [place for i in trace.images for place in range(i.start, i.start + i.length)]
    tokenizer = engine.codec.tokenizer
    for image in trace.images:
        around = trace.token_ids[[image.start - 1, image.start + image.length]].tolist()
        assert around == [tokenizer.id_of("<|vision_start|>"), tokenizer.id_of("<|vision_end|>")]
        assert not trace.loss_mask[image.start : image.start + image.length].any()
    told = engine.told[trajectory.turns[-1].id]
    assert told["mm_placeholders"]["image"] == [{"offset": i.start, "length": i.length} for i in trace.images]
    assert len({image.key for image in trace.images}) == len(sources)
    sent = {request.id: request.prompt for request in engine.requests}
    for turn in trajectory.turns:
        assert np.array_equal(sent[turn.id], trajectory.prompt(turn.id))
    assert list(trajectory.images) == [digest(source) for source in sources if not source.startswith("http")]
    assert all(url.startswith("data:image/png;base64,") for url in trajectory.images.values())
    listed = [image for turn in trajectory.turns for image in turn.images]
    assert listed == trace.images
    assert trajectory.report.images == len(sources)
    assert not [flag for turn in trajectory.turns for flag in turn.flags if flag.startswith("image_")]


@pytest.mark.parametrize("speaks", [Chat, Responses, Messages, Google])
async def test_images_in_questions_and_results_are_continued_exactly(
    seeing: SentinelCodec, tmp_path: Path, speaks: type[Any]
) -> None:
    engine = SeeingStandIn(seeing, agent)
    assert isinstance(engine, AcceptsImages)
    async with running_gateway(seeing, tmp_path, engine=engine) as rig:
        session = await rig.open()
        talk = speaks()
        assert await go_on(rig, session, talk) == "Looking."
        talk.result(f"data:image/png;base64,{OTHER}")
        assert await go_on(rig, session, talk) == "I was given 2 images."
        talk.say("Once more.")
        await go_on(rig, session, talk)
        talk.result(THIRD)
        assert await go_on(rig, session, talk) == "I was given 3 images."
        trajectory = await rig.seal(session)
    assert_one_chain(trajectory, 4)
    assert_seen(trajectory, engine, PIXEL, OTHER, THIRD)
    text = seeing.tokenizer.decode(trajectory.prompt(trajectory.turns[1].id).tolist())
    start, pad, end = VISION
    assert f"See {start}{pad * tokens_of(PIXEL)}{end}and take another.<|im_end|>" in text
    assert f"Here:{start}{pad * tokens_of(OTHER)}{end}" in text
    # Each image is rendered once, whatever the number of calls that carry it.
    assert engine.rendered == [digest(source) for source in (PIXEL, OTHER, THIRD)]
    # A plain server would have shown the model the same,
    # unless its template drops the reasoning of earlier turns.
    assert (trajectory.report.plain_difference == 0.0) == ("<think>" not in seeing.template.source)


async def test_conversations_with_images_outlive_the_gateway(vision: SentinelCodec, tmp_path: Path) -> None:
    talk = Chat()
    engine = SeeingStandIn(vision, agent)
    async with running_gateway(vision, tmp_path, engine=engine) as rig:
        session = await rig.open()
        await go_on(rig, session, talk)
        talk.result(THIRD)
        await go_on(rig, session, talk)
        assert engine.rendered == [digest(PIXEL), digest(THIRD)]
    later = SeeingStandIn(vision, agent)
    async with running_gateway(vision, tmp_path, engine=later) as rig:
        session = Opened(session.id, session.key, rig.running.base_url + "/v1", rig.running.base_url)
        talk.say("And in words?")
        await go_on(rig, session, talk)
        trajectory = await rig.seal(session)
    assert_one_chain(trajectory, 3)
    (trace,) = trajectory.traces
    assert [image.digest for image in trace.images] == [digest(PIXEL), digest(THIRD)]
    told = later.told[trajectory.turns[-1].id]["mm_placeholders"]["image"]
    assert told == [{"offset": image.start, "length": image.length} for image in trace.images]
    with pytest.raises(ValueError, match="is not in the row's context"):
        trace.model_validate(trace.__dict__ | {"images": [Image(digest="x", start=len(trace.token_ids) - 1, length=9)]})


async def test_forks_siblings_and_rows_of_other_builders_keep_their_images(
    vision: SentinelCodec, tmp_path: Path
) -> None:
    """Whatever becomes of a conversation, the engine gets the position of each image in the prompt, which it verifies."""
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    third = {"type": "image_url", "image_url": {"url": THIRD}}
    for builder, capture in (("exact", "exact"), ("per_turn", "exact"), ("merged", "plain"), ("per_turn", "plain")):
        engine = SeeingStandIn(vision, agent)
        async with running_gateway(vision, tmp_path / f"{builder}-{capture}", engine=engine) as rig:
            session = await rig.open(settings={"builder": builder, "capture": capture})

            async def post(*messages: Body, session: Opened = session, rig: Rig = rig, **fields: Any) -> Body:
                status, answer = await rig.post(session, {"model": "m", "messages": list(messages), **fields})
                assert status == 200, answer
                return message_of(answer)

            question: Body = {"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}
            first = await post(question, n=2)
            other: Body = {"role": "user", "content": [{"type": "text", "text": "And "}, third]}
            second = await post(question, first, other)
            await post(question, first, other, second, user("Sure?"))
            # An edit after the first image, one before it, and a reply that is to be written on.
            await post(question, first, user("And that?"))
            await post({"role": "user", "content": [third, {"type": "text", "text": "What is it?"}]}, first, other)
            await post(question, {"role": "assistant", "content": "I see"})
            trajectory = await rig.seal(session)
        sent = {request.id: request for request in engine.requests}
        assert len(sent) == 7
        for turn in trajectory.turns:
            assert np.array_equal(sent[turn.id].prompt, trajectory.prompt(turn.id))
        for trace in trajectory.traces:
            pads = np.flatnonzero(trace.token_ids == engine.pad).tolist()
            assert pads == [place for image in trace.images for place in range(image.start, image.start + image.length)]
            assert pads


async def test_text_that_spells_an_image_is_text(seeing: SentinelCodec, tmp_path: Path) -> None:
    """Nobody can make the model look where there is nothing: the engine would refuse such a prompt."""
    engine = SeeingStandIn(seeing, lambda request: Say(f"Answer {len(request.messages)}."))
    spelled = "".join(VISION)
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    async with running_gateway(seeing, tmp_path, engine=engine) as rig:
        session = await rig.open()
        history: list[Body] = [
            {"role": "system", "content": f"Beware of {VISION[1]}."},
            {"role": "user", "content": [{"type": "text", "text": f"{spelled} is this: "}, picture]},
        ]
        for _ in range(2):
            status, answer = await rig.post(session, chat(*history))
            assert status == 200, answer
            history += [message_of(answer), user(f"And {spelled}?")]
        trajectory = await rig.seal(session)
    assert_one_chain(trajectory, 2)
    assert_seen(trajectory, engine, PIXEL)
    assert seeing.tokenizer.decode(trajectory.prompt(trajectory.turns[1].id).tolist()).count(spelled) == 2
    assert trajectory.report.special_text == 6


async def test_what_cannot_be_shown_is_marked_and_told(vision: SentinelCodec, assets: Path, tmp_path: Path) -> None:
    """A template without eyes, an engine without eyes, sounds, and an image that is not there."""
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    blind = load_codec(assets / "tokenizers" / "qwen3")
    for name, codec, engine in (
        ("template", blind, SeeingStandIn(vision, agent)),
        ("engine", vision, ScriptedEngine(vision, agent)),
        ("both", vision, SeeingStandIn(vision, agent)),
    ):
        async with running_gateway(codec, tmp_path / name, engine=engine) as rig:
            session = await rig.open()
            content = [{"type": "text", "text": "See "}, picture, sound]
            body: Body = {"model": "m", "messages": [{"role": "user", "content": content}]}
            assert (await rig.post(session, body))[0] == 200
            body["messages"][0]["content"][1] = {"type": "image_url", "image_url": {"url": BROKEN}}
            status, answer = await rig.post(session, body)
            trajectory = await rig.seal(session)
        shown = codec.tokenizer.decode(trajectory.prompt(trajectory.turns[0].id).tolist())
        if name == "both":
            assert (status, answer["error"]["message"]) == (400, f"the image at {BROKEN} cannot be fetched")
            assert trajectory.turns[0].flags == ["audio_not_shown"]
            assert f"{VISION[2]}[audio]" in shown
        else:
            assert trajectory.turns[0].flags == ["audio_not_shown", "image_not_shown"]
            assert "See [image]\n[audio]" in shown
            assert trajectory.traces[0].images == []


@pytest.mark.parametrize("echoes", [True, False])
async def test_an_engine_that_does_not_report_its_placeholders_forks_and_says_so(
    vision: SentinelCodec, tmp_path: Path, echoes: bool
) -> None:
    """If the engine reports afterwards what the model saw, each turn is a row of its own; otherwise none is."""
    engine = ExpandingStandIn(vision, agent, echoes=echoes)
    talk = Chat()
    async with running_gateway(vision, tmp_path, engine=engine) as rig:
        session = await rig.open()
        await go_on(rig, session, talk)
        talk.result(THIRD)
        assert await go_on(rig, session, talk) == "I was given 2 images."
        talk.say("Without a picture.")
        await go_on(rig, session, talk)
        assert (await rig.post(session, chat(user("A side call."), tools=[])))[0] == 200
        trajectory = await rig.seal(session)
    seeing, plain = trajectory.turns[:3], trajectory.turns[3]
    assert [turn.reason for turn in seeing] == [None, "image_unreported", "image_unreported"]
    assert trajectory.report.forks == {"image_unreported": 2, "side": 1}
    assert all("image_unreported" in turn.flags for turn in seeing)
    assert [turn.parent for turn in seeing] == [None] * 3
    assert [turn.origin for turn in seeing] == [None, seeing[0].id, seeing[1].id]
    assert plain.flags == []
    if echoes:
        for turn in seeing:
            assert np.array_equal(trajectory.prompt(turn.id), engine.saw[turn.id])
        assert [turn.untrained for turn in seeing] == [None] * 3
        assert [len(trace.images) for trace in trajectory.traces] == [1, 2, 2]
        assert {image.length for trace in trajectory.traces for image in trace.images} == {0}
        assert trajectory.report.unknown_prompts == 0
    else:
        assert [turn.untrained for turn in seeing] == [Untrained.PROMPT_UNKNOWN] * 3
        assert trajectory.report.unknown_prompts == 3
        assert trajectory.traces == []
        assert trajectory.error == "no token of a trained role was sampled"


async def test_each_engine_of_a_session_has_its_own_eyes(vision: SentinelCodec, assets: Path, tmp_path: Path) -> None:
    """The same picture to a policy that sees and to a frozen engine that does not."""
    blind = load_codec(assets / "tokenizers" / "llama3_2")
    frozen = ModelRoute(ScriptedEngine(blind, agent), blind, "blind")
    engine = SeeingStandIn(vision, agent)
    content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}]
    async with running_gateway(vision, tmp_path, engine=engine, others={"blind": frozen}) as rig:
        session = await rig.open(settings={"models": {"b": "blind"}})
        for model in ("a", "b"):
            body: Body = {"model": model, "messages": [{"role": "user", "content": content}]}
            assert (await rig.post(session, body))[0] == 200
        counts = []
        for model in ("a", "b"):
            picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
            asked = {"model": model, "messages": [{"role": "user", "content": [picture]}]}
            url = session.root + "/v1/messages/count_tokens"
            async with rig.web.post(url, json=asked, headers=session.headers) as response:
                counts.append((await response.json())["input_tokens"])
        trajectory = await rig.seal(session)
    assert [len(turn.images) for turn in trajectory.turns] == [1, 0]
    assert [turn.flags for turn in trajectory.turns] == [[], ["image_not_shown"]]
    assert counts == [turn.prompt_length for turn in trajectory.turns]
    assert_seen(Trajectory.model_validate(trajectory.__dict__ | {"turns": trajectory.turns[:1]}), engine, PIXEL)
