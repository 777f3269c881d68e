"""A tokenizer made from a GGUF file gives the ids that llama.cpp gives, and those of the model's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.engines import gguf_rig
from towline.engines.llamacpp import GgufFile, LlamaCppEngine, model_folder
from towline.engines.llamacpp.gguf import find_smollm2
from towline.errors import ConfigError
from towline.tokens.loading import load_codec
from towline.tokens.tokenizer import Tokenizer

TEXTS = [
    "Hello, world! 123 4567 ½ ² Ⅷ ०१२३",
    "naïve café — “quotes” 日本語 한국어 🍎🍏 🧑‍🚀 \u200b",
    "def f(x):\n\treturn  x**2\n\n\n   # ok\r\n\r\n",
    "I'll we've DON'T it's 'S 'quoted'",
    "<|im_end|> <tool_call> <file_sep><|im_start|>user\n<|endoftext|>",
    "   leading and trailing   ",
    "\n\n \n\t\t",
    "a" * 50 + "1" * 10 + "!" * 9,
    "مرحبا بالعالم Привет мир",
    '{"name": "bash", "arguments": {"command": "ls -la /tmp | wc -l"}}',
    "x=1;y=22;z=333;w=4444 1,000,000.50€",
]


async def theirs(engine: LlamaCppEngine, text: str) -> list[int]:
    answer = await engine._post("/tokenize", {"content": text, "add_special": False, "parse_special": True})
    ids: list[int] = json.loads(answer)["tokens"]
    return ids


async def test_smollm2s_tokenizer_and_template_come_from_its_file() -> None:
    gguf = GgufFile.find(find_smollm2())
    folder = model_folder(gguf)
    assert model_folder(gguf) == folder, "made once"
    codec = load_codec(folder)
    assert {codec.tokenizer.token_of(id) for id in codec.stop_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert codec.check.continues["user"]
    engine = LlamaCppEngine(gguf.path, slots=1, context=256)
    await engine.start()
    try:
        for text in TEXTS:
            assert codec.tokenizer.encode(text) == await theirs(engine, text), text
            assert codec.tokenizer.decode(codec.tokenizer.encode(text)) == text
        plain = [{"role": "user", "content": "Hi"}]
        answer = json.loads(await engine._post("/apply-template", {"messages": plain}))["prompt"]
        assert codec.template.render(plain) == answer
    finally:
        await engine.close()


@pytest.mark.parametrize(("name", "pre"), [("qwen3", "qwen2"), ("llama3_2", "llama-bpe")])
async def test_other_vocabularies_are_split_as_their_own_tokenizers_do(
    name: str, pre: str, assets: Path, tmp_path: Path
) -> None:
    real = Tokenizer.load(assets / "tokenizers" / name)
    document = json.loads(real.backend.to_str())
    ids = {**document["model"]["vocab"], **{one["content"]: one["id"] for one in document["added_tokens"]}}
    by_id = {id: token for token, id in ids.items()}
    special = {one["id"]: 3 if one["special"] else 4 for one in document["added_tokens"]}
    size = max(by_id) + 1
    merges = [one if isinstance(one, str) else " ".join(one) for one in document["model"]["merges"]]
    vocabulary: dict[str, Any] = {
        "tokens": [by_id.get(id, f"[PAD{id}]") for id in range(size)],
        "types": [special.get(id, 1 if id in by_id else 5) for id in range(size)],
        "merges": merges,
        "pre": pre,
        "ends": {"eos": real.eos_token_id},
        "template": gguf_rig.TEMPLATE,
    }
    gguf = GgufFile.read(gguf_rig.write(tmp_path / f"{name}.gguf", gguf_rig.small(size), vocabulary))
    made = Tokenizer.load(model_folder(gguf))
    engine = LlamaCppEngine(gguf.path, slots=1, context=64)
    await engine.start()
    try:
        for text in TEXTS:
            assert made.encode(text) == real.encode(text), text
            assert made.encode(text) == await theirs(engine, text), text
    finally:
        await engine.close()
    assert made.eos_token == real.eos_token


def test_a_vocabulary_that_is_not_known_is_refused_and_a_tokenizer_beside_it_is_taken(tmp_path: Path) -> None:
    decoder = gguf_rig.small(len(gguf_rig.BYTES["tokens"]))
    for change, words in (
        ({"pre": "nobody-knows"}, "'nobody-knows'"),
        ({"kind": "llama"}, "kind 'llama'"),
        ({"template": ""}, "no chat template"),
    ):
        gguf = GgufFile.read(gguf_rig.write(tmp_path / "odd.gguf", decoder, {**gguf_rig.BYTES, **change}))
        with pytest.raises(ConfigError, match=words):
            model_folder(gguf)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert model_folder(gguf) == tmp_path
