"""The model families of the audit: which tokenizer, which template, and the format that the family documents.

A family is real where both its tokenizer and its template are its own. All other templates borrow a tokenizer; they prove
the template, not the family's ids.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from towline.audit import formats
from towline.audit.formats import Format


@dataclass(frozen=True, slots=True)
class Family:
    """One family with a tokenizer of its own among the assets."""

    name: str
    format: Format
    template: str = ""
    """The asset that holds its template; by default the one in the tokenizer's own folder."""
    tokenizer: str = ""
    """The asset that holds its tokenizer; by default the one of the target's name."""
    stops: tuple[str, ...] = ()
    """Ends of a turn that the family's generation config names and its template does not spell."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Added tokens of the tokenizer that have another name in this family: it is not the family's own file."""


FAMILIES = {
    "qwen3": Family("Qwen3", formats.QWEN3),
    "qwen2_5": Family("Qwen2.5", formats.HERMES),
    "llama3_2": Family("Llama 3.2", formats.LLAMA3),
    "mistral_nemo": Family("Mistral-Nemo", formats.MISTRAL),
    "deepseek_v3": Family("DeepSeek-V3", formats.DEEPSEEK, template="deepseekv3"),
    "gemma3": Family("Gemma 3", formats.GEMMA),
    "gptoss": Family("gpt-oss", formats.GPT_OSS, template="gptoss"),
    "command_r_plus": Family("Command R+", formats.COMMAND_R),
    "smollm3": Family(
        "SmolLM3",
        formats.SMOLLM3,
        template="smollm3",
        tokenizer="llama3_2",
        # SmolLM3's vocabulary is Llama 3.2's; its own tokens take the place of reserved ones.
        renamed=(
            ("<|reserved_special_token_0|>", "<think>"),
            ("<|reserved_special_token_1|>", "</think>"),
            ("<|reserved_special_token_3|>", "<|im_start|>"),
            ("<|reserved_special_token_4|>", "<|im_end|>"),
        ),
    ),
}

TEMPLATES = {
    "deepseek_r1_distill": formats.R1_DISTILL,
    "deepseekv3": formats.DEEPSEEK,
    "gemma": formats.GEMMA,
    "gemma3": formats.GEMMA,
    "glm4moe": formats.GLM,
    "glm_4_6": formats.GLM,
    "gptoss": formats.GPT_OSS,
    "cohere": formats.COMMAND_R,
    "idefics3": formats.IDEFICS,
    "llama3": formats.LLAMA3_TEXT,
    "llama3_1": formats.LLAMA3,
    "llama3_2": formats.LLAMA3,
    "mistral_nemo": formats.MISTRAL,
    "nemotron_3_nano": formats.NEMOTRON_3,
    "nemotron_3_super": formats.NEMOTRON_3,
    "nemotron_3_ultra": formats.NEMOTRON_ULTRA,
    "nemotron_nano_v2": formats.NEMOTRON_V2,
    "phi3": formats.PHI,
    "phi3_5": formats.PHI,
    "qwen2_5": formats.HERMES,
    "qwen2_5_vl": formats.CHATML,
    "qwen3": formats.QWEN3,
    "qwen3_5_think": formats.QWEN3_5,
    "qwen3_6": formats.QWEN3_5,
    "qwen3_8": formats.QWEN3_5,
    "qwen3_coder": formats.QWEN3_CODER,
    "qwen3_instruct_2507": formats.HERMES,
    "smollm3": formats.SMOLLM3,
    "smolvlm": formats.IDEFICS,
}
"""Templates that are audited on a borrowed tokenizer, with the format of their family."""

_MARKS: tuple[tuple[str, Format], ...] = (
    (r"<\|channel\|>", formats.GPT_OSS),
    (r"<\|tool_calls_section_begin\|>", formats.KIMI),
    (r"tool▁calls▁begin", formats.DEEPSEEK),
    (r"\[TOOL_CALLS\]\[", formats.MISTRAL),
    (r"<arg_key>", formats.GLM),
    (r"<function=", formats.QWEN3_5),
    (r"<tool_call>[\s\S]*</think>", formats.QWEN3),
    (r"<tool_call>", formats.HERMES),
    (r"<\|python_tag\|>|<\|start_header_id\|>[\s\S]*parameters", formats.LLAMA3),
)


def recognised(source: str) -> Format:
    """The format of a template of the user's own, by the markup that it writes; plain text if it is none of these."""
    return next((format for mark, format in _MARKS if re.search(mark, source)), formats.PLAIN)
