# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""How the parts of a row's attention become one: warps of a program, then splits.

Each split leaves its output and raises a flag; the last splits of a row wait for all flags and
merge, in the order of the splits. Scratch is not initialised: a flag is a 64-bit number that
nothing else writes, and whoever merges clears it. Programs start in the order of their numbers,
so whoever waits waits for programs that run already or are the next to start.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_engine.kernels._triton import loaded

RAISED = tl.constexpr(0x6A09E667F3BCC909)  # a flag: the fraction of the square root of 2


@triton.jit
def merge_parts(maximum, total, output, GROUP: tl.constexpr):
    """The softmax of all parts from that of each, [P, M] and [P, M, D]; only GROUP lines count."""
    PARTS: tl.constexpr = output.shape[0]
    HALF: tl.constexpr = output.shape[1] // 2
    if GROUP <= HALF:  # half of the tile is padding
        maximum, _ = tl.split(tl.permute(tl.reshape(maximum, (PARTS, 2, HALF)), (0, 2, 1)))
        total, _ = tl.split(tl.permute(tl.reshape(total, (PARTS, 2, HALF)), (0, 2, 1)))
        output = tl.reshape(output, (PARTS, 2, HALF, output.shape[2]))
        output, _ = tl.split(tl.permute(output, (0, 2, 3, 1)))
    highest = tl.max(maximum, 0)
    weight = tl.exp2(maximum - highest[None, :])
    return highest, tl.sum(total * weight, 0), tl.sum(output * weight[:, :, None], 0)


@triton.jit
def await_flags(flag, s, here):
    """Wait until the flags of the splits `s` that are `here` are raised."""
    missing = tl.full((), 1, tl.int32)
    while missing > 0:
        found = tl.atomic_add(flag + s, 0, here, sem="acquire")
        missing = tl.sum(((found != RAISED) & here).to(tl.int32))


@triton.jit
def merged_lines(partial, stats, line, held, d, DIM: tl.constexpr):
    """Output [LINES, D] f32 of the splits `line` [S, LINES] of each line, where `held`."""
    peak = tl.load(stats + line * 2, held, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(stats + line * 2 + 1, held, other=0.0, cache_modifier=".cg")
    at = partial + (line[:, :, None] * DIM + d[None, None, :])
    known = held[:, :, None] & (d < DIM)[None, None, :]
    part = tl.load(at, known, other=0.0, cache_modifier=".cg")
    peak, total, part = loaded(peak), loaded(total), loaded(part)
    weight = tl.exp2(peak - tl.maximum(tl.max(peak, 0), -1e30)[None, :])
    weight = weight / tl.maximum(tl.sum(weight * total, 0), 1e-30)[None, :]
    return tl.sum(weight[:, :, None] * part, 0)


@triton.jit
def merge_splits(
    partial, stats, flag, out, active, first, mergers,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr,
    PADDED: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Wait for the flags of `active` splits and write each `mergers`-th slice of SLICE heads.

    `partial` [GROUP, SPLITS, DIM] and `stats` [GROUP, SPLITS, 2] are of one row and kv head.
    """
    s = tl.arange(0, PADDED)
    here = s < active
    await_flags(flag, s, here)
    d = tl.arange(0, DIMS)
    for part in range(first, SLICES, mergers):
        h = part * SLICE + tl.arange(0, SLICE)
        held = here[:, None] & (h < GROUP)[None, :]
        line = h[None, :] * SPLITS + s[:, None]
        merged = merged_lines(partial, stats, line, held, d, DIM).to(out.dtype.element_ty)
        to = out + (h[:, None] * DIM + d[None, :])
        tl.store(to, merged, (h < GROUP)[:, None] & (d < DIM)[None, :])
    tl.store(flag + s, 0, here)


@triton.jit
def finish(
    maximum, total, output, out, partial, stats, flags, row, token, head, split, active,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
    SPLITS: tl.constexpr, PADDED: tl.constexpr, MERGERS: tl.constexpr, SLICES: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    """Write the output of a row's only split, or a split's part of it, and merge if it is last."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    g, d = tl.arange(0, maximum.shape[0]), tl.arange(0, DIMS)
    heads = (g < GROUP)[:, None] & (d < DIM)[None, :]
    to = out + (tl.cast(token, tl.int64) * HEADS + head * GROUP) * DIM
    if (SPLITS == 1) | (active == 1):
        result = (output / total[:, None]).to(out.dtype.element_ty)
        tl.store(to + g[:, None] * DIM + d[None, :], result, heads)
    if SPLITS > 1:  # noqa: SIM102  (known when compiled; the other is not)
        if active > 1:
            # Scratch is the row's, not its token's: so no two rows share flags, on garbage either.
            cell = tl.cast(row, tl.int64) * HEADS + head * GROUP
            lane = (cell + g) * SPLITS + split
            tl.store(stats + lane * 2, maximum, g < GROUP)
            tl.store(stats + lane * 2 + 1, total, g < GROUP)
            tl.store(partial + lane[:, None] * DIM + d[None, :], output, heads)
            tl.debug_barrier()
            mergers = tl.minimum(active, MERGERS)
            flag = flags + (tl.cast(row, tl.int64) * KV_HEADS + head) * (MERGERS * SPLITS)
            j = tl.arange(0, MERGERS)
            tl.atomic_xchg(flag + j * SPLITS + split, RAISED, j < mergers, sem="release")
            place = active - 1 - split
            if place < mergers:
                merge_splits(
                    partial + cell * (SPLITS * DIM), stats + cell * (SPLITS * 2),
                    flag + place * SPLITS, to, active, place, mergers, GROUP, DIM, DIMS, SPLITS,
                    PADDED, SLICES, SLICE,
                )  # fmt: skip
