"""GGUF files for tests: written from a decoder in float32, and read back as a decoder, whatever they are quantised in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel

from towline.engines.base import Sample, SampleRequest
from towline.engines.embedded.config import DecoderConfig
from towline.engines.embedded.model import Decoder, create_decoder
from towline.engines.llamacpp import GgufFile

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
IM_START, IM_END = 1, 2
BYTES: dict[str, Any] = {
    "tokens": [*SPECIAL, *sorted(ByteLevel.alphabet()), "he", "Ġt", "Ġthe"],
    "types": [3] * len(SPECIAL) + [1] * 259,
    "merges": ["h e", "Ġ t", "Ġt he"],
    "pre": "smollm",
    "ends": {"bos": IM_START, "eos": IM_END, "unk": 0},
    "template": TEMPLATE,
}
"""A vocabulary of bytes: most characters beyond ASCII are several tokens."""
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def small(vocabulary: int, seed: int = 0, *, spread: float = 0.25) -> Decoder:
    """A decoder with random weights; a larger spread gives more peaked distributions."""
    config = DecoderConfig(
        "llama", vocabulary, 64, 96, 2, 4, 2, 16, 512, tie_word_embeddings=True, initializer_range=spread
    )
    return create_decoder(config, seed)


def names(config: DecoderConfig) -> dict[str, str]:
    """The names of a file's tensors, with the decoder's own."""
    found = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in _LAYER.items():
            found[f"blk.{layer}.{theirs}.weight"] = f"model.layers.{layer}.{ours}.weight"
    return found


def write(path: Path, decoder: Decoder, vocabulary: Mapping[str, Any]) -> Path:
    config = decoder.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model(vocabulary.get("kind", "gpt2"))
    writer.add_tokenizer_pre(vocabulary["pre"])
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    for kind, id in vocabulary["ends"].items():
        getattr(writer, f"add_{kind}_token_id")(id)
    if vocabulary["template"]:
        writer.add_chat_template(vocabulary["template"])
    weights = decoder.state_dict()
    for theirs, ours in names(config).items():
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs.split(".")[-2])
        weight = weights[ours].numpy()
        writer.add_tensor(theirs, weight if heads is None else _paired(weight, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(file: GgufFile) -> Decoder:
    """The file's weights, dequantised, as a decoder."""
    told, arch = file.metadata, file.architecture
    heads = int(told[f"{arch}.attention.head_count"])
    hidden = int(told[f"{arch}.embedding_length"])
    config = DecoderConfig(
        "llama",
        len(file.tokens),
        hidden,
        int(told[f"{arch}.feed_forward_length"]),
        int(told[f"{arch}.block_count"]),
        heads,
        int(told[f"{arch}.attention.head_count_kv"]),
        hidden // heads,
        file.context,
        float(told[f"{arch}.attention.layer_norm_rms_epsilon"]),
        float(told[f"{arch}.rope.freq_base"]),
        tie_word_embeddings=True,
    )
    decoder = create_decoder(config, 0)
    weights = _tensors(file.path)
    assert set(weights) == set(names(config))
    targets = dict(decoder.named_parameters())
    with torch.no_grad():
        for theirs, ours in names(config).items():
            count = {"attn_q": heads, "attn_k": config.num_key_value_heads}.get(theirs.split(".")[-2])
            weight = weights[theirs] if count is None else _halved(weights[theirs], count)
            targets[ours].copy_(torch.from_numpy(weight))
    return decoder


def differences(decoder: Decoder, request: SampleRequest, sample: Sample, **other: Any) -> np.ndarray[Any, Any]:
    """How far each recorded logprob is from a forward pass over the prompt and the sample."""
    ids = torch.from_numpy(np.concatenate([request.prompt, sample.ids]).astype(np.int64))
    with torch.no_grad():
        logits = decoder(ids[None])[0, len(request.prompt) - 1 : -1].double()
    temperature = other.get("temperature", request.temperature)
    logits = logits / (temperature or 1.0)
    if request.temperature:
        logits = torch.stack([_cut(row, request.top_k, request.top_p) for row in logits])
    expected = logits.log_softmax(-1).gather(1, ids[len(request.prompt) :, None])[:, 0]
    return np.abs(expected.numpy() - sample.logprobs)


def _cut(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    if not top_k and top_p == 1.0:
        return logits
    kept = torch.zeros_like(logits, dtype=torch.bool)
    mass = 0.0
    for rank, id in enumerate(logits.argsort(descending=True).tolist()):
        if (top_k and rank >= top_k) or mass >= top_p:
            break
        kept[id] = True
        ranked = logits if not top_k else torch.where(logits >= logits.topk(top_k).values[-1], logits, -torch.inf)
        mass += float(ranked.softmax(-1)[id]) if top_p < 1.0 else 0.0
    return torch.where(kept, logits, -torch.inf)


def _tensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The weights by name, dequantised."""
    tensors = gguf.GGUFReader(path).tensors
    return {one.name: np.array(gguf.dequantize(one.data, one.tensor_type), np.float32) for one in tensors}


def _paired(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp rotates adjacent pairs, a decoder the halves of a head."""
    return np.ascontiguousarray(weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape))


def _halved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape))


def ids(*values: int | Sequence[int]) -> np.ndarray[Any, Any]:
    return np.array([id for value in values for id in ([value] if isinstance(value, int) else value)], np.int32)
