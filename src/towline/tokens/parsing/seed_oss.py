"""Seed-OSS: `<seed:tool_call>` around `<function=name>` with bare `<parameter=key>` values, nothing trimmed.

The template prints values that are no strings as Python does, lists and objects too.
"""

from __future__ import annotations

from towline.tokens.parsing.qwen3_coder import Qwen3Coder


class SeedOss(Qwen3Coder):
    name = "seed_oss"
    tags = ("<seed:tool_call>", "</seed:tool_call>")
    thinking = (("<seed:think>", "</seed:think>"),)
    thinking_space = ("", "", "\n")
    around = ""
