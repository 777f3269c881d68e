"""Sampled text to a reply: the entry point to the formats in `towline.tokens.parsing`.

The caller decodes the sampled ids with special tokens kept, removes the end-of-turn token, and says whether the prompt
has opened the reasoning; `detect` names the format once, from the chat template.
"""

from __future__ import annotations

from towline.tokens.parsing.apertus import Apertus
from towline.tokens.parsing.apriel import Apriel
from towline.tokens.parsing.base import Format, Parsed, ParsedCall, Unwritable
from towline.tokens.parsing.command_r7b import CommandR7B
from towline.tokens.parsing.deepseek import DeepSeek
from towline.tokens.parsing.detect import detect
from towline.tokens.parsing.functionary import Functionary31, Functionary32
from towline.tokens.parsing.gigachat import GigaChat
from towline.tokens.parsing.glm import Glm
from towline.tokens.parsing.gptoss import GptOss
from towline.tokens.parsing.hermes import Hermes
from towline.tokens.parsing.invoked import Dsml, MiniMaxM2
from towline.tokens.parsing.kimi import Kimi
from towline.tokens.parsing.lfm2 import Lfm2
from towline.tokens.parsing.llama3 import Llama3
from towline.tokens.parsing.minimax_m3 import MiniMaxM3
from towline.tokens.parsing.mistral import Mistral
from towline.tokens.parsing.nemotron import Nemotron
from towline.tokens.parsing.plain import Plain
from towline.tokens.parsing.qwen3_coder import Qwen3Coder
from towline.tokens.parsing.seed_oss import SeedOss

__all__ = ["FORMATS", "Format", "Parsed", "ParsedCall", "Unwritable", "detect"]

_ALL: tuple[Format, ...] = (
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
FORMATS: dict[str, Format] = {format.name: format for format in _ALL}
"""Every format by its name."""
