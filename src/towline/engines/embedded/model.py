"""A small decoder-only transformer in plain torch, in float32, with the weight names of Hugging Face.

`Decoder.forward` is the reference: differentiable, without a cache, over whole rows. It is what the reference trainer
optimises and what proves recorded logprobs. The engine computes the same function incrementally (`runner.py`).

Why our own: sampling, training and the fidelity audit need one function whose logprobs are reproducible to float32
rounding, on a laptop without a GPU, with an engine that supports aborts, forced ids and weight swaps between steps.
`transformers` would add a large dependency whose numerics change between versions; vLLM does not run in process here.

Invariant: `state_dict()` has exactly the names of the safetensors file, so loading, saving and comparing need no
mapping. A model with tied embeddings has no separate head: neither in memory nor in the file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor, nn
from torch.nn import functional

from towline.common.files import write_atomically
from towline.engines.embedded.config import DecoderConfig
from towline.errors import ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """The rotary frequency of each pair of a head's dimensions."""
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: long wavelengths are stretched, short ones kept, those between blended.
    wavelengths = 2 * math.pi / frequencies
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = (scaling.original_context / wavelengths - scaling.low_freq_factor) / span
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rope_angles(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, one row per position, as wide as a head."""
    angles = positions.float().unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of each head by the angle of its position."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


class RmsNorm(nn.Module):
    def __init__(self, size: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, values: Tensor) -> Tensor:
        return functional.rms_norm(values, (values.shape[-1],), self.weight, self.epsilon)


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        hidden, size = config.hidden_size, config.head_dim
        heads, shared = config.num_attention_heads * size, config.num_key_value_heads * size
        self.q_proj = nn.Linear(hidden, heads, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, shared, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, shared, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads, hidden, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RmsNorm(size, config.rms_norm_eps)
            self.k_norm = RmsNorm(size, config.rms_norm_eps)

    def forward(self, values: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        rows, length, _ = values.shape
        shape = (rows, length, -1, self.config.head_dim)
        queries = self.q_proj(values).view(shape)
        keys = self.k_proj(values).view(shape)
        if self.config.qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries = rotate(queries.transpose(1, 2), cosines, sines)
        keys = rotate(keys.transpose(1, 2), cosines, sines)
        outputs = functional.scaled_dot_product_attention(
            queries, keys, self.v_proj(values).view(shape).transpose(1, 2), is_causal=True, enable_gqa=True
        )
        projected: Tensor = self.o_proj(outputs.transpose(1, 2).reshape(rows, length, -1))
        return projected


class Mlp(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor = self.down_proj(functional.silu(self.gate_proj(values)) * self.up_proj(values))
        return outputs


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, values: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        values = values + self.self_attn(self.input_layernorm(values), cosines, sines)
        outputs: Tensor = values + self.mlp(self.post_attention_layernorm(values))
        return outputs


class Backbone(nn.Module):
    """Everything but the output head; the weight names start with `model.`."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """The whole model. Rows are causal, so padding on the right needs no mask."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("frequencies", rope_frequencies(config), persistent=False)

    @property
    def head(self) -> Tensor:
        """The output matrix, one row per id."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def hidden(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """The normalised last hidden states of `ids` (rows x length), for callers that need few of the logits."""
        if positions is None:
            positions = torch.arange(ids.shape[-1], device=ids.device)
        frequencies = self.get_buffer("frequencies")
        cosines, sines = rope_angles(frequencies, positions if positions.dim() == 1 else positions.unsqueeze(1))
        values: Tensor = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            values = layer(values, cosines, sines)
        normed: Tensor = self.model.norm(values)
        return normed

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits (rows x length x vocabulary) of `ids` (rows x length); positions count from 0 unless given."""
        return functional.linear(self.hidden(ids, positions), self.head)


def create_decoder(config: DecoderConfig, seed: int) -> Decoder:
    """A freshly initialised decoder; the same seed gives the same weights."""
    decoder = _allocate(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
            elif name.endswith(".bias"):
                weight.zero_()
            else:
                weight.normal_(0.0, config.initializer_range, generator=generator)
    return decoder


def load_decoder(folder: Path) -> Decoder:
    """Read `config.json` and the safetensors weights of a folder; any float type is converted to float32."""
    decoder = _allocate(DecoderConfig.from_folder(folder))
    missing = dict(decoder.named_parameters())
    for path in _weight_files(folder):
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        for name, tensor in tensors.items():
            if name in missing:
                target = missing.pop(name)
                if target.shape != tensor.shape:
                    raise ConfigError(
                        f"{path}: {name} is {tuple(tensor.shape)}, the config needs {tuple(target.shape)}"
                    )
                with torch.no_grad():
                    target.copy_(tensor)
            elif not _redundant(name, decoder.config):
                raise ConfigError(f"{path}: {name} is not a weight of a {decoder.config.model_type} model")
    if missing:
        raise ConfigError(f"{folder} lacks weights: {', '.join(sorted(missing))}")
    return decoder


def save_decoder(decoder: Decoder, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.json", (json.dumps(decoder.config.to_json(), indent=2) + "\n").encode())
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in decoder.state_dict().items()}
    write_atomically(folder / WEIGHTS, serialize(tensors, metadata={"format": "pt"}))


def _allocate(config: DecoderConfig) -> Decoder:
    """A decoder with uninitialised weights: skips torch's own initialisation, which would draw from global state."""
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.to_empty(device="cpu")
    decoder.register_buffer("frequencies", rope_frequencies(config), persistent=False)
    return decoder.float()


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        return [folder / WEIGHTS]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"cannot read {index}: {error}") from error
    return [folder / name for name in sorted(names)]


def _redundant(name: str, config: DecoderConfig) -> bool:
    """Whether some files carry this weight although it is computed or tied here."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)
