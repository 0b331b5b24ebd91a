# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""What decode attention does with a token's own q, k, v and r: norms, convolution, state.

No program reads the newest key and value from the pool. The programs of the split that they fall
into compute them and, alone, write them and the conv state: so nobody reads what this launch
writes, and the older keys can be fetched before the product that gives the newest one has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_engine.kernels._conv_triton import LAYER_UNIT, clamp, entry, ring_at
from inkling_engine.kernels._triton import loaded


@triton.jit
def log_scale(length, log_alpha, FLOOR: tl.constexpr):
    """tau at position `length`; 1 without a floor."""
    tau = tl.full((), 1.0, tl.float32)
    if FLOOR > 0:
        tau += log_alpha * tl.log(tl.maximum((length + 1).to(tl.float32) / FLOOR, 1.0))
    return tau


@triton.jit
def own_inputs(
    qkvr, token, head, g, d, c, inside, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, REL: tl.constexpr,
):  # fmt: skip
    """q [G, D], r [G, c], k and v [D] of a token and kv head, all on the way at once."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    line = qkvr + tl.cast(token, tl.int64) * (HEADS * (DIM + REL) + 2 * KV_HEADS * DIM)
    h, mine = (head * GROUP + g)[:, None], (g < GROUP)[:, None]
    q = tl.load(line + h * DIM + d[None, :], mine & (d < DIM)[None, :], other=0.0)
    r_line = line + (HEADS + 2 * KV_HEADS) * DIM
    r = tl.load(r_line + h * REL + c[None, :], mine & (c < REL)[None, :], other=0.0)
    k = tl.load(line + (HEADS + head) * DIM + d, inside, other=0.0)
    v = tl.load(line + (HEADS + KV_HEADS + head) * DIM + d, inside, other=0.0)
    return loaded(q), loaded(r), loaded(k), loaded(v)


@triton.jit
def queries(raw, relative, gain, tau, eps, DIM: tl.constexpr):
    """Normalised queries [G, D] of a kv head, and relative vectors [G, c] f32, both times tau."""
    x = raw.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)
    query = (x * scale[:, None] * gain.to(tl.float32)[None, :] * tau).to(raw.dtype)
    return query, relative.to(tl.float32) * tau


@triton.jit
def window_inputs(old, length, channel, mask, RING: tl.constexpr, WIDTH: tl.constexpr):
    """The last three inputs of `channel` before position `length` in the ring `old`, zeros before
    position 0."""
    z0 = tl.load(old + entry(length, 0, RING) * WIDTH + channel, mask & (length >= 3), other=0.0)
    z1 = tl.load(old + entry(length, 1, RING) * WIDTH + channel, mask & (length >= 2), other=0.0)
    z2 = tl.load(old + entry(length, 2, RING) * WIDTH + channel, mask & (length >= 1), other=0.0)
    return z0, z1, z2


@triton.jit
def taps_of(kv_conv, channel, mask):
    """The four taps of `channel`."""
    w0 = tl.load(kv_conv + channel * 4, mask, other=0.0)
    w1 = tl.load(kv_conv + channel * 4 + 1, mask, other=0.0)
    w2 = tl.load(kv_conv + channel * 4 + 2, mask, other=0.0)
    return w0, w1, w2, tl.load(kv_conv + channel * 4 + 3, mask, other=0.0)


@triton.jit
def convolved(x, z0, z1, z2, w0, w1, w2, w3):
    """The short convolution of one token, summed and rounded as in the prologue."""
    y = x.to(tl.float32)
    y += w3 * y
    y += w0 * z0.to(tl.float32)
    y += w1 * z1.to(tl.float32)
    y += w2 * z2.to(tl.float32)
    return y.to(x.dtype)


@triton.jit
def normalised(k, gain, eps, DIM: tl.constexpr):
    """The newest key [D], normed and rounded."""
    x = k.to(tl.float32)
    return (x * tl.rsqrt(tl.sum(x * x, axis=0) / DIM + eps) * gain.to(tl.float32)).to(k.dtype)


@triton.jit
def first_state(
    newest, query, relative, k, v, nearest, DIM: tl.constexpr, SCALE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """State of the softmax before the older keys: of the newest key alone, or of none.

    `nearest` [c] is the bank at distance 0. Of several parts of a state the first has the key.
    """
    scores = tl.sum(query.to(tl.float32) * k.to(tl.float32)[None, :], axis=1)
    scores += tl.sum(relative * nearest[None, :], axis=1) * DIM
    maximum = tl.where(newest, scores * SCALE, -1e30)
    output = tl.zeros((scores.shape[0], v.shape[0]), tl.float32)
    output += tl.where(newest, v.to(tl.float32), 0.0)[None, :]
    if PARTS > 1:
        first = (tl.arange(0, PARTS) == 0)[:, None]
        maximum = tl.where(first, maximum[None, :], -1e30)
        output = tl.where(first[:, :, None], output[None, :, :], 0.0)
    return maximum, tl.where(maximum > -1e30, 1.0, 0.0), output


@triton.jit
def keep_old(to, length, z0, z1, z2, mask, RING: tl.constexpr, WIDTH: tl.constexpr):
    """Write the three inputs before position `length`, but none before position 0."""
    tl.store(to + entry(length, 0, RING) * WIDTH, z0, mask & (length >= 3))
    tl.store(to + entry(length, 1, RING) * WIDTH, z1, mask & (length >= 2))
    tl.store(to + entry(length, 2, RING) * WIDTH, z2, mask & (length >= 1))


@triton.jit
def keep_inputs(
    length, k0, k1, k2, k3, k_channel, v0, v1, v2, v3, v_channel, mask, conv_pool, layer,
    pool_slots, slot, moved, wanted, destination_slots, destination_offsets, row,
    RING: tl.constexpr, WIDTH: tl.constexpr, DESTINATIONS: tl.constexpr,
):  # fmt: skip
    """Write the newest inputs of k and v to the row's slot, the old ones too if it has `moved` there
    from another, and the windows of its snapshots, before the token or behind it."""
    if wanted:
        for j in range(DESTINATIONS):
            to = tl.load(destination_slots + row * DESTINATIONS + j)
            if to != 0:
                behind = tl.load(destination_offsets + row * DESTINATIONS + j) > 0
                end = length + behind.to(tl.int32)
                copy = ring_at(conv_pool, layer, pool_slots, to, RING, WIDTH)
                a, b = tl.where(behind, k1, k0), tl.where(behind, k2, k1)
                c = tl.where(behind, k3, k2)
                keep_old(copy + k_channel, end, a, b, c, mask, RING, WIDTH)
                a, b = tl.where(behind, v1, v0), tl.where(behind, v2, v1)
                c = tl.where(behind, v3, v2)
                keep_old(copy + v_channel, end, a, b, c, mask, RING, WIDTH)
    ring = ring_at(conv_pool, layer, pool_slots, slot, RING, WIDTH)
    tl.debug_barrier()  # every thread has read the old inputs, which may be the same slot's
    if moved:
        keep_old(ring + k_channel, length, k0, k1, k2, mask, RING, WIDTH)
        keep_old(ring + v_channel, length, v0, v1, v2, mask, RING, WIDTH)
        tl.debug_barrier()  # in a ring of three the newest takes the oldest one's entry
    newest = ring + entry(length, 3, RING) * WIDTH
    tl.store(newest + k_channel, k3, mask)
    tl.store(newest + v_channel, v3, mask)


@triton.jit
def keep_key_value(
    k, v, d, mask, kv_pool, location, layer, pages, head, KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write the newest key and value to their place in the pool."""
    page = tl.cast(layer // LAYER_UNIT, tl.int64) * pages + clamp(location // PAGE, 0, pages - 1)
    line = (page * (2 * KV_HEADS) + head) * PAGE + location % PAGE
    tl.store(kv_pool + line * DIM + d, k, mask)
    tl.store(kv_pool + (line + KV_HEADS * PAGE) * DIM + d, v, mask)
