"""The incremental forward pass: one ragged batch of tokens against a pool of keys and values.

The weights are a copy of a decoder's, laid out for few calls a step: queries, keys and values in one matrix, gate and
up in one matrix, all transposed for row-major products. One step flattens every sequence's tokens into one batch, so
that the matrix products see them together; only attention (`attention.py`) looks at sequences.

Invariant: a token's output depends on its own sequence only, and equals `Decoder.forward` up to float32 rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from towline.engines.embedded.attention import Attention
from towline.engines.embedded.batch import Batch
from towline.engines.embedded.config import DecoderConfig
from towline.engines.embedded.model import Decoder, Layer, rope_angles, rope_frequencies


@dataclass(slots=True)
class LayerWeights:
    """One layer; matrices are input by output."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """Query heads then key heads, a row each."""
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(slots=True)
class Weights:
    """A decoder's weights as the runner uses them, independent of the decoder they were taken from."""

    config: DecoderConfig
    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor

    @classmethod
    def of(cls, decoder: Decoder) -> Weights:
        with torch.no_grad():
            embedding = decoder.model.embed_tokens.weight.detach().float().clone()
            tied = decoder.config.tie_word_embeddings
            return cls(
                config=decoder.config,
                embedding=embedding,
                layers=[_layer(layer, decoder.config) for layer in decoder.model.layers if isinstance(layer, Layer)],
                norm=decoder.model.norm.weight.detach().float().clone(),
                head=embedding.t() if tied else _transposed(decoder.head),
            )


class Runner:
    """Computes batches over a pool of `slots` numbered from 1."""

    def __init__(self, weights: Weights, slots: int, context: int):
        self.weights = weights
        config = weights.config
        self._heads, self._shared, self._size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        # A row may be padded with slots that are not written yet. They are masked, but what is masked is still multiplied
        # by zero, so every slot holds finite numbers from the start.
        shape = (config.num_hidden_layers, slots + 1, 2 * self._shared, self._size)
        self._pool = torch.zeros(shape, dtype=torch.float32)
        self._attention = Attention(self._heads, self._shared, self._size)
        cosines, sines = rope_angles(rope_frequencies(config), torch.arange(context))
        # Rolling a head by half swaps its halves; the sign that a rotation needs is kept in the sines.
        half = self._size // 2
        self._cosines = cosines.unsqueeze(1)
        self._sines = torch.cat((-sines[:, :half], sines[:, half:]), dim=-1).unsqueeze(1)

    def hidden(self, batch: Batch) -> Tensor:
        """The last hidden state of every token of the batch; writes their keys and values to the pool."""
        config, heads, shared, size = self.weights.config, self._heads, self._shared, self._size
        positions = torch.from_numpy(batch.positions)
        cosines, sines = self._cosines[positions], self._sines[positions]
        slots = torch.from_numpy(batch.slots)
        attention = self._attention.prepare(batch)
        values = self.weights.embedding[torch.from_numpy(batch.ids)]
        count = values.shape[0]
        for layer, pool in zip(self.weights.layers, self._pool.unbind(0), strict=True):
            normed = functional.rms_norm(values, (config.hidden_size,), layer.norm, config.rms_norm_eps)
            qkv = _product(normed, layer.qkv, layer.qkv_bias).view(count, heads + 2 * shared, size)
            rotary = qkv[:, : heads + shared]
            turned = rotary
            if layer.qk_norm is not None:
                turned = functional.rms_norm(rotary, (size,), None, config.rms_norm_eps).mul_(layer.qk_norm)
            rotary.copy_(torch.addcmul(turned * cosines, turned.roll(size // 2, -1), sines))
            pool.index_copy_(0, slots, qkv[:, heads:])
            values += _product(attention(qkv, pool), layer.output, layer.output_bias)
            normed = functional.rms_norm(values, (config.hidden_size,), layer.mlp_norm, config.rms_norm_eps)
            gate, up = _product(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            values += _product(functional.silu(gate).mul_(up), layer.down, layer.down_bias)
        return values

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of some rows of `hidden`."""
        config = self.weights.config
        normed = functional.rms_norm(hidden, (config.hidden_size,), self.weights.norm, config.rms_norm_eps)
        return torch.mm(normed, self.weights.head)


def _product(values: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(values, matrix) if bias is None else torch.addmm(bias, values, matrix)


def _transposed(*weights: Tensor) -> Tensor:
    return torch.cat([weight.detach().float().t() for weight in weights], dim=1).contiguous()


def _joined(*biases: Tensor | None) -> Tensor | None:
    present = [bias.detach().float() for bias in biases if bias is not None]
    return torch.cat(present) if present else None


def _layer(layer: Layer, config: DecoderConfig) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    qk_norm = None
    if config.qk_norm:
        queries = attention.q_norm.weight.detach().float().expand(config.num_attention_heads, -1)
        keys = attention.k_norm.weight.detach().float().expand(config.num_key_value_heads, -1)
        qk_norm = torch.cat((queries, keys))
    return LayerWeights(
        norm=layer.input_layernorm.weight.detach().float().clone(),
        qkv=_transposed(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
        qkv_bias=_joined(attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias),
        qk_norm=qk_norm,
        output=_transposed(attention.o_proj.weight),
        output_bias=_joined(attention.o_proj.bias),
        mlp_norm=layer.post_attention_layernorm.weight.detach().float().clone(),
        gate_up=_transposed(mlp.gate_proj.weight, mlp.up_proj.weight),
        gate_up_bias=_joined(mlp.gate_proj.bias, mlp.up_proj.bias),
        down=_transposed(mlp.down_proj.weight),
        down_bias=_joined(mlp.down_proj.bias),
    )
