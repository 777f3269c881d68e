"""The text after a turn is what the whole conversation gives, whatever the template looks for in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tokens.conversations import (
    DAY,
    TOOLS,
    Say,
    Talk,
    call,
    codec_for,
    model_names,
    modelled,
    real,
    result,
    system,
    template_names,
    templated,
    user,
)
from towline.conversation import Message, Tool, ToolCall
from towline.schema import ContextPolicy
from towline.tokens.codec import CannotContinue, EncodedPrompt, RenderContext
from towline.tokens.templates.chat_template import ChatTemplate, TemplateError
from towline.tokens.templates.family import FamilyCodec
from towline.tokens.templates.history_scope import HistoryClassifier, HistoryScope
from towline.tokens.templates.sentinel import SentinelCodec

NONE = np.empty(0, np.int32)
NAMES = [name for name in template_names() if not name.endswith("_training")]
REORDERS = ("gemma4", "diffusion_gemma")
"""They move text before a call after its result."""


def frame(tools: tuple[Tool, ...] = (), **arguments: object) -> RenderContext:
    return RenderContext(tools, arguments, lambda: DAY)


# What a template looks for


@pytest.mark.parametrize(
    ("source", "inside", "whole"),
    [
        ("{% if '/no_think' in messages[0].content %}x{% endif %}", {"/no_think"}, set()),
        ("{% for m in messages %}{% if '/think' not in m['content'] %}x{% endif %}{% endfor %}", {"/think"}, set()),
        ("{% for m in messages %}{% if m.content.startswith('<think>') %}{% endif %}{% endfor %}", {"<think>"}, set()),
        ("{% set flag = '/off' %}{% for m in messages %}{{ flag in m.content }}{% endfor %}", {"/off"}, set()),
        ("{% for f in ['/one', '/two'] %}{{ 'y' if f in messages[0].content }}{% endfor %}", {"/one", "/two"}, set()),
        ("{% set n = namespace(f='/ns') %}{% if n.f in messages[0].content %}{% endif %}", {"/ns"}, set()),
        ("{% macro m(t, f='/arg') %}{{ f in t }}{% endmacro %}{{ m(messages[0].content) }}", {"/arg"}, set()),
        ("{% if messages[0].content[:4] == '/cut' %}{% endif %}", {"/cut"}, set()),
        ("{% if messages[0].content.split('</t>')|length > 1 %}{% endif %}", {"</t>"}, set()),
        ("{% if '/a' ~ 'dd' in messages[0].content %}{% endif %}", {"/add", "add"} - {"add"}, set()),
        ("{% if messages[0].content == 'hello' %}{% endif %}", set(), {"hello"}),
        ("{% if messages|selectattr('content', 'equalto', 'stop')|list %}{% endif %}", set(), {"stop"}),
        # Structure and fields are not text.
        ("{% for m in messages %}{% if m.role == 'user' and 'tool_calls' in m %}{% endif %}{% endfor %}", set(), set()),
        ("{% for m in messages %}{% if m['role']|lower in ['user', 'ai'] %}{% endif %}{% endfor %}", set(), set()),
    ],
)
def test_strings_that_decide_something(source: str, inside: set[str], whole: set[str]) -> None:
    conditions = ChatTemplate(source).conditions
    assert inside <= conditions.inside
    assert whole <= conditions.whole
    if not inside | whole:
        assert HistoryClassifier(conditions).notable(user("a user and an ai with tool_calls")) is False
    for text in inside:
        assert HistoryClassifier(conditions).notable(user(f"some {text.upper()} words"))
        assert HistoryClassifier(conditions).notable(Message("tool", f"{text}"))
        assert HistoryClassifier(conditions).notable(Message("assistant", "", f"thinking of {text}"))
    for text in whole:
        assert HistoryClassifier(conditions).notable(user(f" {text}\n"))
        assert not HistoryClassifier(conditions).notable(user(f"some {text} words"))


def test_counts_that_decide_something() -> None:
    conditions = ChatTemplate(
        "{% set rest = messages[1:] %}{% if rest|length > 7 %}{% endif %}{% for m in rest %}"
        "{% if loop.index0 % 5 == 0 %}{% endif %}{% if m.tool_call_id|length != 40 %}{% endif %}{% endfor %}"
    ).conditions
    assert (conditions.thresholds, conditions.moduli) == (8, {5})


def test_cached_traits_belong_to_the_text_of_the_message() -> None:
    seen = HistoryClassifier(ChatTemplate("{% if '/off' in messages[0].content %}{% endif %}").conditions)
    message = user("/off")
    assert seen.notable(message)
    assert not seen.notable(replace(message, text="on"))
    other = HistoryClassifier(ChatTemplate("{% if '/on' in messages[0].content %}{% endif %}").conditions)
    assert not other.notable(message)


# Modes in the text

HEAD = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
"""
TAIL = "{{ '<think>\n\n</think>\n' if not ns.on else '<think>\n' }}{% endif %}"
MODES = {
    "anywhere": "{%- set ns = namespace(on=true) -%}{%- for m in messages if '/no_think' in m.content -%}"
    "{%- set ns.on = false -%}{%- endfor -%}",
    "last": "{%- set ns = namespace(on=true) -%}{%- for m in messages -%}{%- if '/no_think' in m.content -%}"
    "{%- set ns.on = false -%}{%- elif '/think' in m.content -%}{%- set ns.on = true -%}{%- endif -%}{%- endfor -%}",
    "first": "{%- set ns = namespace(on='/no_think' not in messages[0].content) -%}",
    "leading": "{%- set ns = namespace(on=true) -%}{%- for m in messages -%}{%- if m.content.startswith('/no_think') -%}"
    "{%- set ns.on = false -%}{%- endif -%}{%- endfor -%}",
    "tool": "{%- set ns = namespace(on=not messages|selectattr('role', 'equalto', 'tool')|list) -%}",
    "count": "{%- set ns = namespace(on=messages|length < 5) -%}",
    "calls": "{%- set ns = namespace(on=true) -%}{%- for m in messages if m.tool_calls and m.tool_calls|length > 1 -%}"
    "{%- set ns.on = false -%}{%- endfor -%}",
    "reasoned": "{%- set ns = namespace(on=true) -%}{%- for m in messages if m.reasoning_content -%}"
    "{%- set ns.on = false -%}{%- endfor -%}",
    "users": "{%- set ns = namespace(on=(messages|selectattr('role', 'equalto', 'user')|list|length) % 3 != 0) -%}",
    "silent": "{%- set ns = namespace(on=true) -%}{%- for m in messages if m.role == 'assistant' and not m.content -%}"
    "{%- set ns.on = false -%}{%- endfor -%}",
}
"""Generation prompts that depend on the text or the shape of the history."""


def moded(name: str) -> SentinelCodec:
    return codec_for(MODES[name] + HEAD + TAIL)


SWITCHES = st.sampled_from(["plain", "so /no_think", "/no_think", "/think then", "</think> odd", "", "two\n\nlines"])


@st.composite
def talks(draw: st.DrawFn, words: st.SearchStrategy[str], *, calls: bool = True) -> list[list[Message]]:
    """A conversation as a list of steps: what the harness says, then a reply with what follows it."""
    lead = [system(draw(words))] if draw(st.booleans()) else []
    steps: list[list[Message]] = [[*lead, user(draw(words))]]
    for number in range(draw(st.integers(1, 4))):
        thought = draw(st.none() | words)
        made = tuple(
            ToolCall(f"id{number:03d}{place:04d}", draw(st.sampled_from(["bash", "read"])), {"a": draw(words)})
            for place in range(draw(st.integers(1, 2)) if calls and draw(st.booleans()) else 0)
        )
        results = [result(one, draw(words), name=one.name) for one in made]
        after = [] if made and draw(st.booleans()) else [user(draw(words))]
        # A template may leave out a message that says nothing at all; the model did sample the end of one.
        said = draw(words) if made else draw(words.filter(str.strip))
        steps.append([Message("assistant", said, thought, made), *results, *after])
    return steps


def check_talk(codec: SentinelCodec, steps: list[list[Message]], under: RenderContext) -> int:
    """At every turn the suffix is the end of the whole prompt; returns how many turns were compared."""
    before, compared = list(steps[0]), 0
    for reply, *new in steps[1:]:
        made = continued(codec, before, reply, new, under)
        if made is not None:
            try:
                whole = codec.prompt([*before, reply, *new], under).ids
            except TemplateError:
                whole = made.ids
            assert whole[-len(made.ids) :] == made.ids
            compared += 1
        before += [reply, *new]
    return compared


def continued(
    codec: SentinelCodec, before: list[Message], reply: Message, new: list[Message], under: RenderContext
) -> EncodedPrompt | None:
    try:
        return codec.extend(before, reply, NONE, NONE, new, under)
    except CannotContinue:
        return None


@pytest.mark.parametrize("name", sorted(MODES))
@given(steps=talks(SWITCHES))
def test_a_mode_in_the_history_reaches_every_prompt(name: str, steps: list[list[Message]]) -> None:
    codec = _MODED[name]
    assert check_talk(codec, steps, frame(TOOLS)) == len(steps) - 1


_MODED = {name: moded(name) for name in MODES}


LATE = {
    "many": "{%- set ns = namespace(on=messages|length < 14) -%}",
    "results": "{%- set ns = namespace(on=true, n=0) -%}{%- for m in messages if m.role == 'tool' -%}"
    "{%- set ns.n = ns.n + 1 -%}{%- endfor -%}{%- if ns.n > 6 -%}{%- set ns.on = false -%}{%- endif -%}",
    "seventh": "{%- set ns = namespace(on=true) -%}{%- for m in messages if m.role == 'assistant' -%}"
    "{%- set ns.on = loop.index % 7 != 0 -%}{%- endfor -%}",
    "old": "{%- set ns = namespace(on=true) -%}{%- for m in messages[-6:] if '/no_think' in m.content -%}"
    "{%- set ns.on = false -%}{%- endfor -%}",
}
"""Generation prompts that change only after many messages, which no probe at start-up has."""


@pytest.mark.parametrize("name", sorted(LATE))
def test_a_prompt_that_changes_late(name: str) -> None:
    codec = codec_for(LATE[name] + HEAD + TAIL)
    steps: list[list[Message]] = [[user("Go. /no_think")]]
    for number in range(16):
        one = ToolCall(f"id{number:07d}", "bash", {"a": number})
        steps.append([Message("assistant", "", None, (one,)), result(one, "fine", name="bash")])
    assert check_talk(codec, steps, frame(TOOLS)) == 16


def words_of(codec: SentinelCodec) -> st.SearchStrategy[str]:
    """Texts with the strings that the template looks for, and without."""
    conditions = codec.template.conditions
    found = sorted(text for text in conditions.inside | conditions.whole | conditions.edges if len(text) < 80)
    plain = st.sampled_from(["a", "two words", "x\n\ny", "", "1", "/no_think", "/think", "<think>odd</think>b"])
    return (
        plain | st.sampled_from(found).flatmap(lambda t: st.sampled_from([t, f"a {t}", f"{t} b"])) if found else plain
    )


@pytest.mark.parametrize("name", [*NAMES, *(f"model:{name}" for name in model_names())])
@settings(max_examples=6)
@given(data=st.data())
def test_every_suffix_is_the_end_of_the_whole_prompt(name: str, data: st.DataObject) -> None:
    kind, _, rest = name.partition(":")
    codec = modelled(rest) if kind == "model" else templated(name, renderer="sentinel")
    steps = data.draw(talks(words_of(codec), calls=codec.check.tool_calls))
    if name.startswith(REORDERS):
        steps = [[replace(m, text="") if m.tool_calls else m for m in step] for step in steps]
    thinking = data.draw(st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}]))
    under = frame(data.draw(st.sampled_from([(), TOOLS])), **thinking)
    check_talk(codec, steps, under)


# Real models

THINKING, SILENT = "<think>\n", "<think></think>"


@pytest.mark.parametrize("renderer", ["auto", "sentinel"])
@pytest.mark.parametrize("policy", [ContextPolicy.RETAIN, ContextPolicy.AS_SENT])
def test_smollm3_continues_without_thinking(renderer: str, policy: ContextPolicy) -> None:
    codec = modelled("smollm3", renderer=renderer)
    talk = Talk(codec, policy=policy)
    history = [system("Be brief. /no_think"), user("One.")]
    for text in ("Two.", "Three. /think", "Four."):
        turn = talk.ask(history, Say("Yes.", canonical=True), tools=())
        assert talk.text(turn.prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n")
        assert turn.prompt == talk.plain(turn.request, turn.node)
        history = [*turn.history, user(text)]
    assert talk.chains == 1


@pytest.mark.parametrize("place", ["system", "user", "tool", "assistant"])
def test_nemotron_follows_the_last_switch(place: str) -> None:
    """Only what a system or user message says counts; the switch may come at any turn."""
    talk = Talk(modelled("nemotron_nano_v2"))
    said = {role: "/no_think" if role == place else "" for role in ("system", "user", "tool", "assistant")}
    counts = place in ("system", "user")
    turn = talk.ask([system(f"Be brief. {said['system']}"), user(f"One. {said['user']}")], "Yes.", tools=())
    assert talk.text(turn.prompt).endswith(SILENT if counts else THINKING)
    turn = talk.ask([*turn.history, user("Two.")], f"Well. {said['assistant']}", tools=())
    assert talk.text(turn.prompt).endswith(SILENT if counts else THINKING)
    turn = talk.ask([*turn.history, user("Three.")], "Yes.", tools=())
    assert talk.text(turn.prompt).endswith(SILENT if counts else THINKING)
    for switch, silent in (("/think", False), ("", False), ("/no_think", True), ("", True), ("/think", False)):
        turn = talk.ask([*turn.history, user(f"Go. {switch}")], "Yes.", tools=())
        assert talk.text(turn.prompt).endswith(SILENT if silent else THINKING)
    assert talk.chains == 1
    assert talk.trajectory().report.forks == {}


def test_six_calls_of_mistral_nemo_are_one_row() -> None:
    """The template writes the id of a call after its arguments."""
    codec = real("mistral_nemo")
    assert codec.check.short_call_ids
    talk = Talk(codec)
    turn = talk.ask([system(), user("Go.")], Say("", (call("bash", command="ls 0"),)))
    for number in range(1, 6):
        turn = talk.ask(turn.answered(f"result {number}"), Say("", (call("bash", command=f"ls {number}"),)))
    turn = talk.ask(turn.answered("last"), Say("", (call("bash", command="a"), call("read", path="b"))))
    talk.ask(turn.answered("one", "two"), "Done.")
    report = talk.trajectory().report
    assert (report.chains, report.forks) == (1, {})
    assert report.row_tokens == report.distinct_tokens


NAMED_BEHIND = """{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}<|im_start|>assistant
{%- for c in m.tool_calls %}({{ c.function.arguments|tojson }})for {{ c.function.name }} as {{ c.id }};{% endfor %}<|im_end|>
{%- else -%}<|im_start|>{{ m.role }} {{ m.tool_call_id }} {{ m.content }}<|im_end|>{% endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant{% endif -%}"""


def test_names_and_ids_after_the_arguments() -> None:
    codec = codec_for(NAMED_BEHIND)
    before = [user("TASK")]
    for number, names in enumerate((["bash"], ["read"], ["bash", "read"], ["read", "bash", "other"], ["bash"])):
        calls = tuple(ToolCall(f"call_{number}_{name}", name, {"a": number}) for name in names)
        reply, new = Message("assistant", "", None, calls), [result(one, "RESULT", name=one.name) for one in calls]
        whole = codec.prompt([*before, reply, *new], frame(TOOLS)).ids
        made = codec.extend(before, reply, NONE, NONE, new, frame(TOOLS)).ids
        assert whole[-len(made) :] == made


# What it costs


def test_ordinary_turns_are_rendered_from_little() -> None:
    """The comparisons of a conversation do not grow with it; a message that brings a string is compared once."""
    codec = codec_for(MODES["last"] + HEAD + TAIL)
    full = count_full(codec)
    before, turns = [system("Be brief. /no_think"), user("One.")], []
    for number in range(60):
        one = ToolCall(f"id{number:07d}", "bash", {"a": number})
        reply, new = Message("assistant", "", None, (one,)), [result(one, "fine", name="bash")]
        codec.extend(before, reply, NONE, NONE, new, frame(TOOLS))
        turns.append(len(full))
        before += [reply, *new]
    assert turns[10] == turns[-1] < 10
    reply = Message("assistant", "As you say: /think")
    codec.extend(before, reply, NONE, NONE, [user("Go on.")], frame(TOOLS))
    assert len(full) == turns[-1] + 1
    codec.extend(before, reply, NONE, NONE, [user("Go on.")], frame(TOOLS))
    assert len(full) == turns[-1] + 1


def count_full(codec: SentinelCodec) -> list[int]:
    """Lengths of the histories that are rendered in full from here on."""
    seen: list[int] = []
    after = codec._after

    def counted(*arguments: object, scope: HistoryScope = HistoryScope.REDUCED, **named: object) -> str:
        if scope is HistoryScope.FULL:
            seen.append(len(arguments[0]))  # type: ignore[arg-type]
        return after(*arguments, scope=scope, **named)  # type: ignore[arg-type]

    codec._after = counted  # type: ignore[method-assign]
    return seen


def test_a_bridge_that_overlooks_the_history_is_not_used() -> None:
    """A family's bridge looks at new messages only; where the template looks further, the template decides."""
    source = templated("qwen3").template.source
    assert isinstance(templated("qwen3"), FamilyCodec)
    end = "{%- if messages|selectattr('content', 'equalto', '/quiet')|list %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    codec = codec_for(source + end)
    assert isinstance(codec, FamilyCodec)
    talk = Talk(codec)
    turn = talk.ask([system(), user("One.")], "Yes.")
    turn = talk.ask([*turn.history, user("Two.")], "Yes.")
    assert talk.text(turn.prompt).endswith("assistant\n")
    turn = talk.ask([*turn.history, user("/quiet")], "Yes.")
    assert talk.text(turn.prompt).endswith("</think>\n\n")
    turn = talk.ask([*turn.history, user("Three.")], Say("", (call("bash", command="ls"),)))
    assert talk.text(turn.prompt).endswith("</think>\n\n")
    turn = talk.ask(turn.answered("RESULT"), "Done.")
    assert talk.text(turn.prompt).endswith("</think>\n\n")
    assert talk.chains == 1
