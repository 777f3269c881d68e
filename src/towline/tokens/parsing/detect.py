"""The format of a model, from the Jinja source of its chat template: the markup that the template writes for calls."""

from __future__ import annotations

import re

from towline.tokens.parsing.deepseek import DeepSeek

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
"""Most telling first: several families wrap what is theirs in `<tool_call>`."""
_OTHERS = re.compile(r"<tool_sep>")
"""Marks of formats that share a tag with one of ours and are not it."""


def detect(template: str) -> str:
    """The name of the format that a chat template writes; `plain` if it is none that is known here."""
    if not _OTHERS.search(template):
        for name, mark in _MARKS:
            if mark.search(template):
                return name
    return "plain"
