"""The model runner: the incremental forward pass over one ragged batch of tokens, and the draw from its logits.

The weights are a copy of a decoder's, laid out for few calls per step: queries, keys and values in one matrix, gate and
up in one matrix, all transposed for row-major products. One step flattens every sequence's tokens into one batch, so
that the matrix products see them together; only attention looks at sequences.

What a token attends to is computed in two parts that are combined afterwards: what it shares (the prefix of its group,
the past of its span) and what is its own. A shared part is fetched once and attended by all its queries in one product,
and no part needs a mask over a whole context.

A token is drawn as the maximum of `probability / noise` with exponential noise, one draw per id from the turn's own
generator. That is an exact sample of the distribution, and unlike a walk along cumulated probabilities it changes only if
two candidates are within rounding of each other: the same seed gives the same tokens whatever else is in the batch.

Invariants: a token's output depends on its own sequence only, and equals `Decoder.forward` up to float32 rounding. The
logprob is that of the very distribution that was drawn from, after temperature and truncation. A greedy turn takes the
most likely id; its logprobs are those at temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from towline.engines.embedded.batch import DecodeGroup, PrefillSpan, StepBatch
from towline.engines.embedded.config import DecoderConfig
from towline.engines.embedded.model import Decoder, DecoderLayer, rope_angles, rope_frequencies
from towline.engines.embedded.turn import EngineTurn

Attended = tuple[Tensor, Tensor]
"""Outputs, and the log-sum-exp they were normalised by."""


class PooledAttention:
    """Sizes of one model, and a buffer that is reused in every step: fresh pages cost more than filling them."""

    def __init__(self, heads: int, shared: int, size: int):
        """`heads` query heads, `shared` key and value heads, of `size` dimensions."""
        self.heads, self.shared, self.group, self.size = heads, shared, heads // shared, size
        self._fetched = torch.empty((0, 2 * shared, size))

    def prepare(self, batch: StepBatch) -> BatchAttention:
        return BatchAttention(self, batch)

    def fetch(self, pool: Tensor, slots: Tensor) -> Tensor:
        """Keys and values of `slots`; valid until the next fetch."""
        count = len(slots)
        if count > len(self._fetched):
            self._fetched = torch.empty((2 * count, 2 * self.shared, self.size))
        return torch.index_select(pool, 0, slots, out=self._fetched[:count])


class BatchAttention:
    """Attention of one batch; what does not depend on the layer is prepared once."""

    def __init__(self, sizes: PooledAttention, batch: StepBatch):
        self._sizes = sizes
        self._groups = [_PreparedGroup(group) for group in batch.groups]
        self._spans = [(span, torch.from_numpy(span.past)) for span in batch.spans]

    def __call__(self, qkv: Tensor, pool: Tensor) -> Tensor:
        """The output of every token, heads concatenated. `qkv` holds query, key and value heads of each token."""
        sizes = self._sizes
        count = qkv.shape[0]
        queries = qkv[:, : sizes.heads].view(count, sizes.shared, sizes.group, sizes.size)
        outputs = torch.empty((count, sizes.shared, sizes.group, sizes.size))
        for group in self._groups:
            outputs[group.start : group.stop] = self._group(group, queries[group.start : group.stop], pool)
        for span, past in self._spans:
            own = qkv[span.start : span.stop, sizes.heads :]
            outputs[span.start : span.stop] = self._span(span, past, queries[span.start : span.stop], own, pool)
        return outputs.view(count, sizes.heads * sizes.size)

    def _group(self, group: _PreparedGroup, queries: Tensor, pool: Tensor) -> Tensor:
        sizes = self._sizes
        prefix = None
        if len(group.prefix):
            prefix = self._unmasked(queries, sizes.fetch(pool, group.prefix))
        seen = sizes.fetch(pool, group.contexts).view(len(queries), -1, 2 * sizes.shared, sizes.size)
        keys, values = seen.transpose(1, 2).chunk(2, dim=1)
        # The query heads that share a key head take the place of several queries of one head.
        own = _attend(queries, keys, values, mask=group.mask)
        return own[0] if prefix is None else _combine(prefix, own)

    def _span(self, span: PrefillSpan, past: Tensor, queries: Tensor, own: Tensor, pool: Tensor) -> Tensor:
        sizes = self._sizes
        keys, values = own.transpose(0, 1).unsqueeze(1).expand(-1, sizes.group, -1, -1).chunk(2, dim=0)
        outputs, sums = _attend(queries.permute(1, 2, 0, 3), keys, values, causal=True)
        attended = outputs.permute(2, 0, 1, 3), sums.permute(2, 0, 1)
        if not len(past):
            return attended[0]
        return _combine(self._unmasked(queries, sizes.fetch(pool, past)), attended)

    def _unmasked(self, queries: Tensor, seen: Tensor) -> Attended:
        """Every query over all of `seen`: the tokens take the place of several queries of one head."""
        sizes = self._sizes
        count = len(queries)
        keys, values = seen.transpose(0, 1).unsqueeze(0).chunk(2, dim=1)
        flattened = queries.transpose(0, 1).reshape(1, sizes.shared, count * sizes.group, sizes.size)
        outputs, sums = _attend(flattened, keys, values)
        shape = (sizes.shared, count, sizes.group)
        return outputs.view(*shape, sizes.size).transpose(0, 1), sums.view(shape).transpose(0, 1)


class _PreparedGroup:
    def __init__(self, group: DecodeGroup):
        self.start, self.stop = group.start, group.stop
        self.prefix = torch.from_numpy(group.prefix)
        self.contexts = torch.from_numpy(group.contexts).reshape(-1)
        self.mask: Tensor | None = None
        width = group.contexts.shape[1]
        if group.lengths.min() < width:
            unseen = torch.arange(width) >= torch.from_numpy(group.lengths).unsqueeze(1)
            self.mask = torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf)[:, None, None, :]


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Attended:
    # The public function does not return the sums, and without them parts cannot be combined.
    outputs, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, causal, attn_mask=mask
    )
    return outputs, sums


def _combine(first: Attended, second: Attended) -> Tensor:
    """Attention over two disjoint parts, from attention over each."""
    share = torch.sigmoid(first[1] - second[1]).unsqueeze(-1)
    return torch.lerp(second[0], first[0], share)


@dataclass(slots=True)
class LayerWeights:
    """One layer; matrices are input x output."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """Query heads then key heads, one row each."""
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(slots=True)
class RunnerWeights:
    """A decoder's weights as the runner uses them, independent of the decoder they were copied from."""

    config: DecoderConfig
    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor

    @classmethod
    def of(cls, decoder: Decoder) -> RunnerWeights:
        with torch.no_grad():
            embedding = decoder.model.embed_tokens.weight.detach().float().clone()
            tied = decoder.config.tie_word_embeddings
            return cls(
                config=decoder.config,
                embedding=embedding,
                layers=[
                    _layer(layer, decoder.config) for layer in decoder.model.layers if isinstance(layer, DecoderLayer)
                ],
                norm=decoder.model.norm.weight.detach().float().clone(),
                head=embedding.t() if tied else _transposed(decoder.head),
            )


class ModelRunner:
    """Computes batches over a pool of `slots` numbered from 1."""

    def __init__(self, weights: RunnerWeights, slots: int, context: int):
        self.weights = weights
        config = weights.config
        self._heads, self._shared, self._size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        # A row may be padded with slots that are not written yet. They are masked, but masked values are still multiplied
        # by zero, so every slot must hold finite numbers from the start.
        shape = (config.num_hidden_layers, slots + 1, 2 * self._shared, self._size)
        self._pool = torch.zeros(shape, dtype=torch.float32)
        self._attention = PooledAttention(self._heads, self._shared, self._size)
        cosines, sines = rope_angles(rope_frequencies(config), torch.arange(context))
        # Rolling a head by half swaps its halves; the sign that a rotation needs is part of the sines.
        half = self._size // 2
        self._cosines = cosines.unsqueeze(1)
        self._sines = torch.cat((-sines[:, :half], sines[:, half:]), dim=-1).unsqueeze(1)

    def hidden(self, batch: StepBatch) -> Tensor:
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


def _layer(layer: DecoderLayer, config: DecoderConfig) -> LayerWeights:
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


class Sampler:
    """Draws for up to `batch` turns at once."""

    def __init__(self, batch: int, vocabulary: int):
        # Single-precision noise reaches zero too often, which would make an impossible id win.
        self._noise = np.ones((batch, vocabulary), dtype=np.float64)
        self._noise_tensor = torch.from_numpy(self._noise)

    def draw(self, logits: Tensor, turns: Sequence[EngineTurn]) -> tuple[list[int], list[float]]:
        """One id and its logprob per turn, one row of `logits` each."""
        for row, turn in zip(self._noise, turns, strict=False):
            if turn.random is None:
                row.fill(1.0)
            else:
                turn.random.standard_exponential(out=row)
        logprobs = distribution(logits, turns)
        chosen = logprobs.double().exp_().div_(self._noise_tensor[: len(turns)]).argmax(-1, keepdim=True)
        return chosen[:, 0].tolist(), logprobs.gather(1, chosen)[:, 0].tolist()


def score(logits: Tensor, ids: Tensor, turn: EngineTurn) -> list[float]:
    """The logprob of each of `ids`, one row of `logits` each, as if `turn` had drawn it."""
    logprobs = distribution(logits, [turn] * len(ids))
    scores: list[float] = logprobs.gather(1, ids.unsqueeze(1))[:, 0].tolist()
    return scores


def distribution(logits: Tensor, turns: Sequence[EngineTurn]) -> Tensor:
    """The log-probabilities that each turn draws from."""
    temperatures = [turn.temperature or 1.0 for turn in turns]
    if any(temperature != 1.0 for temperature in temperatures):
        # With the largest logit at 0, small temperatures do not overflow.
        logits = (logits - logits.amax(-1, keepdim=True)) / torch.tensor(temperatures).unsqueeze(1)
    cut = [row for row, turn in enumerate(turns) if turn.top_k > 0 or turn.top_p < 1.0]
    if cut:
        logits = logits.clone()
        logits[cut] = _truncated(logits[cut], [turns[row] for row in cut])
    return logits.log_softmax(-1)


def _truncated(logits: Tensor, turns: Sequence[EngineTurn]) -> Tensor:
    """Keep the `top_k` most likely ids, and of those the fewest that reach `top_p`."""
    vocabulary = logits.shape[-1]
    limits = torch.tensor([turn.top_k or vocabulary for turn in turns]).unsqueeze(1)
    shares = torch.tensor([turn.top_p for turn in turns]).unsqueeze(1)
    ranked, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranked = ranked.masked_fill(torch.arange(vocabulary) >= limits, -math.inf)
    probabilities = ranked.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    outside = before >= shares
    # The most likely id always stays; and rounding of the sum must not cut anything when the share is 1.
    outside[:, 0] = False
    outside &= shares < 1.0
    return torch.full_like(logits, -math.inf).scatter(1, order, ranked.masked_fill(outside, -math.inf))
