"""Several models in one session: each name goes to its engine, with that engine's own vocabulary, and only the policy is
trained. The policy has the tokenizer of Qwen 3, the frozen engine that of the tiny model: no id of one means anything to
the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from support.gateway.gateway_rig import (
    BASH,
    Body,
    Opened,
    Rig,
    Start,
    chat,
    eventually,
    message_of,
    results,
    system,
    user,
)
from towline.audit.clients import DIALECTS, make_client
from towline.cli.engines import make_gateway
from towline.config import Settings
from towline.conversation import Request, ToolCall
from towline.demo import tokenizer as tiny
from towline.engines.scripted import Say, ScriptedEngine
from towline.errors import ConfigError
from towline.gateway.gateway import Gateway
from towline.gateway.model_routes import ModelRoute, ModelRoutes
from towline.gateway.server import serve_gateway
from towline.schema import POLICY, ForkReason, Trajectory, Turn, TurnRole, Untrained
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

MODELS = {"*haiku*": "small"}
MAIN, SIDE = "towline", "claude-haiku-4-5"
CONTEXT = 4096


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelCodec:
    """The tiny model's own tokenizer and template: 512 ids."""
    folder = tmp_path_factory.mktemp("small")
    tiny.write(folder)
    return load_codec(folder)


def agent(request: Request) -> Say:
    """A call, then an answer that says how long the conversation is."""
    if request.tools and request.messages[-1].role != "tool":
        return Say("", "I look.", [ToolCall("", "bash", {"command": f"ls {len(request.messages)}"})])
    return Say(f"Answer {len(request.messages)}.", "I know.")


def title(request: Request) -> Say:
    return Say(f"Title {len(request.messages)}")


def route(
    codec: ModelCodec, script: Callable[[Request], Say] = title, name: str = "small", **options: Any
) -> ModelRoute:
    return ModelRoute(ScriptedEngine(codec, script, context=CONTEXT, **options), codec, name, "tiny-model")


def engine_of(route: ModelRoute) -> ScriptedEngine:
    assert isinstance(route.engine, ScriptedEngine)
    return route.engine


def of_engine(trajectory: Trajectory, name: str) -> list[Turn]:
    return [turn for turn in trajectory.turns if turn.engine == name]


def assert_chain(trajectory: Trajectory, turns: Sequence[Turn], engine: ScriptedEngine, codec: ModelCodec) -> None:
    """Each turn continues the previous one, with exactly the ids that reached its engine."""
    sent = {request.id: request for request in engine.requests}
    for before, turn in zip([None, *turns], turns, strict=False):
        assert turn.parent == (before.id if before is not None else None)
        prompt = trajectory.prompt(turn.id)
        assert np.array_equal(sent[turn.id].prompt, prompt)
        assert sent[turn.id].stop_ids == codec.stop_ids
        assert int(prompt.max()) < codec.tokenizer.size
        assert int(turn.sampled[-1]) in codec.stop_ids


async def ask(rig: Rig, session: Opened, dialect: str, **fields: Any) -> Body:
    """A call in a dialect: the message that it is answered with."""
    spoken = make_client(dialect, open_reasoning=True)
    sent = spoken.encode({"stream": False, "seed": 1, **fields})
    url = session.root + sent.path + (f"?{sent.query}" if sent.query else "")
    async with rig.web.post(url, json=sent.body, headers=spoken.credentials(session.key)) as response:
        data = await response.read()
        assert response.status == 200, data
    (choice,) = spoken.decode(data, stream=False)
    message: Body = choice["message"]
    return message


def test_names_stand_before_patterns_and_patterns_before_the_next() -> None:
    made: dict[str, Any] = {name: ModelRoute(None, None, name, f"model-{name}") for name in ("a", "b", "c")}  # type: ignore[arg-type]
    policy = ModelRoute(None, None, POLICY, "main", trained=True)  # type: ignore[arg-type]
    routes = ModelRoutes(policy, made)
    models = {"claude-*": "a", "*-haiku-*": "b", "claude-haiku-4": "b", "model-b": "a"}

    def chosen(model: str, models: Mapping[str, str] = models) -> str:
        return routes.of(model, models).name

    assert chosen("claude-haiku-4") == "b"
    assert chosen("claude-haiku-4-5") == "a"
    assert chosen("my-haiku-1") == "b"
    assert chosen("Claude-sonnet") == POLICY
    assert chosen("anything") == chosen("main") == chosen("") == POLICY
    # A model's own name is a name, for the engines that the session reaches and no others; the session may overrule it.
    assert (chosen("model-a"), chosen("model-b"), chosen("model-c")) == ("a", "a", POLICY)
    assert chosen("main", {"*": "a"}) == POLICY
    assert chosen("main", {"main": "a"}) == "a"
    assert chosen("claude", {"*": "a", "claude": POLICY}) == POLICY
    assert routes.names(models) == ["main", "model-a", "model-b", "claude-haiku-4"]
    assert routes.names({}) == ["main"]
    assert routes.unknown(models) is None
    assert routes.unknown({"x": "a", "y*": "d"}) == "y*"
    with pytest.raises(ConfigError, match="policy"):
        ModelRoutes(policy, {POLICY: policy})


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_side_calls_go_to_the_frozen_engine(
    start: Start, codec: ModelCodec, small: ModelCodec, dialect: str
) -> None:
    """Two conversations, turn about, each exact on its engine; the rows are those of the policy alone."""
    frozen = route(small, version=7)
    async with start(agent, others={"small": frozen}) as rig:
        session = await rig.open(settings={"models": MODELS}, instruction="Look around.")
        main: list[Body] = [system("Be brief."), user("Look around.")]
        side: list[Body] = [system("You name things."), user("Name this: Look around.")]
        for _ in range(3):
            said = await ask(rig, session, dialect, model=SIDE, messages=side, max_tokens=50)
            side += [said, user("Another.")]
            said = await ask(rig, session, dialect, model=MAIN, messages=main, tools=[BASH], max_tokens=200)
            main += [said, *(results(said) or [user("Go on.")])]
        trajectory = await rig.seal(session)
        policy, others = of_engine(trajectory, POLICY), of_engine(trajectory, "small")
        assert [turn.index for turn in trajectory.turns if turn.engine == "small"] == [0, 2, 4]
        assert_chain(trajectory, policy, rig.engine, codec)
        assert_chain(trajectory, others, engine_of(frozen), small)
        shown = small.tokenizer.decode(trajectory.prompt(others[1].id).tolist())
        assert "Name this" in shown
        assert "Title 2" in shown
        assert {turn.role for turn in policy} == {TurnRole.MAIN}
        assert {(turn.role, turn.untrained) for turn in others} == {(TurnRole.SIDE, Untrained.FROZEN)}
        assert {int(version) for turn in others for version in turn.versions} == {7}
        # Conversations of their own, and the harness's names as it gave them.
        assert [turn.reason for turn in trajectory.turns] == [None, ForkReason.MODEL_CHANGED, None, None, None, None]
        assert [turn.model for turn in trajectory.turns] == [SIDE, MAIN] * 3
        (trace,) = trajectory.traces
        assert trace.trained_tokens == sum(len(turn.sampled) for turn in policy) == trajectory.report.trained_tokens
        assert {int(index) for index in trace.turn_ids if index >= 0} == {turn.index for turn in policy}
        assert trajectory.report.frozen_turns == 3
        assert trajectory.error is None


async def test_frozen_turns_are_in_no_row_whatever_their_role(
    start: Start, codec: ModelCodec, small: ModelCodec
) -> None:
    """A sub-agent on the frozen engine, with every role trained, and in every builder."""
    for builder in ("exact", "merged", "per_turn"):
        async with start(agent, others={"small": route(small, agent)}) as rig:
            roles = ["main", "subagent", "compaction", "side"]
            settings = {"models": MODELS, "trained_roles": roles, "builder": builder}
            session = await rig.open(id=f"session-{builder}", settings=settings)
            _, first = await rig.post(session, chat(user("Begin."), model=MAIN))
            headers = {"x-openai-subagent": "review"}
            assert (await rig.post(session, chat(user("Check."), model=SIDE), headers=headers))[0] == 200
            said = message_of(first)
            assert (await rig.post(session, chat(user("Begin."), said, *results(said), model=MAIN)))[0] == 200
            trajectory = await rig.seal(session)
        frozen = of_engine(trajectory, "small")
        assert [(turn.role, turn.untrained) for turn in frozen] == [(TurnRole.SUBAGENT, Untrained.FROZEN)]
        trained = {int(i) for trace in trajectory.traces for i in trace.turn_ids[trace.loss_mask == 1]}
        assert trained == {0, 2}
        assert max(int(trace.token_ids.max()) for trace in trajectory.traces) < codec.tokenizer.size
        # What is claimed to be frozen and is trained all the same cannot be read.
        broken = [t.model_copy(update={"untrained": Untrained.FROZEN}) for t in trajectory.turns]
        with pytest.raises(ValueError, match="which is not trained: frozen"):
            Trajectory.model_validate(trajectory.__dict__ | {"turns": broken})


async def test_a_conversation_that_moves_to_another_model_starts_anew_there(
    start: Start, codec: ModelCodec, small: ModelCodec
) -> None:
    """No sampled id crosses over, though the messages, their fingerprints and the minted call ids are the same."""
    frozen = route(small, agent)
    async with start(agent, others={"small": frozen}) as rig:
        session = await rig.open(settings={"models": MODELS})
        history: list[Body] = [user("Begin.")]
        for model in (MAIN, SIDE, MAIN, SIDE):
            _, answer = await rig.post(session, chat(*history, model=model))
            said = message_of(answer)
            history += [said, *(results(said) or [user("More.")])]
        trajectory = await rig.seal(session)
        assert [turn.engine for turn in trajectory.turns] == [POLICY, "small", POLICY, "small"]
        first, second, third, fourth = trajectory.turns
        assert (second.parent, second.origin, second.reason) == (None, first.id, ForkReason.MODEL_CHANGED)
        # Back again: from its own last turn on, with what the other said as text; and so the other.
        assert (third.parent, third.reason) == (first.id, None)
        assert (fourth.parent, fourth.reason) == (second.id, None)
        for turn, used, ran, answered in ((second, small, 1, 0), (third, codec, 1, 1), (fourth, small, 2, 1)):
            text = used.tokenizer.decode(trajectory.prompt(turn.id).tolist())
            assert "ls 1" in text
            assert (text.count("ran {"), text.count("Answer 3.")) == (ran, answered)
        assert "spliced_replies" not in [flag for turn in trajectory.turns for flag in turn.flags]
        assert_chain(trajectory, [second, fourth], engine_of(frozen), small)
        (trace,) = trajectory.traces
        assert trace.trained_tokens == len(first.sampled) + len(third.sampled)


async def test_frozen_engines_are_sampled_as_the_harness_wishes(start: Start, small: ModelCodec) -> None:
    frozen = route(small)
    settings = {"models": MODELS, "sampling": {"temperature": 0.9}}
    async with start(agent, others={"small": frozen}) as rig:
        session = await rig.open(settings=settings)
        for model in (MAIN, SIDE):
            requested = {"temperature": 0.25, "top_p": 0.5}
            assert (await rig.post(session, chat(user("Begin."), model=model, **requested)))[0] == 200
        assert (await rig.post(session, chat(user("Again."), model=SIDE)))[0] == 200
        turns = (await rig.seal(session)).turns
        assert [(turn.temperature, turn.top_p) for turn in turns] == [(0.9, 1.0), (0.25, 0.5), (0.9, 1.0)]
        assert [turn.overridden for turn in turns] == [["temperature", "top_p"], [], []]
        assert [request.temperature for request in engine_of(frozen).requests] == [0.25, 0.9]


async def test_each_engine_has_its_own_context_and_counts_its_own_tokens(start: Start, small: ModelCodec) -> None:
    words = "word " * (CONTEXT - 500)
    async with start(agent, others={"small": route(small)}) as rig:
        session = await rig.open(settings={"models": MODELS})
        assert (await rig.post(session, chat(user(words), model=MAIN)))[0] == 200
        status, refusal = await rig.post(session, chat(user(words), model=SIDE))
        assert status == 400
        assert f"maximum context length is {CONTEXT} tokens" in refusal["error"]["message"]
        counts = []
        for model in (MAIN, SIDE):
            body = {"model": model, "messages": [user("Überall 模型")]}
            url = session.root + "/v1/messages/count_tokens"
            async with rig.web.post(url, json=body, headers=session.headers) as response:
                counts.append((await response.json())["input_tokens"])
        assert counts[0] < counts[1]


async def test_models_are_listed_and_engines_that_are_not_there_refused(
    start: Start, codec: ModelCodec, small: ModelCodec, tmp_path: Path
) -> None:
    async with start(agent, others={"small": route(small)}) as rig:
        session = await rig.open(settings={"models": {**MODELS, "judge": "small"}})
        plain = await rig.open()
        listed = []
        for one in (session, plain):
            async with rig.web.get(one.base_url + "/models", headers=one.headers) as response:
                listed.append([model["id"] for model in (await response.json())["data"]])
        assert listed == [["towline", "tiny-model", "judge"], ["towline"]]
        for name in ("judge", "tiny-model"):
            assert (await rig.post(session, chat(user("Begin."), model=name)))[0] == 200
            assert (await rig.post(plain, chat(user("Begin."), model=name)))[0] == 200
        assert [turn.engine for turn in (await rig.trajectory(session)).turns] == ["small", "small"]
        assert [turn.engine for turn in (await rig.trajectory(plain)).turns] == [POLICY, POLICY]

        async def refused(models: Any) -> str:
            status, answer = await rig.call("POST", "/v1/sessions", {"settings": {"models": models}})
            assert status == 422
            return str(answer["error"])

        assert await refused({"a": "small", "*": "large"}) == (
            "settings.models.*: unknown engine 'large'; known engines: policy, small"
        )
        assert "settings.models.a: " in await refused({"a": 1})
        assert "settings.models: " in await refused(["small"])
        trajectory = await rig.seal(session)
        assert (
            trajectory.error == "every model call went to a frozen engine; map a model to the policy in session.models"
        )
        assert trajectory.traces == []
    defaults = Settings.model_validate({"session": {"models": {"a": POLICY}}})
    made = Gateway(ScriptedEngine(codec), codec, defaults.gateway, defaults=defaults.session)
    assert made.routes.names(defaults.session.models) == ["towline", "a"]
    with pytest.raises(ConfigError, match=r"session\.models\.a: unknown engine 'b'"):
        Gateway(
            ScriptedEngine(codec),
            codec,
            defaults.gateway,
            defaults=defaults.session.model_copy(update={"models": {"a": "b"}}),
        )


def test_settings_name_engines_that_there_are(tmp_path: Path) -> None:
    file = tmp_path / "towline.toml"
    file.write_text(
        '[engines.judge.engine]\nkind = "scripted"\n[session.models]\n"*haiku*" = "judge"\n"*" = "policy"\n'
    )
    settings = Settings.load(file)
    assert list(settings.session.models.items()) == [("*haiku*", "judge"), ("*", "policy")]
    assert settings.engines["judge"].engine.kind == "scripted"
    for text, problem in (
        ('[session.models]\na = "judge"\n', "session.models.a: there is no engine 'judge'"),
        ("[engines.policy.engine]\nmax_batch = 1\n", "engines.policy: "),
        ("[engines.a.engin]\nmax_batch = 1\n", "engines.a.engin"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            Settings.load(file)


async def test_two_engines_by_configuration_alone(assets: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    tiny.write(tmp_path / "small")
    file = tmp_path / "towline.toml"
    file.write_text(
        f"""
        [gateway]
        port = 0
        control_port = 0
        data = "{tmp_path / "data"}"
        [engine]
        kind = "scripted"
        [model]
        folder = "{assets / "tokenizers" / "qwen3"}"
        [engines.side.engine]
        kind = "scripted"
        [engines.side.model]
        folder = "{tmp_path / "small"}"
        [session.models]
        "*haiku*" = "side"
        """
    )
    gateway, _ = make_gateway(Settings.load(file), Console(quiet=True))
    async with serve_gateway(gateway, "control") as running, aiohttp.ClientSession() as web:
        opened = await gateway.create({})
        headers = {"authorization": f"Bearer {opened.key}"}
        async with web.get(running.base_url + "/v1/models", headers=headers) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["qwen3", "small"]
        for model in ("whatever", SIDE):
            body = {"model": model, "messages": [user("Begin.")]}
            async with web.post(running.base_url + "/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200
        trajectory = await gateway.seal(opened.session.id)
    assert [(turn.engine, turn.untrained) for turn in trajectory.turns] == [(POLICY, None), ("side", Untrained.FROZEN)]


async def test_a_sessions_own_patterns_stand_before_the_defaults(start: Start, small: ModelCodec) -> None:
    others = {name: route(small, name=name) for name in ("one", "two")}
    defaults = Settings.model_validate({"engines": {"one": {}, "two": {}}, "session": {"models": {"*": "one"}}}).session
    async with start(agent, others=others, session=defaults) as rig:
        session = await rig.open(settings={"models": {"a*": "two"}})
        for model in ("abc", "xyz", "towline"):
            assert (await rig.post(session, chat(user("Begin."), model=model)))[0] == 200
        assert [turn.engine for turn in (await rig.trajectory(session)).turns] == ["two", "one", POLICY]


async def test_a_pause_is_for_the_policy_alone(start: Start, small: ModelCodec) -> None:
    frozen = route(small)
    async with start(agent, others={"small": frozen}) as rig:
        session = await rig.open(settings={"models": MODELS})
        assert (await rig.call("POST", "/v1/policy/pause"))[0] == 200
        waiting = asyncio.create_task(rig.post(session, chat(user("Begin."), model=MAIN)))
        await eventually(lambda: len(rig.gateway.get(session.id).graph.nodes) == 1)
        assert (await rig.post(session, chat(user("Name this."), model=SIDE)))[0] == 200
        assert not waiting.done()
        assert len(rig.engine.requests) == 0
        status, policy = await rig.call("POST", "/v1/policy/resume", {"version": 5})
        assert (status, policy["version"]) == (200, 5)
        assert (await waiting)[0] == 200
        assert (rig.engine.version, frozen.engine.version) == (5, 0)
        versions = {turn.engine: set(turn.versions.tolist()) for turn in (await rig.seal(session)).turns}
        assert versions == {POLICY: {5}, "small": {0}}


async def test_after_a_restart_each_conversation_continues_at_its_engine(
    start: Start, codec: ModelCodec, small: ModelCodec
) -> None:
    main: list[Body] = [user("Begin.")]
    side: list[Body] = [user("Name this.")]

    async def step(rig: Rig, session: Opened) -> None:
        for history, model in ((main, MAIN), (side, SIDE)):
            status, answer = await rig.post(session, chat(*history, model=model))
            assert status == 200, answer
            said = message_of(answer)
            history += [said, *(results(said) or [user("More.")])]

    def moved(rig: Rig, session: Opened) -> Opened:
        return Opened(session.id, session.key, rig.running.base_url + "/v1", rig.running.base_url)

    async with start(agent, others={"small": route(small, agent)}) as rig:
        session = await rig.open(settings={"models": MODELS})
        await step(rig, session)
    # The engine is gone from the settings: its conversations are kept, and cannot continue; the policy's can.
    async with start(agent) as rig:
        status, refusal = await rig.post(moved(rig, session), chat(*side, model=SIDE))
        assert (status, refusal["error"]["message"]) == (
            404,
            "engine 'small' of this session is no longer configured; add it to `engines`",
        )
        assert [turn.engine for turn in (await rig.trajectory(session)).turns] == [POLICY, "small"]
    frozen = route(small, agent)
    async with start(agent, others={"small": frozen}) as rig:
        await step(rig, moved(rig, session))
        await step(rig, moved(rig, session))
        trajectory = await rig.seal(session)
        for name, engine, used in ((POLICY, rig.engine, codec), ("small", engine_of(frozen), small)):
            turns = of_engine(trajectory, name)
            assert len(turns) == 3
            assert [turn.parent for turn in turns] == [None, turns[0].id, turns[1].id]
            sent = {request.id: request.prompt for request in engine.requests}
            for turn in turns[1:]:
                assert np.array_equal(sent[turn.id], trajectory.prompt(turn.id))
                assert int(turn.sampled[-1]) in used.stop_ids
        assert [turn.untrained for turn in trajectory.turns] == [None, Untrained.FROZEN] * 3
        (trace,) = trajectory.traces
        assert trace.trained_tokens == sum(len(turn.sampled) for turn in of_engine(trajectory, POLICY))

    # A file from before there were engines by name reads as one of the policy.
    old = Trajectory.from_arrow(
        _without(trajectory.to_arrow(), {"engine", "images", "frozen_turns", "unknown_prompts"})
    )
    assert {turn.engine for turn in old.turns} == {POLICY}
    assert [turn.sampled.tolist() for turn in old.turns] == [turn.sampled.tolist() for turn in trajectory.turns]
    assert old.traces == trajectory.traces


def _without(table: pa.Table, names: set[str]) -> pa.Table:
    """The table in a schema whose records lack these fields."""

    def reduced(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_list(kind):
            return pa.list_(reduced(kind.value_type))
        if pa.types.is_struct(kind):
            return pa.struct([pa.field(f.name, reduced(f.type)) for f in kind if f.name not in names])
        return kind

    return table.cast(pa.schema([(field.name, reduced(field.type)) for field in table.schema], table.schema.metadata))
