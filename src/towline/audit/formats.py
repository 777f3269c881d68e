"""Replies in the format that each model family documents, written without the parsers and writers under test.

A format says how a reply is spelled (reasoning, text, calls) and on which token the model ends it. The sources are the
families' model cards and what their chat templates show of a reply. Nothing here imports `towline.tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FormatCall:
    """A call as a model writes it."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """The id that the model itself writes, in families that do."""


Writer = Callable[[str, Sequence[FormatCall]], str]
"""The text of a reply behind its reasoning."""


@dataclass(frozen=True, slots=True)
class Format:
    """How a family's models write a reply."""

    name: str
    end: str
    """The token that ends an answer."""
    write: Writer
    call_end: str = ""
    """The token that ends a reply with calls, where it is another one."""
    think: tuple[str, str] | None = None
    """What stands before and behind the reasoning; `None` for a family without reasoning of its own."""
    thoughtless: str = ""
    """What stands in place of reasoning where there is none."""
    calls: bool = False
    parallel: bool = False
    beside: bool = False
    """Text may stand before a call."""
    ids: str = ""
    """How the ids look that the model writes with its calls: `mistral`, `kimi`, or none."""

    def text(
        self, reasoning: str | None, text: str, calls: Sequence[FormatCall], *, opened: bool, as_shown: bool
    ) -> str:
        """A whole reply without its end.

        `opened`: the prompt has opened the reasoning already. `as_shown`: where a family documents several spellings, the
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
    """A parameter between tags: text as it is, lists and objects as JSON, and what Jinja prints for the rest."""
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
            f"<arg_key>{name}</arg_key>\n<arg_value>{_text_or_json(v)}</arg_value>\n"
            for name, v in call.arguments.items()
        )
        + "</tool_call>"
        for call in calls
    ]
    return (f"\n{text}" if text else "") + "".join(written)


def _text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


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


class _Harmony(Format):
    """gpt-oss: every message has a header, and the prompt ends inside the first one."""

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


_QWEN_THINK = ("<think>\n", "\n</think>\n\n")

PLAIN = Format("plain", "", _plain)
HERMES = Format("hermes", "<|im_end|>", _hermes, calls=True, parallel=True, beside=True)
QWEN3 = Format("hermes", "<|im_end|>", _hermes, think=_QWEN_THINK, calls=True, parallel=True, beside=True)
QWEN3_5 = Format("qwen3_coder", "<|im_end|>", _qwen3_5, think=_QWEN_THINK, calls=True, parallel=True, beside=True)
QWEN3_CODER = Format("qwen3_coder", "<|im_end|>", _qwen3_5, calls=True, parallel=True, beside=True)
NEMOTRON_3 = Format(
    "qwen3_coder",
    "<|im_end|>",
    _nemotron_3,
    think=("<think>\n", "\n</think>\n"),
    calls=True,
    parallel=True,
    beside=True,
)
NEMOTRON_ULTRA = Format(
    "qwen3_coder",
    "<|im_end|>",
    _nemotron_ultra,
    think=("<think>\n", "</think>"),
    calls=True,
    parallel=True,
    beside=True,
)
NEMOTRON_V2 = Format(
    "toolcall", "<SPECIAL_12>", _toolcall, think=("<think>\n", "\n</think>\n\n"), calls=True, parallel=True, beside=True
)
LLAMA3 = Format("llama3", "<|eot_id|>", _llama3, calls=True)
MISTRAL = Format("mistral", "</s>", _mistral, calls=True, parallel=True, ids="mistral")
DEEPSEEK = Format(
    "deepseek",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    _deepseek,
    think=("<think>\n", "\n</think>\n\n"),
    calls=True,
    parallel=True,
    beside=True,
)
GLM = Format(
    "glm",
    "<|user|>",
    _glm,
    call_end="<|observation|>",
    think=("\n<think>", "</think>"),
    thoughtless="\n<think></think>",
    calls=True,
    parallel=True,
    beside=True,
)
GPT_OSS = _Harmony("gptoss", "<|return|>", _plain, call_end="<|call|>", think=("", ""), calls=True)
KIMI = Format("kimi", "<|im_end|>", _kimi, calls=True, parallel=True, beside=True, ids="kimi")
SMOLLM3 = Format("smollm3", "<|im_end|>", _plain, think=("<think>\n", "\n</think>\n"))
GEMMA = Format("gemma", "<end_of_turn>", _plain)
COMMAND_R = Format("command_r", "<|END_OF_TURN_TOKEN|>", _plain)
CHATML = Format("chatml", "<|im_end|>", _plain)
PHI = Format("phi", "<|end|>", _plain)
LLAMA3_TEXT = Format("llama3_text", "<|eot_id|>", _plain)
IDEFICS = Format("idefics", "<end_of_utterance>", _idefics)
R1_DISTILL = Format("deepseek_r1_distill", DEEPSEEK.end, _plain, think=("<think>\n", "\n</think>\n\n"))
