"""What each format reads: one table of replies as the families write them, and the rules that all formats share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from towline.conversation import Tool
from towline.tokens.parsing.base import ParsedCall, ParsedReply, UnwritableReply
from towline.tokens.parsing.registry import FORMATS
from towline.tokens.parsing.sections import marker

TYPED = Tool(
    "edit",
    parameters={
        "type": "object",
        "$defs": {"Mode": {"enum": ["fast", "slow"]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}},
        "properties": {
            "path": {"type": "string"},
            "line": {"type": "integer"},
            "ratio": {"type": "number"},
            "force": {"type": "boolean"},
            "tags": {"type": "array"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "either": {"type": ["string", "integer"]},
            "mode": {"$ref": "#/$defs/Mode"},
            "loop": {"$ref": "#/$defs/Loop"},
            "limit": {"type": "integer", "nullable": True},
        },
    },
)
PATCH = Tool("patch", custom=True)
TOOLS = (TYPED, PATCH)

BEGIN, END = marker("tool calls begin"), marker("tool calls end")
ONE, ONE_END, SEP = marker("tool call begin"), marker("tool call end"), marker("tool sep")
DSML, M3 = "\uff5cDSML\uff5c", "]<]minimax[>["
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI, KIMI_ARGS, KIMI_ONE_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def parsed(
    text: str = "", *calls: ParsedCall, reasoning: str | None = None, malformed: tuple[str, ...] = ()
) -> ParsedReply:
    return ParsedReply(text, reasoning, calls, malformed, False)


def call(name: str, native_id: str = "", **arguments: Any) -> ParsedCall:
    return ParsedCall(name, arguments, native_id)


READ: list[tuple[str, str, ParsedReply]] = [
    # Hermes: text around calls, markers inside strings, double encoding, unknown tools.
    (
        "hermes",
        'On it.\n<tool_call>\n{"name": "ls", "arguments": {"p": "a b"}}\n</tool_call>',
        parsed("On it.", call("ls", p="a b")),
    ),
    (
        "hermes",
        '<tool_call>{"name": "a"}</tool_call>\n\n'
        '<tool_call>{"name": "b", "arguments": "{\\"n\\": 1.0}"}</tool_call>\nDone.\n',
        parsed("Done.\n", call("a"), call("b", n=1.0)),
    ),
    (
        "hermes",
        'x<tool_call>{"name": "w", "arguments": {"s": "</tool_call><tool_call>{"}}</tool_call>y',
        parsed("x\ny", call("w", s="</tool_call><tool_call>{")),
    ),
    (
        "hermes",
        '<tool_call>{"name": "patch", "arguments": "*** Begin"}</tool_call>',
        parsed("", ParsedCall("patch", "*** Begin")),
    ),
    # Qwen3-Coder: typing by the schema.
    (
        "qwen3_coder",
        "Now.\n\n<tool_call>\n<function=edit>\n<parameter=path>\n\n 1 \n\n</parameter>\n<parameter=line>\n12\n</parameter>"
        "\n<parameter=ratio>\n2\n</parameter>\n<parameter=force>\nTrue\n</parameter>\n<parameter=tags>\n[1, 2.0]\n"
        "</parameter>\n</function>\n</tool_call>",
        parsed("Now.", call("edit", path="\n 1 \n", line=12, ratio=2, force=True, tags=[1, 2.0])),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=edit><parameter=note>null</parameter><parameter=either>7</parameter><parameter=mode>1"
        "</parameter><parameter=loop>{}</parameter><parameter=limit>None</parameter><parameter=line>many</parameter>"
        "<parameter=extra>[1]</parameter></function></tool_call>",
        parsed("", call("edit", note=None, either=7, mode="1", loop={}, limit=None, line="many", extra=[1])),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=edit><parameter=note>12</parameter><parameter=either>1.5</parameter></function></tool_call>",
        parsed("", call("edit", note="12", either="1.5")),
    ),
    ("qwen3_coder", "So:\n<function=ls>\n</function>\n</tool_call>", parsed("So:", call("ls"))),
    ("qwen3_coder", "Write `<function=` first.", parsed("Write `<function=` first.")),
    # Llama 3: bare, tagged, several, and JSON that is an answer.
    ("llama3", '{"name": "ls", "parameters": {"p": "."}}', parsed("", call("ls", p="."))),
    (
        "llama3",
        '{"type": "function", "name": "ls", "arguments": {}} ; {"name": "b", "parameters": {}};',
        parsed("", call("ls"), call("b")),
    ),
    ("llama3", 'Let me.<|python_tag|>{"name": "ls", "parameters": {}}\nOk', parsed("Let me.\nOk", call("ls"))),
    ("llama3", '{"name": "Ada", "age": 36}', parsed('{"name": "Ada", "age": 36}')),
    (
        "llama3",
        '{"name": "t", "description": "d", "parameters": {}}',
        parsed('{"name": "t", "description": "d", "parameters": {}}'),
    ),
    ("llama3", '{"a": [1, 2', parsed('{"a": [1, 2')),
    # DeepSeek: both shapes, with and without the end of the section.
    (
        "deepseek",
        f'Sure.{BEGIN}{ONE}function{SEP}ls\n```json\n{{"p": "```{ONE_END}"}}\n```{ONE_END}\n'
        f"{ONE}function{SEP}b\n```json\n{{}}\n```{ONE_END}{END}",
        parsed("Sure.", call("ls", p=f"```{ONE_END}"), call("b")),
    ),
    (
        "deepseek",
        f'{BEGIN}{ONE}ls{SEP}{{"p": 1}}{ONE_END}{ONE}b{SEP}{ONE_END}{END}',
        parsed("", call("ls", p=1), call("b")),
    ),
    ("deepseek", f'{BEGIN}{ONE}function{SEP}{{"p": 1}}{ONE_END}', parsed("", call("function", p=1))),
    (
        "deepseek",
        f"{BEGIN}{ONE}patch{SEP}*** Begin\n+x{ONE_END}{END}",
        parsed("", ParsedCall("patch", "*** Begin\n+x")),
    ),
    # gpt-oss: channels, recipients on either side of the channel, calls on any channel, markers in strings.
    (
        "gptoss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.ls <|constrain|>json<|message|>{"p":"<|end|>"}<|call|>',
        parsed("I look.", call("ls", p="<|end|>"), reasoning="Hm."),
    ),
    (
        "gptoss",
        ' to=functions.ls<|channel|>commentary json<|message|>{"p": 1}<|call|>'
        "<|start|>assistant to=functions.b<|channel|>analysis<|message|>{}",
        parsed("", call("ls", p=1), call("b")),
    ),
    (
        "gptoss",
        "<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|> Yes. \n",
        parsed(" Yes. \n", reasoning="a"),
    ),
    ("gptoss", "just text <|start|>oops", parsed("just text <|start|>oops")),
    (
        "gptoss",
        "<|channel|>commentary to=functions.patch<|message|>*** Begin",
        parsed("", ParsedCall("patch", "*** Begin")),
    ),
    # Mistral: a list, and both newer shapes.
    (
        "mistral",
        'Hi[TOOL_CALLS] [{"name": "ls", "arguments": {"p": "[TOOL_CALLS]"}, "id": "abc123XYZ"}, '
        '{"name": "b", "arguments": "{}"}]',
        parsed("Hi", call("ls", "abc123XYZ", p="[TOOL_CALLS]"), call("b")),
    ),
    (
        "mistral",
        '[THINK]Hm.[/THINK]Hi[TOOL_CALLS]ls[CALL_ID]abc123XYZ[ARGS]{"p": 1}[TOOL_CALLS]b[ARGS]{}',
        parsed("Hi", call("ls", "abc123XYZ", p=1), call("b"), reasoning="Hm."),
    ),
    ("mistral", '<think>Hm.</think>[TOOL_CALLS]ls{"p": 1} bye', parsed("bye", call("ls", p=1), reasoning="Hm.")),
    # GLM: with newlines and without.
    (
        "glm",
        "\n<think></think>\nOk\n<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>\n1</arg_value>\n<arg_key>line</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        parsed("Ok", call("edit", path="\n1", line=2)),
    ),
    (
        "glm",
        "<tool_call>ls<arg_key>p</arg_key><arg_value>a</arg_value></tool_call><tool_call>b</tool_call>",
        parsed("", call("ls", p="a"), call("b")),
    ),
    # Kimi: native ids.
    (
        "kimi",
        f'Go.{KIMI_BEGIN}{KIMI}functions.a:b.ls:3{KIMI_ARGS}{{"p": 1}}{KIMI_ONE_END}'
        f"{KIMI} b:4 {KIMI_ARGS} {KIMI_ONE_END}{KIMI_END}",
        parsed("Go.", call("a:b.ls", "functions.a:b.ls:3", p=1), call("b", "b:4")),
    ),
    # Lists of calls: Apertus, whose last tag may be the end of the turn; Apriel; Nemotron; Command R7B.
    (
        "apertus",
        'I look.<|tools_prefix|>[{"ls": {"p": "<|tools_suffix|>"}}, {"b": {}}]<|tools_suffix|>',
        parsed("I look.", call("ls", p="<|tools_suffix|>"), call("b")),
    ),
    (
        "apertus",
        '<|inner_prefix|>Hm.<|inner_suffix|>Ok.<|tools_prefix|>[{"ls": {"p": 1}}]',
        parsed("Ok.", call("ls", p=1), reasoning="Hm."),
    ),
    (
        "apriel",
        'Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\n<tool_calls>[{"name": "ls", "arguments": {"p": 1}, '
        '"id": "1"}, {"name": "b", "arguments": {}}]</tool_calls>',
        parsed("", call("ls", "1", p=1), call("b"), reasoning="Hm."),
    ),
    ("apriel", "<thinking>Hm.</thinking>Yes.", parsed("Yes.", reasoning="Hm.")),
    (
        "nemotron",
        '<think>\nHm.</think>Now.\n<TOOLCALL>[{"name": "ls", "arguments": {"p": "</TOOLCALL>"}}]</TOOLCALL>',
        parsed("Now.", call("ls", p="</TOOLCALL>"), reasoning="Hm."),
    ),
    (
        "command_r7b",
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "ls", '
        '"parameters": {"p": 1}},\n    {"tool_call_id": "1", "tool_name": "b", "parameters": {}}\n]<|END_ACTION|>',
        parsed("", call("ls", p=1), call("b"), reasoning="Hm."),
    ),
    ("command_r7b", "<|START_RESPONSE|>Yes.\n<|END_RESPONSE|>", parsed("Yes.\n")),
    ("command_r7b", "Yes.<|END_RESPONSE|>", parsed("Yes.")),
    ("command_r7b", "<|START_RESPONSE|>Cut", parsed("Cut")),
    # GigaChat: nothing closes a call.
    (
        "gigachat",
        'Now.<|function_call|>{"name": "ls", "arguments": {"p": "<|function_call|>"}}',
        parsed("Now.", call("ls", p="<|function_call|>")),
    ),
    # functionary: both versions, and Python as a tool.
    (
        "functionary_3_1",
        'On it.<function=ls>{"p": "</function>"}</function><function=patch>*** Begin</function><function=b></function>',
        parsed("On it.", call("ls", p="</function>"), ParsedCall("patch", "*** Begin"), call("b")),
    ),
    ("functionary_3_1", '<|python_tag|>{"code": "1 + 1"}', parsed("", call("python", code="1 + 1"))),
    (
        "functionary_3_2",
        'all\nI look.\n>>>edit\n{"path": ">>>all\\n"}>>>patch\n*** Begin\n>>>edit\n{}',
        parsed("I look.\n", call("edit", path=">>>all\n"), ParsedCall("patch", "*** Begin\n"), call("edit")),
    ),
    ("functionary_3_2", 'unknown\n{"a": 1}', parsed("", call("unknown", a=1))),
    ("functionary_3_2", "all\nIn Python:\n>>>print\n1", parsed("In Python:\n>>>print\n1")),
    ("functionary_3_2", "no recipient", parsed("no recipient")),
    # DSML: strings say so; V3.2 names the section otherwise; no arguments; arguments as JSON.
    (
        "dsml",
        f'Now.\n\n<{DSML}tool_calls>\n<{DSML}invoke name="edit">\n<{DSML}parameter name="path" string="true">5'
        f'</{DSML}parameter>\n<{DSML}parameter name="line" string="false">[1, null]</{DSML}parameter>\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="b"/>\n<{DSML}invoke name="c">\n{{"x": 1}}\n</{DSML}invoke>\n</{DSML}tool_calls>',
        parsed("Now.", call("edit", path="5", line=[1, None]), call("b"), call("c", x=1)),
    ),
    (
        "dsml",
        f'<{DSML}function_calls>\n<{DSML}invoke name="ls">\n</{DSML}invoke>\n</{DSML}function_calls>Done.',
        parsed("Done.", call("ls")),
    ),
    # MiniMax: M2 with values by the schema, M3 with elements inside elements.
    (
        "minimax_m2",
        '<think>Hm.</think>\n<minimax:tool_call>\n<invoke name="edit">\n<parameter name="path">7</parameter>\n'
        '<parameter name="line">7</parameter>\n</invoke>\n<invoke name="b">\n</invoke>\n</minimax:tool_call>',
        parsed("", call("edit", path="7", line=7), call("b"), reasoning="Hm."),
    ),
    (
        "minimax_m3",
        f'<mm:think>Hm.</mm:think>Now.{M3}<tool_call>\n{M3}<invoke name="edit">{M3}<path>7{M3}</path>{M3}<tags>{M3}<item>1'
        f"{M3}</item>{M3}<item>{M3}<a>x <b>{M3}</a>{M3}</item>{M3}</tags>{M3}<force>true{M3}</force>{M3}</invoke>\n"
        f'{M3}<invoke name="b">{M3}</invoke>\n{M3}</tool_call>',
        parsed("Now.", call("edit", path="7", tags=[1, {"a": "x <b>"}], force=True), call("b"), reasoning="Hm."),
    ),
    # Seed-OSS: nothing is trimmed, and values are printed as Python does.
    (
        "seed_oss",
        "<seed:think>Hm.</seed:think>\nNow.\n\n<seed:tool_call>\n<function=edit>\n<parameter=path>\n7\n</parameter>\n"
        "<parameter=force>True</parameter>\n<parameter=tags>['a', None, {'b': 1}]</parameter>\n<parameter=line>7</parameter>\n"
        "</function>\n</seed:tool_call>",
        parsed("Now.", call("edit", path="\n7\n", force=True, tags=["a", None, {"b": 1}], line=7), reasoning="Hm."),
    ),
    # LFM2: Python's notation, printed with escapes or without, or JSON.
    (
        "lfm2",
        'Now.<|tool_call_start|>[edit(path=\'it\\\'s "a"\\n\\\\d\', line=-3, ratio=1.5e2, force=True, note=None, tags=[1, "x", '
        '{"k": true}]), b()]<|tool_call_end|>',
        parsed(
            "Now.",
            call(
                "edit", path='it\'s "a"\n\\d', line=-3, ratio=150.0, force=True, note=None, tags=[1, "x", {"k": True}]
            ),
            call("b"),
        ),
    ),
    (
        "lfm2",
        "<|tool_call_start|>[a(p='one\ntwo C:\\dir \"q\"')]<|tool_call_end|>Ok",
        parsed("Ok", call("a", p='one\ntwo C:\\dir "q"')),
    ),
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "a", "arguments": {"p": 1}}]<|tool_call_end|>',
        parsed("", call("a", p=1)),
    ),
    ("lfm2", "<|tool_call_start|>a.b(p=1)<|tool_call_end|>", parsed("", call("a.b", p=1))),
    ("plain", '<tool_call>{"name": "a"}</tool_call>', parsed('<tool_call>{"name": "a"}</tool_call>')),
]


@pytest.mark.parametrize(("format", "text", "expected"), READ)
def test_replies_as_families_write_them(format: str, text: str, expected: ParsedReply) -> None:
    # By their representations, which tell 1 from 1.0 and True.
    assert repr(FORMATS[format].parse(text, TOOLS, reasoning_open=False)) == repr(expected)


BROKEN: list[tuple[str, str]] = [
    ("hermes", '<tool_call>\n{"name": "a", "arguments": {"x": 1}\n</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "args": {"x": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": null}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": "\\"{}\\""}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1e99999}}</tool_call>'),
    ("hermes", f'<tool_call>{{"name": "a", "arguments": {{"x": {"7" * 4301}}}}}</tool_call>'),
    ("hermes", f'<tool_call>{{"name": "a", "arguments": {{"x": {"9" * 5000}}}}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>'),
    ("hermes", f'<tool_call>{{"name": "a", "arguments": {{"x": {"[" * 300}{"]" * 300}}}}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "one\ntwo"}}</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=a>\n<parameter=x>\n1\n</parameter>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<parameter=x>\n1\n</parameter>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=a>\n<parameter=x>\n1\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call><function=a><parameter=x>\ud800</parameter></function></tool_call>"),
    ("llama3", '<|python_tag|>print("x")'),
    ("llama3", '<|python_tag|>{"parameters": {}}'),
    ("llama3", '{"name": "a", "parameters": [1]}'),
    ("llama3", '{"name": "a", "parameters": {"x": 1}'),
    ("deepseek", f"{BEGIN}{ONE}function{SEP}a\n```json\n{{broken\n```{ONE_END}{END}"),
    ("deepseek", f"{BEGIN}{ONE}function{SEP}\n```json\n{{}}\n```{ONE_END}{END}"),
    ("deepseek", f"{BEGIN}{ONE}a{SEP}[1]{ONE_END}{END}"),
    ("deepseek", f"{BEGIN}{ONE}a {ONE_END}{END}"),
    ("deepseek", f"{BEGIN}nothing{END}"),
    ("gptoss", "<|channel|>commentary to=functions.a<|message|>{broken<|call|>"),
    ("gptoss", "<|channel|>commentary to=functions.<|message|>{}<|call|>"),
    ("gptoss", "<|channel|>commentary to=functions.a<|message|>[1]<|call|>"),
    ("gptoss", "<|channel|>commentary to=functions.a<|message|><|call|>"),
    ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"arguments": {}}]'),
    ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}}'),
    ("mistral", "[TOOL_CALLS]a[ARGS]{broken"),
    ("mistral", "[TOOL_CALLS]a[CALL_ID][ARGS]{}"),
    ("mistral", "[TOOL_CALLS][ARGS]{}"),
    ("glm", "<tool_call>\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    ("glm", "<tool_call>a\n<arg_key>x</arg_key>\n</tool_call>"),
    ("glm", "<tool_call>a\n<arg_key>x</arg_key>\n<arg_value>1</tool_call>"),
    ("kimi", f"{KIMI_BEGIN}{KIMI}functions.a:0{KIMI_ARGS}{{broken{KIMI_ONE_END}{KIMI_END}"),
    ("kimi", f"{KIMI_BEGIN}{KIMI}functions.:0{KIMI_ARGS}{{}}{KIMI_ONE_END}{KIMI_END}"),
    ("kimi", f"{KIMI_BEGIN}{KIMI}functions.a:0{KIMI_ONE_END}{KIMI_END}"),
    ("apertus", '<|tools_prefix|>[{"a": {}}, {"b": 1}]<|tools_suffix|>'),
    ("apertus", '<|tools_prefix|>[{"a": {}, "b": {}}]<|tools_suffix|>'),
    ("apertus", '<|tools_prefix|>[{"a": {}}<|tools_suffix|>'),
    ("apriel", '<tool_calls>[{"name": "a"}, {"arguments": {}}]</tool_calls>'),
    ("apriel", '<tool_calls>{"name": "a", "arguments": {}}</tool_calls>'),
    ("apriel", "<tool_calls>[]</tool_calls>"),
    ("nemotron", '<TOOLCALL>[{"name": "a", "arguments": [1]}]</TOOLCALL>'),
    ("command_r7b", '<|START_ACTION|>[{"tool_name": "a", "parameters": {}, "other": 1}]<|END_ACTION|>'),
    ("command_r7b", '<|START_ACTION|>[{"parameters": {}}]<|END_ACTION|>'),
    ("gigachat", '<|function_call|>{"name": "a", "arguments": {"x": }'),
    ("gigachat", '<|function_call|>{"arguments": {}}'),
    ("functionary_3_1", "<function=a>{broken</function>"),
    ("functionary_3_1", "<function=a>[1]</function>"),
    ("functionary_3_1", "<|python_tag|>print(1)"),
    (
        "dsml",
        f'<{DSML}tool_calls><{DSML}invoke name="a"><{DSML}parameter name="x" string="false">{{</{DSML}parameter></{DSML}invoke>',
    ),
    ("dsml", f'<{DSML}tool_calls><{DSML}invoke name="a"><{DSML}parameter name="x" string="true">1</{DSML}invoke>'),
    ("dsml", f"<{DSML}tool_calls>nothing</{DSML}tool_calls>"),
    ("minimax_m2", '<minimax:tool_call><invoke name="a"><parameter name="x">1</invoke>'),
    ("minimax_m2", "<minimax:tool_call><invoke>1</minimax:tool_call>"),
    ("minimax_m3", f'{M3}<tool_call>{M3}<invoke name="a">{M3}<x>1{M3}</y>{M3}</invoke>'),
    ("minimax_m3", f'{M3}<tool_call>{M3}<invoke name="a">{M3}<x>{M3}<item>1{M3}</x>{M3}</invoke>'),
    ("seed_oss", "<seed:tool_call><function=a><parameter=x>1</function></seed:tool_call>"),
    ("lfm2", "<|tool_call_start|>[a(p=open('x'))]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[a(p='it's')]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[a('x')]<|tool_call_end|>"),
    ("lfm2", '<|tool_call_start|>[{"arguments": {}}]<|tool_call_end|>'),
]
GOOD = {
    "hermes": '<tool_call>{"name": "ok", "arguments": {}}</tool_call>',
    "qwen3_coder": "<tool_call><function=ok></function></tool_call>",
    "llama3": '<|python_tag|>{"name": "ok", "parameters": {}}',
    "deepseek": f"{BEGIN}{ONE}ok{SEP}{{}}{ONE_END}{END}",
    "gptoss": "<|start|>assistant<|channel|>commentary to=functions.ok<|message|>{}",
    "mistral": "[TOOL_CALLS]ok[ARGS]{}",
    "glm": "<tool_call>ok</tool_call>",
    "kimi": f"{KIMI_BEGIN}{KIMI}functions.ok:0{KIMI_ARGS}{{}}{KIMI_ONE_END}{KIMI_END}",
    "apertus": '<|tools_prefix|>[{"ok": {}}]<|tools_suffix|>',
    "apriel": '<tool_calls>[{"name": "ok", "arguments": {}}]</tool_calls>',
    "nemotron": '<TOOLCALL>[{"name": "ok", "arguments": {}}]</TOOLCALL>',
    "command_r7b": '<|START_ACTION|>[{"tool_name": "ok", "parameters": {}}]<|END_ACTION|>',
    "gigachat": '<|function_call|>{"name": "ok", "arguments": {}}',
    "functionary_3_1": "<function=ok>{}</function>",
    "functionary_3_2": "all\nx>>>patch\nok",
    "dsml": f'<{DSML}invoke name="ok"></{DSML}invoke>',
    "minimax_m2": '<minimax:tool_call><invoke name="ok"></invoke></minimax:tool_call>',
    "minimax_m3": f'{M3}<invoke name="ok">{M3}</invoke>',
    "seed_oss": "<seed:tool_call><function=ok></function></seed:tool_call>",
    "lfm2": "<|tool_call_start|>[ok()]<|tool_call_end|>",
}


@pytest.mark.parametrize(("format", "raw"), BROKEN)
def test_an_unreadable_call_stays_in_the_text_and_hides_no_other(format: str, raw: str) -> None:
    alone = FORMATS[format].parse(raw, TOOLS, reasoning_open=False)
    assert alone == parsed(raw, malformed=(raw,))
    followed = FORMATS[format].parse(f"{raw}\n{GOOD[format]}", TOOLS, reasoning_open=False)
    assert [made.name for made in followed.calls] == ["ok"]
    assert (followed.text, followed.malformed) == (raw, (raw,))


@pytest.mark.parametrize("format", sorted(set(FORMATS) - {"gptoss", "functionary_3_2"}))
def test_reasoning_is_one_block_at_the_start_without_calls(format: str) -> None:
    good = GOOD.get(format, "plain")
    tags = ("<think>", "</think>") if format == "mistral" else FORMATS[format].thinking[0]

    def parse(text: str, tools: Any, *, reasoning_open: bool) -> ParsedReply:
        text = text.replace("<think>", tags[0]).replace("</think>", tags[1])
        read = FORMATS[format].parse(text, tools, reasoning_open=reasoning_open)
        return replace(read, text=read.text.replace(tags[0], "<think>").replace(tags[1], "</think>"))

    inside = parse(f"\n<think>\nDraft: {good}\n</think>\n\n  Answer \n", TOOLS, reasoning_open=False)
    assert inside == parsed("Answer \n", reasoning=f"Draft: {good}")
    opened = parse(f"Draft: {good}</think>Answer", TOOLS, reasoning_open=True)
    assert opened == parsed("Answer", reasoning=f"Draft: {good}")
    # A model that repeats the tag which the prompt opened.
    assert parse("<think>\na\n</think>b", TOOLS, reasoning_open=True) == parsed("b", reasoning="a")
    assert parse(f"a {good}", TOOLS, reasoning_open=True) == ParsedReply("", f"a {good}", (), (), True)
    assert parse("<think>", TOOLS, reasoning_open=False) == ParsedReply("", None, (), (), True)
    assert parse("", TOOLS, reasoning_open=True) == ParsedReply("", None, (), (), True)
    assert parse("<think> \n</think>b", TOOLS, reasoning_open=False) == parsed("b")
    # Without an opening tag at the start, the tags are text: a prefilled answer, or one about such tags.
    for text in (" the tag <think>x</think> is kept \n", "</think>", "", "\n"):
        assert parse(text, TOOLS, reasoning_open=False) == parsed(text)


def test_reasoning_of_gptoss_is_the_analysis_channel() -> None:
    parse = FORMATS["gptoss"].parse
    cut = parse("<|channel|>analysis<|message|>so <|channel|> far", TOOLS, reasoning_open=False)
    assert cut == ParsedReply("", "so <|channel|> far", (), (), True)
    assert parse("more", TOOLS, reasoning_open=True) == ParsedReply("", "more", (), (), True)
    ended = parse("a<|end|><|start|>assistant<|channel|>final<|message|>b", TOOLS, reasoning_open=True)
    assert ended == parsed("b", reasoning="a")
    twice = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
    assert parse(twice, TOOLS, reasoning_open=False) == parsed("", reasoning="a\nb")


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_reply_that_a_format_cannot_express_is_refused(format: str) -> None:
    write = FORMATS[format].write
    fits = [] if format == "plain" else [call("a", x=1)]
    tags = (*FORMATS[format].thinking, ("", ""))[0]
    write("Reasoning" if tags[0] else None, "Text", fits)
    refused: list[tuple[str | None, str, list[ParsedCall]]] = [
        (None, "x", [call("a", x=float("nan"))]),
        (None, "x", [call("a", x="\ud800")]),
        (None, "x", [call("a", x={1: 2})]),
        (None, "x", [call("a", x=object())]),
        (None, "x", [call("")]),
    ]
    if format == "gptoss":
        refused += [("a<|end|>b", "x", []), (None, f"x{GOOD[format]}", [])]
    elif format == "functionary_3_2":
        refused += [("a", "x", []), (None, "x\n>>>all\ny", []), (None, "x", [call("all", x=1)])]
    else:
        closes = "".join(close for _, close in FORMATS[format].thinking)
        refused += [(f"a{closes}b", "x", []), (None, f"{tags[0]}x", []), (None, GOOD.get(format, "<think>"), [])]
    if format == "minimax_m3":
        refused += [(None, "", [call("a", x=None)]), (None, "", [call("a", x=[])])]
    if format == "lfm2":
        refused += [(None, "", [ParsedCall("a", "freeform")]), (None, "", [ParsedCall("a", {"a b": 1})])]
    if format in ("qwen3_coder", "glm", "seed_oss", "minimax_m2"):
        refused += [
            (None, "", [ParsedCall("a", "freeform")]),
            (None, "", [call("a", x="</parameter></arg_value>")]),
            # Without a schema that tells them apart, these two are the same text.
            (None, "", [call("a", x="1"), call("a", x=1)]),
        ]
    if format == "mistral":
        refused.append((None, "", [call("a", "an id", x=1)]))
    for reasoning, text, calls in refused:
        with pytest.raises(UnwritableReply, match=format):
            write(reasoning, text, calls)
