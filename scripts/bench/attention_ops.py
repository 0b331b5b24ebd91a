"""Cases of attention: decode over contexts, extend of chunks that end at one, peers beside them.

Ours of a decode step begins with the raw product; a peer gets what the prologue makes of it.
FlexAttention gets the same keys and the same bias: a table of r @ rel_proj, gathered by distance
in its score function. It is timed with the table's product and without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from bench.peer import Peer
from bench.setting import Setting
from bench.timing import Call, copies_for
from bench.work import Case, Target, Work, assert_near, kind_of
from torch import Tensor

from inkling_engine.artifacts.spec import LayerKind, ModelShape
from inkling_engine.kernels.attention_decode import attention_decode
from inkling_engine.kernels.attention_extend import attention_extend
from inkling_engine.kernels.attention_prologue import attention_prologue
from inkling_engine.kernels.attention_verify import attention_verify

CONTEXTS = (1024, 8192, 65536)
EXTEND_END = 8192
VERIFIED = 9  # tokens a row: the last one and eight drafts
LONG = 65536
SAMPLED = 8  # tokens that are compared with the reference
PEER_TOLERANCE = 3e-2  # peers round the bias to bf16
TOLERANCE = defaultdict(lambda: PEER_TOLERANCE, ours=5e-3)


def cases(target: Target, rows: int) -> Iterator[Case]:
    """Decode: full layers over each context, window layers over one. Extend: chunks ending at 8k."""
    if kind_of(rows) == "extend":
        for layer in ("full", "window"):
            make = partial(extend_work, target, rows, layer)
            yield Case("attention_extend", layer, rows, EXTEND_END, make)
        return
    for layer, context in (*(("full", context) for context in CONTEXTS), ("window", EXTEND_END)):
        make = partial(decode_work, target, target.shape, rows, layer, context)
        yield Case("attention_decode", layer, rows, context, make)
    for layer in ("full", "window"):
        make = partial(verify_work, target, rows, layer)
        yield Case("attention_verify", layer, rows, EXTEND_END, make)
    if rows == 1:
        make = partial(decode_work, target, target.whole, 1, "full", LONG)
        name = f"full, {target.whole.full.kv_heads} kv heads"
        yield Case("attention_decode", name, 1, LONG, make)


def kind_named(shape: ModelShape, layer: str) -> LayerKind:
    """Geometry of `full` or `window` layers."""
    return shape.full if layer == "full" else shape.local


def call_arguments(
    target: Target, setting: Setting, layer: str, kind: LayerKind, *bounds: int
) -> list[tuple[Any, ...]]:
    """Arguments of attention for each layer of the pool; `bounds` are the op's last ones."""
    meta, rel = setting.meta, setting.shape.rel_dim
    return [
        (
            target.normal(setting.tokens, kind.heads, kind.head_dim, scale=3),
            target.normal(setting.tokens, kind.heads, rel, dtype=torch.float32),
            target.normal(rel, kind.extent, scale=0.5),
            setting.pools[f"kv_{layer}"],
            setting.pools[f"{layer}_table"],
            *(meta.slots, meta.starts, meta.lengths, number, kind.window, *bounds),
        )
        for number in range(setting.layers)
    ]


def prologue_arguments(target: Target, setting: Setting, layer: str) -> tuple[Any, ...]:
    """What the prologue and a decode step's attention begin with."""
    shape, meta, kind = setting.shape, setting.meta, kind_named(setting.shape, layer)
    width = 2 * kind.kv_heads * kind.head_dim
    return (
        target.normal(setting.tokens, width + kind.heads * (kind.head_dim + shape.rel_dim)),
        target.normal(width, 4, scale=0.5, dtype=torch.float32),
        target.near_one(kind.head_dim),
        target.near_one(kind.head_dim),
        setting.pools[f"kv_{layer}"],
        setting.pools[f"conv_kv_{layer}"],
        meta.positions,
        meta.token_rows,
        meta.window_locations if layer == "window" else meta.full_locations,
        *setting.row_state,
    )


def decode_arguments(
    target: Target, setting: Setting, layer: str, number: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of a decode step's attention, and of extend attention for the same token."""
    shape, meta, kind = setting.shape, setting.meta, kind_named(setting.shape, layer)
    scaling = (0 if layer == "window" else shape.log_floor, shape.log_alpha, shape.eps)
    begin = prologue_arguments(target, setting, layer)
    bank = target.normal(shape.rel_dim, kind.extent, scale=0.5)
    table, rows = setting.pools[f"{layer}_table"], (meta.slots, meta.starts, meta.lengths)
    q, r = attention_prologue(*begin, number, kind.heads, *scaling)
    whole = (*begin, bank, table, number, kind.heads, kind.window, *scaling)
    return whole, (q, r, bank, setting.pools[f"kv_{layer}"], table, *rows, number, kind.window, 0)


def decode_work(target: Target, shape: ModelShape, rows: int, layer: str, context: int) -> Work:
    """One token a row after `context` tokens (the last of them its own)."""
    kind = kind_named(shape, layer)
    seen = min(context, kind.window or context)
    moved = rows * (4.0 * seen * kind.kv_heads + 4 * kind.heads) * kind.head_dim
    layers = copies_for(moved)
    setting = Setting(shape, "decode", rows, rows, context - 1, layers, target.device)
    made = [decode_arguments(target, setting, layer, number) for number in range(layers)]
    calls = [inner for _, inner in made]
    sides: dict[str, list[Call]] = {
        "ours": [partial(attention_decode, *whole) for whole, _ in made]
    }
    if target.peer is not None:
        sides["peer"] = list(peer_calls(target.peer, calls))

    def check() -> None:
        for name, side in sides.items():  # ours writes the newest key, so it comes first
            found = side[0]().flatten(1)
            places, wanted = reference(calls[0], target.device)
            assert_near(found[places], wanted, name, tolerance=TOLERANCE[name])

    return Work(moved, 4.0 * rows * seen * kind.heads * kind.head_dim, sides, check)


def verify_work(target: Target, rows: int, layer: str) -> Work:
    """VERIFIED tokens a row, the last of them after EXTEND_END."""
    kind = kind_named(target.shape, layer)
    seen = min(EXTEND_END, kind.window + VERIFIED - 1 if kind.window else EXTEND_END)
    pairs = rows * VERIFIED * min(EXTEND_END, kind.window or EXTEND_END)
    moved = rows * (4.0 * seen * kind.kv_heads + 4 * VERIFIED * kind.heads) * kind.head_dim
    tokens, before, layers = rows * VERIFIED, EXTEND_END - VERIFIED, copies_for(moved)
    setting = Setting(target.shape, "extend", rows, tokens, before, layers, target.device)
    calls = call_arguments(target, setting, layer, kind, 0, VERIFIED)
    side = [partial(attention_verify, *call) for call in calls]

    def check() -> None:
        places, wanted = reference(calls[0], target.device)
        assert_near(side[0]()[places], wanted, "ours", tolerance=TOLERANCE["ours"])

    return Work(moved, 4.0 * pairs * kind.heads * kind.head_dim, {"ours": side}, check)


def reference(call: tuple[Any, ...], device: str) -> tuple[Tensor, Tensor]:
    """(tokens, the reference's output for them): tokens are spread over the step.

    A token is a row of its own here: its keys are in the pool already.
    """
    q, r, rel_proj, pool, table, slots, starts, lengths, layer, window, *_ = call
    tokens = torch.linspace(0, len(q) - 1, min(SAMPLED, len(q)), device=device).long()
    rows = torch.searchsorted(starts, tokens.int(), right=True) - 1
    positions = lengths[rows] + (tokens - starts[rows]).int()
    ones = torch.arange(len(tokens) + 1, dtype=torch.int32, device=device)
    arguments = (q[tokens], r[tokens], rel_proj, pool, table, slots[rows], ones, positions)
    with torch.device(device):
        return tokens, attention_extend.reference(*arguments, layer, window, 0)


def peer_calls(peer: Peer, calls: list[tuple[Any, ...]]) -> Iterator[Call]:
    """The peer on the same keys, token by token; what it prepares once a step is prepared here."""
    for q, r, rel_proj, pool, table, slots, _, lengths, layer, window, *_ in calls:
        keys, values = (pool[layer][:, i].transpose(1, 2).flatten(0, 1) for i in (0, 1))
        page = pool.shape[4]
        lines = []
        for slot, last in zip(slots.tolist(), lengths.tolist(), strict=True):
            first = max(0, last + 1 - window) if window else 0
            seen = torch.arange(first, last + 1, device=q.device)
            pages = table[slot][seen // page % table.shape[1]].long()
            lines.append(pages * page + seen % page)
        bounds = torch.tensor([0, *map(len, lines)], device=q.device).cumsum(0).int()
        heads, dim = q.shape[1:]
        state = peer.prepare_decode(bounds, torch.cat(lines), heads, keys.shape[1], dim)
        yield partial(peer.decode_attention, q, r.to(q.dtype), rel_proj, keys, values, state)


def extend_work(target: Target, tokens: int, layer: str) -> Work:
    """A chunk of one row that ends at EXTEND_END tokens."""
    kind = kind_named(target.shape, layer)
    end = max(EXTEND_END, tokens)
    positions = range(end - tokens, end)
    visible = sum(min(position + 1, kind.window or end) for position in positions)
    span = min(end, tokens + kind.window) if kind.window else end
    moved = 4.0 * kind.head_dim * (tokens * kind.heads + span * kind.kv_heads)
    setting = Setting(target.shape, "extend", 1, tokens, end - tokens, 2, target.device)
    calls = call_arguments(target, setting, layer, kind, 0)
    sides: dict[str, list[Call]] = {"ours": [partial(attention_extend, *call) for call in calls]}
    if not target.own_only:
        sides |= flex_sides(calls, end)

    def check() -> None:
        places, wanted = reference(calls[0], target.device)
        for name, side in sides.items():
            assert_near(side[0]()[places], wanted, name, tolerance=TOLERANCE[name])

    return Work(moved, 4.0 * visible * kind.heads * kind.head_dim, sides, check)


def flex_sides(calls: list[tuple[Any, ...]], end: int) -> dict[str, list[Call]]:
    """FlexAttention over the same keys, with the bias table given and with its product."""
    given: list[Call] = []
    whole: list[Call] = []
    for q, r, rel_proj, pool, table, slots, _, _, layer, window, *_ in calls:
        page = pool.shape[4]
        seen = torch.arange(end, device=q.device)
        pages = table[int(slots[0])][seen // page % table.shape[1]].long()
        kv = pool[layer][pages, :, :, seen % page].permute(1, 2, 0, 3).contiguous()
        flex = FlexAttention(len(q), end, window, rel_proj.shape[1])
        r = r.to(q.dtype)
        given.append(partial(flex, q, kv, torch.einsum("thc,ce->the", r, rel_proj)))
        whole.append(partial(flex.from_r, q, kv, r, rel_proj))
    return {"flex, table given": given, "flex": whole}


class FlexAttention:
    """FlexAttention for `tokens` queries at the end of `end` keys; window 0 is causal alone."""

    def __init__(self, tokens: int, end: int, window: int, extent: int) -> None:
        """Compile it for this shape."""
        from torch.nn.attention.flex_attention import create_block_mask

        self.first, self.extent = end - tokens, extent

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = i + (end - tokens) - j
            return (distance >= 0) & (distance < window) if window else distance >= 0

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.mask = create_block_mask(visible, None, None, tokens, end, device=device)

    def __call__(self, q: Tensor, kv: Tensor, bias: Tensor) -> Tensor:
        """q [T, h, D], kv [2, kv heads, S, D], bias [T, h, E] -> [T, h * D]."""
        return _flex(q, kv, bias, self.mask, self.first, self.extent)

    def from_r(self, q: Tensor, kv: Tensor, r: Tensor, rel_proj: Tensor) -> Tensor:
        """The same from r [T, h, c] and rel_proj [c, E]."""
        return self(q, kv, torch.einsum("thc,ce->the", r, rel_proj))


def _flex(q: Tensor, kv: Tensor, bias: Tensor, mask: Any, first: int, extent: int) -> Tensor:
    out = _compiled()(q.transpose(0, 1)[None], kv[0][None], kv[1][None], bias, mask, first, extent)
    joined: Tensor = out[0].transpose(0, 1).flatten(1)
    return joined


@lru_cache(maxsize=1)
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    def attend(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Any, first: int, extent: int
    ) -> Any:
        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = i + first - j
            near = bias[i, h, distance.clamp(0, extent - 1)]
            return value + torch.where((distance >= 0) & (distance < extent), near, 0.0)

        scale = 1.0 / q.shape[-1]
        return flex_attention(
            q, k, v, score_mod=score, block_mask=mask, scale=scale, enable_gqa=True
        )

    return torch.compile(attend, dynamic=False)
