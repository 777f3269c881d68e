"""Attention of one batch over the pool of keys and values.

What a token sees is taken in two parts that are weighed together afterwards: what it shares (the prefix of its group, the
past of its span) and what is its own. A shared part is fetched once and attended by all its queries in one product, and no
part needs a mask over a whole context.

Invariant: the result for a token is that of attention over all slots it sees at once, up to float32 rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from towline.engines.embedded.batch import Batch, Group, Span

Attended = tuple[Tensor, Tensor]
"""Outputs, and the logarithm of the sum of the exponentials they were normalised by."""


class Attention:
    """Sizes of one model, and memory that is used again in every step: fresh pages cost more than filling them."""

    def __init__(self, heads: int, shared: int, size: int):
        """`heads` query heads, `shared` key and value heads, of `size` dimensions."""
        self.heads, self.shared, self.group, self.size = heads, shared, heads // shared, size
        self._fetched = torch.empty((0, 2 * shared, size))

    def prepare(self, batch: Batch) -> BatchAttention:
        return BatchAttention(self, batch)

    def fetch(self, pool: Tensor, slots: Tensor) -> Tensor:
        """Keys and values of `slots`; they hold until the next fetch."""
        count = len(slots)
        if count > len(self._fetched):
            self._fetched = torch.empty((2 * count, 2 * self.shared, self.size))
        return torch.index_select(pool, 0, slots, out=self._fetched[:count])


class BatchAttention:
    """What does not depend on the layer is prepared once."""

    def __init__(self, sizes: Attention, batch: Batch):
        self._sizes = sizes
        self._groups = [_PreparedGroup(group) for group in batch.groups]
        self._spans = [(span, torch.from_numpy(span.past)) for span in batch.spans]

    def __call__(self, qkv: Tensor, pool: Tensor) -> Tensor:
        """The output of every token, heads side by side. `qkv` holds query, key and value heads of each token."""
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
        # The query heads that share a key head stand where several queries of one head would.
        own = _attend(queries, keys, values, mask=group.mask)
        return own[0] if prefix is None else _together(prefix, own)

    def _span(self, span: Span, past: Tensor, queries: Tensor, own: Tensor, pool: Tensor) -> Tensor:
        sizes = self._sizes
        keys, values = own.transpose(0, 1).unsqueeze(1).expand(-1, sizes.group, -1, -1).chunk(2, dim=0)
        outputs, sums = _attend(queries.permute(1, 2, 0, 3), keys, values, causal=True)
        attended = outputs.permute(2, 0, 1, 3), sums.permute(2, 0, 1)
        if not len(past):
            return attended[0]
        return _together(self._unmasked(queries, sizes.fetch(pool, past)), attended)

    def _unmasked(self, queries: Tensor, seen: Tensor) -> Attended:
        """Every query over all of `seen`: the tokens stand where several queries of one head would."""
        sizes = self._sizes
        count = len(queries)
        keys, values = seen.transpose(0, 1).unsqueeze(0).chunk(2, dim=1)
        side_by_side = queries.transpose(0, 1).reshape(1, sizes.shared, count * sizes.group, sizes.size)
        outputs, sums = _attend(side_by_side, keys, values)
        shape = (sizes.shared, count, sizes.group)
        return outputs.view(*shape, sizes.size).transpose(0, 1), sums.view(shape).transpose(0, 1)


class _PreparedGroup:
    def __init__(self, group: Group):
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
    # The public function keeps the sums to itself, and without them parts cannot be put together.
    outputs, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, causal, attn_mask=mask
    )
    return outputs, sums


def _together(first: Attended, second: Attended) -> Tensor:
    """Attention over two disjoint parts, from attention over each."""
    share = torch.sigmoid(first[1] - second[1]).unsqueeze(-1)
    return torch.lerp(second[0], first[0], share)
