"""Attention (spec 2.4): one query position at a time over exactly the keys it may see."""

import torch
from torch import Tensor


def attention_extend(
    q: Tensor,
    r: Tensor,
    rel_proj: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    layer: int,
    window: int,
    first: int,
) -> Tensor:
    """Attention output [T, Nq * D]; see the package docstring."""
    output = torch.zeros_like(q)
    bounds = starts.tolist()
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        for token in range(bounds[row], bounds[row + 1]):
            position = length + token - bounds[row]
            low = max(first, position - window + 1) if window else first
            seen = torch.arange(low, position + 1)
            keys, values = _gather(kv_pool[layer], page_table[slot], seen)
            output[token] = _attend(q[token], r[token], rel_proj, keys, values, position - seen)
    return output.flatten(1)


def _gather(pool: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """k and v [n, kv_heads, D] in fp32 at `positions` of the request with page line `table`."""
    page_size = pool.shape[3]
    pages = table[(positions // page_size) % len(table)].long()
    kv = pool[pages, :, :, positions % page_size].float()
    return kv[:, 0], kv[:, 1]


def _attend(
    q: Tensor, r: Tensor, rel_proj: Tensor, keys: Tensor, values: Tensor, distances: Tensor
) -> Tensor:
    """One token's output [Nq, D] over its visible keys."""
    heads, dim = q.shape
    group = heads // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("hd,shd->hs", q.float(), keys) / dim
    near = distances < rel_proj.shape[1]
    scores[:, near] += r @ rel_proj.float()[:, distances[near]]
    return torch.einsum("hs,shd->hd", scores.softmax(-1), values).to(q.dtype)
