"""Model families of the audit: tokenizer, template, and the documented format of replies.

A format defines how a reply is spelled (reasoning, text, calls) and which token ends it. It follows the family's model card
and what its chat template shows of a reply; nothing here imports `towline.tokens`, the code under test.

A family is real if both its tokenizer and its template are its own. All other templates borrow a tokenizer; they prove the
template, not the family's ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class FormatCall:
    """A tool call as a model writes it."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """The id that the model itself writes, in families that do."""


Writer = Callable[[str, Sequence[FormatCall]], str]
"""Writes the text of a reply after its reasoning."""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a family's models write a reply."""

    name: str
    end: str
    """The token that ends an answer."""
    write: Writer
    call_end: str = ""
    """The token that ends a reply with calls, if it is another one."""
    think: tuple[str, str] | None = None
    """The markup before and after the reasoning; `None` for a family without reasoning."""
    thoughtless: str = ""
    """The markup of a reply without reasoning."""
    calls: bool = False
    """Whether the family documents tool calls."""
    parallel: bool = False
    """Whether a reply may have several calls."""
    beside: bool = False
    """Whether text may precede a call."""
    ids: str = ""
    """The style of the ids that the model writes with its calls: `mistral`, `kimi`, or none."""

    def text(
        self, reasoning: str | None, text: str, calls: Sequence[FormatCall], *, opened: bool, as_shown: bool
    ) -> str:
        """A whole reply without its end token.

        `opened`: the prompt has opened the reasoning already. `as_shown`: if a family documents several spellings, use the
        one that its template shows in history.
        """
        body = self.write(text, calls)
        if self.think is None:
            return body
        before, behind = self.think
        if opened:
            return f"{reasoning or ''}{behind}{body}"
        return f"{before}{reasoning}{behind}{body}" if reasoning else f"{self.thoughtless}{body}"

    def ending(self, calls: Sequence[FormatCall]) -> str:
        return self.call_end if calls and self.call_end else self.end


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _scalar(value: Any) -> str:
    """A parameter between tags: text as it is, lists and objects as JSON, others as Jinja prints them."""
    return value if isinstance(value, str) else _json(value) if isinstance(value, (list, dict)) else str(value)


def _plain(text: str, calls: Sequence[FormatCall]) -> str:
    return text


def _hermes(text: str, calls: Sequence[FormatCall]) -> str:
    written = [f"<tool_call>\n{_json({'name': c.name, 'arguments': c.arguments})}\n</tool_call>" for c in calls]
    return "\n".join([*([text] if text else []), *written])


def _tagged(call: FormatCall) -> str:
    """Qwen3-Coder and Nemotron 3."""
    parameters = "".join(
        f"<parameter={name}>\n{_scalar(value)}\n</parameter>\n" for name, value in call.arguments.items()
    )
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


def _qwen3_5(text: str, calls: Sequence[FormatCall]) -> str:
    return f"{text}{chr(10) * 2 if text and calls else ''}" + "\n".join(map(_tagged, calls))


def _nemotron_3(text: str, calls: Sequence[FormatCall]) -> str:
    return f"{text}{chr(10) if text and calls else ''}" + "".join(f"{_tagged(call)}\n" for call in calls)


def _nemotron_ultra(text: str, calls: Sequence[FormatCall]) -> str:
    return f"{text}{chr(10) if calls else ''}" + "".join(f"{_tagged(call)}\n" for call in calls)


def _idefics(text: str, calls: Sequence[FormatCall]) -> str:
    return f" {text}"


def _llama3(text: str, calls: Sequence[FormatCall]) -> str:
    return f'{{"name": "{calls[0].name}", "parameters": {_json(calls[0].arguments)}}}' if calls else text


def _mistral(text: str, calls: Sequence[FormatCall]) -> str:
    listed = [{"name": call.name, "arguments": call.arguments, "id": call.id} for call in calls]
    return f"[TOOL_CALLS]{_json(listed)}" if calls else text


def _deepseek(text: str, calls: Sequence[FormatCall]) -> str:
    def mark(words: str) -> str:
        return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"

    written = [
        f"{mark('tool call begin')}function{mark('tool sep')}{call.name}\n```json\n{_json(call.arguments)}\n```"
        f"{mark('tool call end')}"
        for call in calls
    ]
    return f"{text}{mark('tool calls begin')}{chr(10).join(written)}{mark('tool calls end')}" if calls else text


def _glm(text: str, calls: Sequence[FormatCall]) -> str:
    written = [
        f"\n<tool_call>{call.name}\n"
        + "".join(
            f"<arg_key>{name}</arg_key>\n<arg_value>{v if isinstance(v, str) else _json(v)}</arg_value>\n"
            for name, v in call.arguments.items()
        )
        + "</tool_call>"
        for call in calls
    ]
    return (f"\n{text}" if text else "") + "".join(written)


def _kimi(text: str, calls: Sequence[FormatCall]) -> str:
    written = [
        f"<|tool_call_begin|>{call.id}<|tool_call_argument_begin|>{_json(call.arguments)}<|tool_call_end|>"
        for call in calls
    ]
    return f"{text}<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>" if calls else text


def _toolcall(text: str, calls: Sequence[FormatCall]) -> str:
    """Nemotron Nano v2."""
    listed = ", ".join(f'{{"name": "{call.name}", "arguments": {_json(call.arguments)}}}' for call in calls)
    return f"{text}{chr(10) if text else ''}<TOOLCALL>[{listed}]</TOOLCALL>" if calls else text


class _Harmony(ReplyFormat):
    """gpt-oss: every message has a header, and the prompt ends inside the first."""

    def text(
        self, reasoning: str | None, text: str, calls: Sequence[FormatCall], *, opened: bool, as_shown: bool
    ) -> str:
        messages = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
        if calls:
            name, arguments = calls[0].name, _json(calls[0].arguments)
            if as_shown:
                messages.append(f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}")
            else:
                header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
                messages.append(f"{header}<|message|>{arguments}")
        else:
            messages.append(f"<|channel|>final<|message|>{text}")
        return "<|start|>assistant".join(messages)


_THINK = ("<think>\n", "\n</think>\n\n")

PLAIN_TEXT = ReplyFormat("plain", "", _plain)
HERMES = ReplyFormat("hermes", "<|im_end|>", _hermes, calls=True, parallel=True, beside=True)
QWEN3 = replace(HERMES, think=_THINK)
QWEN3_CODER = replace(HERMES, name="qwen3_coder", write=_qwen3_5)
QWEN3_5 = replace(QWEN3_CODER, think=_THINK)
NEMOTRON_3 = replace(QWEN3_CODER, write=_nemotron_3, think=("<think>\n", "\n</think>\n"))
NEMOTRON_ULTRA = replace(QWEN3_CODER, write=_nemotron_ultra, think=("<think>\n", "</think>"))
NEMOTRON_V2 = replace(QWEN3, name="toolcall", end="<SPECIAL_12>", write=_toolcall)
LLAMA3 = ReplyFormat("llama3", "<|eot_id|>", _llama3, calls=True)
MISTRAL = ReplyFormat("mistral", "</s>", _mistral, calls=True, parallel=True, ids="mistral")
DEEPSEEK = replace(QWEN3, name="deepseek", end="<\uff5cend\u2581of\u2581sentence\uff5c>", write=_deepseek)
GLM = replace(
    HERMES,
    name="glm",
    end="<|user|>",
    write=_glm,
    call_end="<|observation|>",
    think=("\n<think>", "</think>"),
    thoughtless="\n<think></think>",
)
GPT_OSS = _Harmony("gptoss", "<|return|>", _plain, call_end="<|call|>", think=("", ""), calls=True)
KIMI = replace(HERMES, name="kimi", write=_kimi, ids="kimi")
SMOLLM3 = ReplyFormat("smollm3", "<|im_end|>", _plain, think=("<think>\n", "\n</think>\n"))
GEMMA = ReplyFormat("gemma", "<end_of_turn>", _plain)
COMMAND_R = ReplyFormat("command_r", "<|END_OF_TURN_TOKEN|>", _plain)
CHATML = ReplyFormat("chatml", "<|im_end|>", _plain)
PHI = ReplyFormat("phi", "<|end|>", _plain)
LLAMA3_TEXT = ReplyFormat("llama3_text", "<|eot_id|>", _plain)
IDEFICS = ReplyFormat("idefics", "<end_of_utterance>", _idefics)
R1_DISTILL = ReplyFormat("deepseek_r1_distill", DEEPSEEK.end, _plain, think=_THINK)


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family whose own tokenizer is among the assets."""

    name: str
    format: ReplyFormat
    template: str = ""
    """The asset with its template; by default the one in the tokenizer's folder."""
    tokenizer: str = ""
    """The asset with its tokenizer; by default the one with the target's name."""
    stops: tuple[str, ...] = ()
    """End-of-turn tokens of the family's generation config that its template does not contain."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Added tokens with another name in this family, whose tokenizer file is borrowed."""


FAMILIES = {
    "qwen3": ModelFamily("Qwen3", QWEN3),
    "qwen2_5": ModelFamily("Qwen2.5", HERMES),
    "llama3_2": ModelFamily("Llama 3.2", LLAMA3),
    "mistral_nemo": ModelFamily("Mistral-Nemo", MISTRAL),
    "deepseek_v3": ModelFamily("DeepSeek-V3", DEEPSEEK, template="deepseekv3"),
    "gemma3": ModelFamily("Gemma 3", GEMMA),
    "gptoss": ModelFamily("gpt-oss", GPT_OSS, template="gptoss"),
    "command_r_plus": ModelFamily("Command R+", COMMAND_R),
    "smollm3": ModelFamily(
        "SmolLM3",
        SMOLLM3,
        template="smollm3",
        tokenizer="llama3_2",
        # SmolLM3 uses Llama 3.2's vocabulary; its own tokens replace reserved ones.
        renamed=(
            ("<|reserved_special_token_0|>", "<think>"),
            ("<|reserved_special_token_1|>", "</think>"),
            ("<|reserved_special_token_3|>", "<|im_start|>"),
            ("<|reserved_special_token_4|>", "<|im_end|>"),
        ),
    ),
}

TEMPLATES = {
    "deepseek_r1_distill": R1_DISTILL,
    "deepseekv3": DEEPSEEK,
    "gemma": GEMMA,
    "gemma3": GEMMA,
    "glm4moe": GLM,
    "glm_4_6": GLM,
    "gptoss": GPT_OSS,
    "cohere": COMMAND_R,
    "idefics3": IDEFICS,
    "llama3": LLAMA3_TEXT,
    "llama3_1": LLAMA3,
    "llama3_2": LLAMA3,
    "mistral_nemo": MISTRAL,
    "nemotron_3_nano": NEMOTRON_3,
    "nemotron_3_super": NEMOTRON_3,
    "nemotron_3_ultra": NEMOTRON_ULTRA,
    "nemotron_nano_v2": NEMOTRON_V2,
    "phi3": PHI,
    "phi3_5": PHI,
    "qwen2_5": HERMES,
    "qwen2_5_vl": CHATML,
    "qwen3": QWEN3,
    "qwen3_5_think": QWEN3_5,
    "qwen3_6": QWEN3_5,
    "qwen3_8": QWEN3_5,
    "qwen3_coder": QWEN3_CODER,
    "qwen3_instruct_2507": HERMES,
    "smollm3": SMOLLM3,
    "smolvlm": IDEFICS,
}
"""Templates audited on a borrowed tokenizer, with their family's format."""

_MARKS: tuple[tuple[str, ReplyFormat], ...] = (
    (r"<\|channel\|>", GPT_OSS),
    (r"<\|tool_calls_section_begin\|>", KIMI),
    (r"tool▁calls▁begin", DEEPSEEK),
    (r"\[TOOL_CALLS\]\[", MISTRAL),
    (r"<arg_key>", GLM),
    (r"<function=", QWEN3_5),
    (r"<tool_call>[\s\S]*</think>", QWEN3),
    (r"<tool_call>", HERMES),
    (r"<\|python_tag\|>|<\|start_header_id\|>[\s\S]*parameters", LLAMA3),
)


def detect_format(source: str) -> ReplyFormat:
    """The format of a user's template, detected by its markup; plain text if unknown."""
    return next((format for mark, format in _MARKS if re.search(mark, source)), PLAIN_TEXT)
