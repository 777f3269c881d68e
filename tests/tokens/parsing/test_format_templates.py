"""The formats against the real thing: chat templates, a real tokenizer, and another package's parser."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.sandbox
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from renderers import parsing
from tokenizers import Tokenizer

from support.tokens.conversations import Say, Talk, call, modelled, user
from towline.conversation import Message, Tool, ToolCall
from towline.tokens.codec import RenderContext
from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.registry import FORMATS, detect_format
from towline.tokens.parsing.sections import marker

FAMILIES = {
    "cohere": "plain",
    "cohere2": "plain",
    "deepseek_r1_distill": "deepseek",
    "deepseekv3": "deepseek",
    "diffusion_gemma": "plain",
    "gemma": "plain",
    "gemma3": "plain",
    "gemma4": "plain",
    "glm4moe": "glm",
    "gptoss": "gptoss",
    "idefics3": "plain",
    "lfm2": "lfm2",
    "llama3": "plain",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "llava_next": "plain",
    "muse_glimmer": "plain",
    "nemotron_3": "qwen3_coder",
    "phi3": "plain",
    "qwen2_5": "hermes",
    "qwen2_5_vl": "plain",
    "qwen3": "hermes",
    "qwen3_5": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "smolvlm": "plain",
}
"""Chat templates by the start of their names, the longest that fits; `plain` where calls are none, or of no known format."""


def family(name: str) -> str:
    fitting = [start for start in FAMILIES if name == start or name.startswith(f"{start}_")]
    assert fitting, f"{name} is of no family in the table"
    return max(fitting, key=len)


def test_the_format_of_every_known_template(assets: Path) -> None:
    templates = {path.stem: path.read_text() for path in (assets / "templates").glob("*.jinja")}
    found = {name: detect_format(source) for name, source in templates.items()}
    assert found == {name: FAMILIES[family(name)] for name in templates}
    assert {family(name) for name in templates} == set(FAMILIES)
    for name, format in {"qwen3": "hermes", "qwen2_5": "hermes", "llama3_2": "llama3"}.items():
        config = json.loads((assets / "tokenizers" / name / "tokenizer_config.json").read_text())
        assert detect_format(config["chat_template"]) == format


def test_the_format_of_templates_by_their_marks() -> None:
    section = marker("tool calls begin")
    for source, format in {
        "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}": "mistral",
        "{{ '<|tool_calls_section_begin|><|tool_call_begin|>' + id }}": "kimi",
        "{{ '" + section + "' + name }}": "deepseek",
        '<|start_header_id|>{{ \'{"name": "\' + name + \'", "parameters": \' }}': "llama3",
        "<|start_header_id|>assistant": "plain",
        "<tool_call>{{ name }}<tool_sep>": "plain",
        "<seed:tool_call><function={{ name }}>": "seed_oss",
        "{{ '>>>${recipient}' }}": "functionary_3_2",
        "<{start_tag}={function_name}> <function=": "functionary_3_1",
        "]<]minimax[>[<tool_call>": "minimax_m3",
        "<\uff5cDSML\uff5ctool_calls>": "dsml",
        "": "plain",
    }.items():
        assert detect_format(source) == format


TOOL = Tool(
    "edit",
    "Edits a file.",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "lines": {"type": "array", "items": {"type": "integer"}}},
        "required": ["path"],
    },
)
ARGUMENTS = {"path": 'a "b"\\c\n</d> {{é}}', "lines": [1, 20]}
RENDERED = {
    # What the family's template needs to show the message, and the text around its assistant message.
    "qwen2_5": ("<|im_start|>assistant\n", "<|im_end|>"),
    "qwen3": ("<|im_start|>assistant\n", "<|im_end|>"),
    "qwen3_5_think": ("<|im_start|>assistant\n", "<|im_end|>"),
    "qwen3_8": ("<|im_start|>assistant\n", "<|im_end|>"),
    "nemotron_3_nano": ("<|im_start|>assistant\n", "<|im_end|>"),
    "glm4moe": ("<|assistant|>", None),
    "llama3_2": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "deepseekv3": (f"<{chr(0xFF5C)}Assistant{chr(0xFF5C)}>", f"<{chr(0xFF5C)}end{chr(0x2581)}of"),
    "gptoss": ("<|start|>assistant", "<|call|>"),
}


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals.update(raise_exception=raise_exception, strftime_now=lambda form: "2025-01-01", bos_token="")
    return made


@pytest.mark.parametrize("name", sorted(RENDERED))
def test_parsing_and_writing_match_the_template(assets: Path, name: str) -> None:
    source = (assets / "templates" / f"{name}.jinja").read_text()
    format = FORMATS[detect_format(source)]
    as_text = name == "deepseekv3"
    shown = json.dumps(ARGUMENTS, ensure_ascii=False) if as_text else ARGUMENTS
    function = {"name": "edit", "arguments": shown}
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    text = (
        environment()
        .from_string(source)
        .render(
            messages=[{"role": "user", "content": "Go."}, message],
            tools=[TOOL.as_function()],
            add_generation_prompt=False,
        )
    )
    start, end = RENDERED[name]
    reply = text[text.rindex(start) + len(start) :]
    reply = reply[: reply.index(end)] if end else reply
    read = format.parse(reply, [TOOL], reasoning_open=False)
    assert (read.text, read.reasoning, read.malformed) == ("", None, ())
    assert [(call.name, call.arguments) for call in read.calls] == [("edit", ARGUMENTS)]
    if name != "gptoss":
        # The template of gpt-oss puts the recipient before the channel; the model samples it after.
        assert reply.strip().endswith(format.write(None, "", list(read.calls)).strip())


MODELS = {
    "apertus": "apertus",
    "apriel_1_6": "apriel",
    "command_r7b": "command_r7b",
    "deepseek_v3_1": "deepseek",
    "deepseek_v3_2": "dsml",
    "deepseek_v4": "dsml",
    "devstral_small": "mistral",
    "functionary_3_1": "functionary_3_1",
    "functionary_3_2": "functionary_3_2",
    "gigachat3_1": "gigachat",
    "glm_4_6": "glm",
    "glm_4_7_flash": "glm",
    "granite_3_3": "plain",
    "granite_4_0": "hermes",
    "hermes_3": "hermes",
    "kimi_k2": "kimi",
    "kimi_k2_thinking": "kimi",
    "kimi_k3": "plain",
    "lfm2_5": "lfm2",
    "lfm2_5_moe": "lfm2",
    "minimax_m2": "minimax_m2",
    "minimax_m3": "minimax_m3",
    "ministral_3": "mistral",
    "mistral_nemo": "mistral",
    "mistral_small_3_2": "mistral",
    "nemotron_nano_v2": "nemotron",
    "qwen3_coder": "qwen3_coder",
    "qwq": "hermes",
    "seed_oss": "seed_oss",
    "smollm3": "plain",
    "step_3_5": "qwen3_coder",
}
"""Templates of single models; `plain` where calls are none, or of no known format."""
UNRENDERED = {"granite_3_3", "kimi_k2", "kimi_k2_thinking", "lfm2_5", "smollm3"}
"""They show no calls, or fail on them."""
ONE_CALL = {"gigachat3_1"}
LOOKS = Tool(
    "look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}, "deep": {"type": "boolean"}}}
)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_call_that_a_model_template_shows_is_read(name: str) -> None:
    codec = modelled(name)
    assert codec.format.name == MODELS[name]
    assert codec.calls_as_text == (MODELS[name] == "plain")
    assert codec.check.tool_calls == (name not in UNRENDERED)
    if name in UNRENDERED or codec.calls_as_text:
        return
    calls = (ToolCall("abcdefgh1", "edit", ARGUMENTS), ToolCall("abcdefgh2", "look", {"at": "[x] 5", "deep": True}))
    results = [Message("tool", f"RESULT{call.id}", tool_call_id=call.id, name=call.name) for call in calls]
    frame = RenderContext((TOOL, LOOKS))
    for made in (calls[:1], calls) if name not in ONE_CALL else (calls[:1],):
        reply = Message("assistant", "", None, made)
        shown = codec.shown([Message("user", "QUESTION"), reply, *results[: len(made)]], frame)
        reply_text = shown[shown.index("QUESTION") : shown.index("RESULTabc")]
        last = max(reply_text.rfind(word) for word in ("20", "true", "True"))
        end = codec._end_pattern.search(reply_text, last)
        reply_text = reply_text[: end.start() if end else None]
        if name == "functionary_3_2":
            reply_text = reply_text[reply_text.index(">>>") :]
        read = codec.format.parse(reply_text, frame.tools, reasoning_open=False)
        assert [(one.name, one.arguments) for one in read.calls] == [(one.name, one.arguments) for one in made]
        assert read.malformed == ()


@pytest.mark.parametrize("name", sorted(set(MODELS) - UNRENDERED - {"kimi_k3"}))
def test_calls_of_every_model_template_are_one_row(name: str) -> None:
    """Written in the model's format, read, answered and continued: calls with text, alone, and several at once."""
    codec = modelled(name)
    talk = Talk(codec)
    turn = talk.ask([user("QUESTION")], Say("", (call("bash", command="ls"),)))
    turn = talk.ask(turn.answered("RESULT one"), Say("", (call("read", path="a"),)))
    if name not in ONE_CALL:
        turn = talk.ask(turn.answered("RESULT two"), Say("", (call("bash", command="b"), call("read", path="c"))))
    turn = talk.ask(turn.answered(), "Done.")
    assert turn.reply.text.strip() == "Done."
    made = [len(node.reply.tool_calls) for node in talk.nodes if node.reply]
    assert made == ([1, 1, 0] if name in ONE_CALL else [1, 1, 2, 0])
    report = talk.trajectory().report
    assert (report.chains, report.forks, report.malformed_calls, report.calls_as_text) == (1, {}, 0, 0)


def test_turns_whose_calls_are_text_are_counted() -> None:
    talk = Talk(modelled("smollm3"))
    turn = talk.ask([user("One.")], "<call>ls</call>")
    talk.ask([*turn.history, user("Two.")], "Yes.", tools=())
    report = talk.trajectory().report
    assert (report.calls_as_text, report.turns) == (1, 2)


# Without markup and combining marks, so that normalization changes nothing.
SAFE = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Co", "Cn", "Mn", "Mc", "Me"], include_characters="\n"), max_size=20
).map(lambda text: unicodedata.normalize("NFC", re.sub(r"</?(?:tool_call|think)>|<\|", "<", text)))
CALLS = st.lists(
    st.tuples(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
        st.dictionaries(
            SAFE, SAFE | st.integers(-(2**53), 2**53) | st.booleans() | st.lists(SAFE, max_size=2), max_size=3
        ),
    ),
    max_size=3,
)


class Qwen3:
    """The real tokenizer, in the shape that the other parser expects."""

    def __init__(self, folder: Path):
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        names = ("<|im_end|>", "<tool_call>", "</tool_call>", "</think>")
        self.stop, self.opening, self.closing, self.thought = map(self.tokenizer.token_to_id, names)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


@pytest.fixture(scope="module")
def qwen3(assets: Path) -> Qwen3:
    return Qwen3(assets / "tokenizers" / "qwen3")


@given(reasoning=st.none() | SAFE.map(lambda text: text.strip() or None), text=SAFE.map(str.strip), calls=CALLS)
@example(reasoning="Draft: <tool_call>{}</tool_call>", text="Now.", calls=[("ls", {"path": "é 😀", "n": 1.0})])
def test_qwen3_as_another_parser_reads_it(
    qwen3: Qwen3, reasoning: str | None, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    format = FORMATS["hermes"]
    ids = qwen3.encode(format.write(reasoning, text, [ParsedCall(name, arguments) for name, arguments in calls]))
    theirs = parsing.parse_qwen3(
        qwen3,
        [*ids, qwen3.stop],
        stop_ids={qwen3.stop},
        tool_call_id=qwen3.opening,
        tool_call_end_id=qwen3.closing,
        reasoning_end_id=qwen3.thought,
    )
    ours = format.parse(qwen3.decode(ids), (), reasoning_open=False)
    assert (ours.text, ours.reasoning) == (theirs.content, theirs.reasoning_content) == (text, reasoning)
    assert [(call.name, call.arguments) for call in theirs.tool_calls] == calls
    assert [(call.name, call.arguments) for call in ours.calls] == calls
