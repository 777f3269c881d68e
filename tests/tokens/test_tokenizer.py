"""Text to ids and back on real tokenizers; special tokens as tokens or as plain text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from support.tokens.conversations import real
from towline import assets
from towline.errors import ConfigError
from towline.tokens.loading import eos_ids, load_codec
from towline.tokens.tokenizer import Tokenizer

NAMES = ("qwen3", "qwen2_5", "llama3_2")
TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\x00"), max_size=30)


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXT)
def test_text_round_trips(name: str, text: str) -> None:
    tokenizer = real(name).tokenizer
    normalizer = tokenizer.backend.normalizer
    # Qwen's tokenizers compose characters first (NFC); what is lost there is lost before any token.
    expected = normalizer.normalize_str(text) if normalizer is not None else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected
    assert tokenizer.decode(tokenizer.encode_plain(text)) == expected
    if not tokenizer.added_pattern.search(text):
        assert tokenizer.encode(text) == tokenizer.encode_plain(text)


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens(name: str) -> None:
    tokenizer = real(name).tokenizer
    added = set(tokenizer.added.values())
    assert set(tokenizer.special.values()) <= added
    for text, id in tokenizer.added.items():
        assert tokenizer.encode(text) == [id]
        assert tokenizer.id_of(text) == id
        assert tokenizer.token_of(id) == text
        assert tokenizer.decode([id]) == text
        plain = tokenizer.encode_plain(text)
        assert not added.intersection(plain)
        assert tokenizer.decode(plain) == text
        assert [m.group() for m in tokenizer.added_pattern.finditer(f"a{text}b")] == [text]
    assert tokenizer.decode(tokenizer.encode(f"x{tokenizer.eos_token}"), skip_special_tokens=True) == "x"
    assert tokenizer.size == max(tokenizer.backend.get_vocab(with_added_tokens=True).values()) + 1
    assert tokenizer.id_of("no such token") is None


def test_no_ids_are_added() -> None:
    """Llama's post-processor would begin every text with a token; only a template may."""
    tokenizer = real("llama3_2").tokenizer
    assert tokenizer.encode("x") == tokenizer.encode("x", add_special_tokens=True)
    assert len(tokenizer.encode("x")) == 1


def test_hugging_face_names() -> None:
    tokenizer = real("qwen3").tokenizer
    end = tokenizer.id_of("<|im_end|>")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == end
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "no such token"]) == [end, None]
    assert tokenizer.eos_token_id == end
    assert tokenizer.unk_token_id is None
    assert "<|im_end|>" in tokenizer.all_special_tokens
    odd = Tokenizer(tokenizer.backend, {"eos_token": {"content": "<|endoftext|>"}, "unk_token": None})
    assert odd.eos_token == "<|endoftext|>"
    assert odd.unk_token == ""
    assert Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE())).added_pattern.search("<|im_end|>") is None


def test_model_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    source = assets.tokenizer("qwen3")
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match="no chat template"):
        load_codec(tmp_path, renderer="sentinel")
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>"
    (tmp_path / "other.jinja").write_text(template)
    given_ = load_codec(tmp_path, template=tmp_path / "other.jinja", renderer="sentinel")
    assert given_.check.continues["user"]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": template}]}
        )
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151643, 151645]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert eos_ids(tmp_path) == {151643, 151645, 7}
    named = load_codec(tmp_path, renderer="sentinel")
    assert named.template.source == template
    assert named.template.render([{"role": "user", "content": "x"}]) == "d"
    assert named.stop_ids >= {151643, 151645, 7}
    (tmp_path / "chat_template.jinja").write_text(template)
    assert load_codec(tmp_path, renderer="sentinel").template.render([{"role": "user", "content": "x"}]) != "d"
