"""Answers of engines that break their contract: each is a named error on arrival, and nothing of it is kept."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

import towline.engines
from support.engines import sglang_stand_in, vllm_stand_in
from support.engines.chat_upstream import Upstream
from support.engines.chat_upstream import served as chat_served
from support.gateway.gateway_rig import chat, running_gateway, user
from towline.common.arrays import LOGPROB_SLACK
from towline.conversation import Finish, Message, Request
from towline.engines import sglang
from towline.engines.base import ContextExceeded, Engine, EngineUnreachable, Sample, SampleRequest
from towline.engines.embedded import DecoderConfig, create_decoder, save_decoder
from towline.engines.openai import ChatServerEngine
from towline.engines.remote import ActiveTurn, HttpStatusError, event_error
from towline.engines.scripted import ScriptedEngine
from towline.engines.sglang import SglangEngine
from towline.engines.validation import InvalidResponse, check_sample, parsing
from towline.engines.version_stamp import stamp_versions, version_spans
from towline.engines.vllm import VllmEngine
from towline.engines.vllm import wire as vllm
from towline.engines.vllm.wire import VllmRoute
from towline.errors import EngineError
from towline.gateway.journal import replay
from towline.tokens.loading import load_codec

VOCABULARY = 96
PROMPT = np.arange(1, 20, dtype=np.int32)
Tamper = Callable[[bytes], bytes]


def swapped(pattern: bytes, by: bytes) -> Tamper:
    """Replaces the last match, so that earlier tokens of a stream are right."""

    def tamper(data: bytes) -> bytes:
        matches = list(re.finditer(pattern, data))
        assert matches, (pattern, data[:500])
        start, end = matches[-1].span(1)
        return data[:start] + by + data[end:]

    return tamper


BEFORE_LOGPROB = (
    rb'"content": \[\{"token_id": \d+, "logprob": ',  # vLLM's generate
    rb'"token_logprobs": \[',  # its completions
    rb'output_token_logprobs": \[(?:\[[^\]]*\], )*\[',  # SGLang
    rb'"token": "[^"]*", "logprob": ',  # chat completions
)
LOGPROB = rb"(?:" + b"|".join(BEFORE_LOGPROB) + rb")(-[\d.e+-]+)"
ID = rb'(?:"token_ids": \[(?:\d+, )*|output_token_logprobs": \[(?:\[[^\]]*\], )*\[[^,]*, )(\d+)'
TAMPERS: dict[str, Tamper] = {
    "positive logprob": swapped(LOGPROB, b"0.5"),
    "barely positive logprob": swapped(LOGPROB, b"0.00001"),
    "NaN": swapped(LOGPROB, b"NaN"),
    "infinite": swapped(LOGPROB, b"-1e39"),
    "null logprob": swapped(LOGPROB, b"null"),
    "text logprob": swapped(LOGPROB, b'"-0.5"'),
    "boolean logprob": swapped(LOGPROB, b"false"),
    "id outside": swapped(ID, b"999999999"),
    "negative id": swapped(ID, b"-1"),
    "boolean id": swapped(ID, b"true"),
    "text id": swapped(ID, b'"7"'),
    "fraction": swapped(ID, b"7.5"),
    "an id too many": swapped(ID, b"7, 7"),
    "unknown finish": swapped(rb'"(?:finish_reason|type)": "(length|stop)"', b"error"),
    "garbage": lambda data: b"<html>\n<body>proxy login</body></html>\n",
    "not UTF-8": lambda data: b"data: \xff\xfe\x00\n\n",
    "empty": lambda data: b"",
    "a list": lambda data: b"data: [1, 2]\n\n" if data.startswith(b"data") else b"[1, 2]",
    "cut in the middle": lambda data: data[: len(data) // 2],
    "cut in the last event": lambda data: data[: data.rstrip().rfind(b"}") - 20],
}


class Proxy:
    """Stands before a stand-in and tampers with the answers to turns, once it is told how."""

    def __init__(self, upstream: str):
        self.upstream = upstream
        self.tamper: Tamper | None = None

    async def handle(self, request: web.Request) -> web.Response:
        async with (
            aiohttp.ClientSession() as http,
            http.request(request.method, self.upstream + request.path_qs, data=await request.read()) as answer,
        ):
            data = await answer.read()
            if self.tamper is not None and request.method == "POST":
                data = self.tamper(data)
            return web.Response(body=data, status=answer.status, content_type=answer.content_type)


@contextlib.asynccontextmanager
async def proxied(upstream: str) -> AsyncIterator[tuple[Proxy, str]]:
    proxy = Proxy(upstream)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield proxy, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = DecoderConfig("qwen3", VOCABULARY, **sizes, num_key_value_heads=1, head_dim=8, initializer_range=0.5)
    save_decoder(create_decoder(config, 0), folder)
    return folder


@contextlib.asynccontextmanager
async def engine_of(kind: str, weights: Path, assets: Path) -> AsyncIterator[tuple[Proxy, Engine]]:
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        make: Callable[[str], Engine]
        if kind.startswith("vllm"):
            url = await enter(vllm_stand_in.served(vllm_stand_in.VllmStandIn(weights, scale_out=kind == "vllm")))
            make = VllmEngine
        elif kind.startswith("sglang"):
            server = sglang_stand_in.SglangStandIn(weights, incremental=kind != "sglang")
            url = await enter(sglang_stand_in.served(server))
            make = SglangEngine
        else:
            codec = load_codec(assets / "tokenizers" / "qwen3")
            url = (await enter(chat_served(Upstream(codec)))).removesuffix("/v1")
            make = lambda url: ChatServerEngine(url + "/v1", "big", tokenizer=codec.tokenizer)  # noqa: E731
        proxy, url = await enter(proxied(url))
        engine = make(url)
        stack.push_async_callback(engine.close)
        await engine.start()
        yield proxy, engine


@pytest.mark.parametrize("kind", ["vllm", "vllm-completions", "sglang", "sglang-stream", "openai"])
async def test_every_engine_names_what_is_wrong(kind: str, weights: Path, assets: Path) -> None:
    asked = Request("chat", "m", [Message("user", "Hi")])
    request = SampleRequest(PROMPT, 5, temperature=1.0, seed=3, request=asked)
    async with engine_of(kind, weights, assets) as (proxy, engine):
        before = await engine.sample(request)
        for name, tamper in TAMPERS.items():
            proxy.tamper = tamper
            if name == "an id too many" and kind.startswith("sglang"):
                continue  # Its third entry is the token's text, which is not read.
            with pytest.raises(EngineError) as caught:
                pytest.fail(f"{name}: {await engine.sample(request)}")
            assert "http://127.0.0.1" in str(caught.value), name
            assert len(str(caught.value)) < 700, name
        # Rounding is no error: it is stored as 0.
        proxy.tamper = swapped(LOGPROB, b"0.0000001")
        sample = await engine.sample(request)
        assert sample.logprobs[-1] == 0.0
        proxy.tamper = None
        after = await engine.sample(request)
        assert len(after.ids) == len(before.ids)


BAD = st.sampled_from([True, None, "7", "", -1, 0.5, 1e300, 10**12, [], {}, [[]], 3, -0.25, VOCABULARY, 1e-9])


def mutated(draw: st.DataObject, answer: Any) -> Any:
    """The answer with one value replaced, doubled or taken away."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(answer)
    holder, key = draw.draw(st.sampled_from(places))
    how = draw.draw(st.sampled_from(["replace", "delete", "double"]))
    if how == "delete":
        del holder[key]
    elif how == "double" and isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        holder[key] = draw.draw(BAD)
    return json.loads(json.dumps(answer))


@given(st.data(), st.sampled_from(["generate", "completions", "sglang"]))
@settings(max_examples=400, deadline=None)
def test_any_single_mutation_is_refused_or_harmless(data: st.DataObject, kind: str) -> None:
    request = SampleRequest(PROMPT, 8)
    turn = ActiveTurn(request, 2, vocabulary=VOCABULARY)
    ids, logprobs = [5, 6, 7], [-0.5, -1.0, 0.0]
    usage = {"prompt_tokens": len(PROMPT), "prompt_tokens_details": {"cached_tokens": 4}}
    if kind == "sglang":
        told = [[p, id, None] for p, id in zip(logprobs, ids, strict=True)]
        meta = {"output_token_logprobs": told, "completion_tokens": 3, "prompt_tokens": len(PROMPT), "cached_tokens": 4}
        answer: Any = {**meta, "finish_reason": {"type": "length", "length": 3}}
    else:
        choice: dict[str, Any] = {"token_ids": ids, "finish_reason": "length", "stop_reason": None}
        if kind == "generate":
            choice["logprobs"] = {
                "content": [{"token_id": id, "logprob": p} for p, id in zip(logprobs, ids, strict=True)]
            }
            choice["weight_versions"] = [
                {"version": "2", "start": 0, "end": 2},
                {"version": "3", "start": 2, "end": 3},
            ]
        else:
            choice["logprobs"] = {"tokens": [f"token_id:{id}" for id in ids], "token_logprobs": logprobs}
        answer = {"choices": [choice], "usage": usage}
    answer = mutated(data, answer)
    try:
        with parsing("the engine", answer):
            if kind == "sglang":
                sglang.read_meta(answer, turn)
            else:
                vllm.read_event(VllmRoute.GENERATE if kind == "generate" else VllmRoute.COMPLETIONS, answer, turn)
        sample = check_sample(turn.sample(), request, VOCABULARY)
    except EngineError:
        return
    held(sample)


@pytest.mark.parametrize(("counted", "reported"), [(3, 2), (2, 3), (0, 1)])
def test_sglang_must_count_as_many_tokens_as_it_has_logprobs_of(counted: int, reported: int) -> None:
    """Of a response that holds more, the first ones would be missing from the row."""
    meta = {
        "output_token_logprobs": [[-0.5, id, None] for id in range(reported)],
        "completion_tokens": counted,
        "finish_reason": {"type": "length", "length": counted},
    }
    with pytest.raises(ValueError, match="holds the logprobs of"):
        sglang.read_meta(meta, ActiveTurn(SampleRequest(PROMPT, 8), 0))


def held(sample: Sample) -> None:
    """The contract, written a second time."""
    assert len(sample.ids) == len(sample.logprobs) == len(sample.versions) <= 8
    assert all(0 <= id < VOCABULARY for id in sample.ids.tolist())
    assert all(math.isfinite(value) and value <= 0 for value in sample.logprobs.tolist())
    assert all(version >= 0 for version in sample.versions.tolist())
    assert sample.prompt_tokens == len(PROMPT)


@given(
    st.lists(st.integers(-3, VOCABULARY + 3), max_size=10),
    st.lists(st.floats(width=32) | st.floats(-1, float(np.float32(1e-6)), width=32), max_size=10),
    st.lists(st.integers(-1, 5), max_size=10),
    st.sampled_from(list(Finish)),
    st.integers(len(PROMPT) - 1, len(PROMPT) + 1),
)
@settings(max_examples=300, deadline=None)
def test_no_sample_passes_that_breaks_the_contract(
    ids: list[int], logprobs: list[float], versions: list[int], finish: Finish, prompt: int
) -> None:
    sample = Sample(
        np.array(ids, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32), finish, prompt
    )
    with contextlib.suppress(InvalidResponse):
        held(check_sample(sample, SampleRequest(PROMPT, 8), VOCABULARY))


def test_rounding_above_zero_is_stored_as_zero() -> None:
    made = Sample(np.array([1, 2], np.int32), np.array([LOGPROB_SLACK / 2, -1], np.float32), np.zeros(2, np.int32),
                  Finish.LENGTH, len(PROMPT))  # fmt: skip
    assert check_sample(made, SampleRequest(PROMPT, 8), VOCABULARY).logprobs.tolist() == [0.0, -1.0]


class Lying(ScriptedEngine):
    """Answers as its script says, and then not quite."""

    lie: Callable[[Sample], None] | None = None

    async def sample(self, request: SampleRequest) -> Sample:
        made = await super().sample(request)
        if self.lie is not None:
            self.lie(made)
        return made


def _set(name: str, value: Any) -> Callable[[Sample], None]:
    def lie(sample: Sample) -> None:
        values = getattr(sample, name).copy()
        values[-1] = value
        setattr(sample, name, values)

    return lie


async def test_nothing_of_a_bad_turn_is_journaled(assets: Path, tmp_path: Path) -> None:
    codec = load_codec(assets / "tokenizers" / "qwen3")
    engine = Lying(codec)
    lies: list[Callable[[Sample], None]] = [
        _set("logprobs", 0.25),
        _set("logprobs", np.nan),
        _set("ids", codec.tokenizer.size),
        _set("ids", -4),
        _set("versions", -1),
        lambda sample: setattr(sample, "logprobs", sample.logprobs[:-1]),
        lambda sample: setattr(sample, "prompt_tokens", sample.prompt_tokens + 1),
    ]
    async with running_gateway(codec, tmp_path, engine=engine) as rig:
        session = await rig.open()
        status, _ = await rig.post(session, chat(user("One")))
        assert status == 200
        for lie in lies:
            engine.lie = lie
            status, answer = await rig.post(session, chat(user("Two")))
            assert status == 503, answer
            assert "the engine" in answer["error"]["message"]
        engine.lie = None
        status, _ = await rig.post(session, chat(user("Two")))
        assert status == 200
        trajectory = await rig.trajectory(session)
        whole = [turn.id for turn in trajectory.turns if len(turn.sampled)]
        assert len(whole) == 2
    turns = [record.fields["id"] for record in replay(tmp_path / "journal") if record.kind == "turn"]
    assert turns == whole
    async with running_gateway(codec, tmp_path, engine=ScriptedEngine(codec)) as rig:
        assert len((await rig.trajectory(session)).turns) == 2


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("context_length_exceeded", ContextExceeded),
        (400, ContextExceeded),
        ("400", ContextExceeded),
        ("server_error", HttpStatusError),
        (None, HttpStatusError),
        (503, EngineUnreachable),
    ],
)
def test_only_a_refused_request_in_a_stream_is_the_policys_doing(code: object, kind: type[EngineError]) -> None:
    """The text alone does not decide: a failing server may quote the limit too."""
    event = {"error": {"message": "This model's maximum context length is 10 tokens", "code": code}}
    error = event_error("http://server/v1", event, orjson.dumps(event))
    assert type(error) is kind
    assert not isinstance(error, HttpStatusError) or error.status == 500


def test_tokens_have_the_engines_version_unless_the_server_reports_others() -> None:
    assert stamp_versions(3, 7).tolist() == [7, 7, 7]
    assert stamp_versions(3, 7, version_spans([(6, 0, 1), (7, 1, 9)], 3)).tolist() == [6, 7, 7]
    assert stamp_versions(0, 7).tolist() == []
    assert stamp_versions(3, 7).dtype == stamp_versions(1, 7, [8]).dtype == np.int32


@pytest.mark.parametrize("spans", [[(1, 0, 2)], [(1, 1, 3)], [(1, 0, 2), (2, 1, 3)], []])
def test_spans_that_do_not_cover_the_tokens_are_refused(spans: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="span"):
        version_spans(spans, 3)


def test_every_engine_stamps_with_it() -> None:
    """`versions` of a `Sample` is a call of `stamp_versions`, parts joined, or an empty constant."""
    folder = Path(towline.engines.__file__).parent
    made = [
        (file.name, ast.unparse(next((k.value for k in call.keywords if k.arg == "versions"), None) or call.args[2]))
        for file in sorted(folder.rglob("*.py"))
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Sample"
    ]
    assert {"openai.py", "remote.py", "scripted.py", "turn.py"} <= {name for name, _ in made}
    assert [one for one in made if not one[1].startswith(("stamp_versions(", "np.concatenate(", "_NONE"))] == []
