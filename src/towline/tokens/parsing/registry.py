"""Every reply format by name, and which one a chat template writes.

The caller decodes the sampled ids with special tokens kept, removes the end-of-turn token, and says whether the prompt
already opened the reasoning; `detect_format` picks the format once, from the Jinja source of the chat template.
"""

from __future__ import annotations

import re

from towline.tokens.parsing.base import OutputFormat
from towline.tokens.parsing.functionary import Functionary31, Functionary32
from towline.tokens.parsing.harmony import GptOss
from towline.tokens.parsing.invoke import Dsml, MiniMaxM2, MiniMaxM3
from towline.tokens.parsing.json_calls import Apertus, Apriel, CommandR7B, GigaChat, Hermes, Llama3, Mistral, Nemotron
from towline.tokens.parsing.parameter_tags import Glm, Qwen3Coder, SeedOss
from towline.tokens.parsing.pythonic import Lfm2
from towline.tokens.parsing.sections import DeepSeek, Kimi
from towline.tokens.parsing.tagged import Plain

_MARKS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("gptoss", re.compile(r"<\|channel\|>")),
    ("kimi", re.compile(r"<\|tool_calls_section_begin\|>")),
    ("deepseek", re.compile(re.escape(DeepSeek.section[0]))),
    ("mistral", re.compile(r"\[TOOL_CALLS\]")),
    ("glm", re.compile(r"<arg_key>")),
    ("dsml", re.compile("\uff5cDSML\uff5c")),
    ("apertus", re.compile(r"<\|tools_prefix\|>")),
    ("command_r7b", re.compile(r"<\|START_ACTION\|>")),
    ("gigachat", re.compile(r"<\|function_call\|>")),
    ("lfm2", re.compile(r"<\|tool_call_start\|>|List of tools: (?:<\|tool_list_start\|>)?\[")),
    ("minimax_m3", re.compile(r"\]<\]minimax\[>\[")),
    ("minimax_m2", re.compile(r"<minimax:tool_call>")),
    ("seed_oss", re.compile(r"<seed:tool_call>")),
    ("nemotron", re.compile(r"<TOOLCALL>")),
    ("functionary_3_2", re.compile(r">>>\$\{recipient\}")),
    ("functionary_3_1", re.compile(r"<\{start_tag\}=\{function_name\}>")),
    ("apriel", re.compile(r"<tool_calls>\[")),
    ("qwen3_coder", re.compile(r"<function=")),
    ("hermes", re.compile(r"<tool_call>")),
    ("llama3", re.compile(r"<\|python_tag\|>|<\|start_header_id\|>[\s\S]*\\?\"parameters\\?\": ")),
)
"""Most specific first: several families wrap their markup in `<tool_call>`."""
_UNSUPPORTED = re.compile(r"<tool_sep>")
"""Marks of unsupported formats that share a tag with a supported one."""


def detect_format(template: str) -> str:
    """The name of the format that a chat template writes; `plain` if it is none of these."""
    if not _UNSUPPORTED.search(template):
        for name, mark in _MARKS:
            if mark.search(template):
                return name
    return "plain"


_ALL: tuple[OutputFormat, ...] = (
    Hermes(),
    Qwen3Coder(),
    Llama3(),
    DeepSeek(),
    GptOss(),
    Mistral(),
    Glm(),
    Kimi(),
    Apertus(),
    Apriel(),
    CommandR7B(),
    Dsml(),
    Functionary31(),
    Functionary32(),
    GigaChat(),
    Lfm2(),
    MiniMaxM2(),
    MiniMaxM3(),
    Nemotron(),
    SeedOss(),
    Plain(),
)
FORMATS: dict[str, OutputFormat] = {format.name: format for format in _ALL}
"""Every format by its name."""
