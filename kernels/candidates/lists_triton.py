"""A rank's list of candidates, and the draw from the lists of all ranks (see `triton_kernel.py`)."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import triton
import triton.language as tl

from inkling_engine.kernels import _candidates
from inkling_engine.kernels._sampling_triton import NOTHING, gumbel, index_of, ranked, value_of
from inkling_engine.kernels.sample.triton_kernel import (
    MIN_P,
    TOP_K,
    TOP_P,
    highest_of,
    threshold,
    unsigned,
)

CLOSE, EXACT = tl.constexpr(_candidates.CLOSE), tl.constexpr(_candidates.EXACT)
BROKEN = tl.constexpr(2**63 - 1)  # above any (value, id)


@triton.jit
def list_candidates(
    record, raws, logits, scaled, best, first, ids, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, BUDGET: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Write the keys of a sample's candidates to `record`, in no order, and their raw logits to `raws`;
    the last one's key, NOTHING if the `ids` from `first` on are no more. All pointers are the sample's."""
    key, limit = tl.full((), 0, tl.uint32), tl.full((), BUDGET, tl.int32)
    if COLUMNS > BUDGET:
        zero = limit.to(tl.float32) * 0.0
        key, left, _ = threshold(
            scaled, best, limit.to(tl.float64), zero, zero, key, zero.to(tl.float64), False,
            COLUMNS, CHUNKS, CHUNK, BLOCK, UNROLL,
        )  # fmt: skip
        limit = tl.minimum(left, 1.0 * BUDGET).to(tl.int32)
    count, tied = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    least = tl.full((), BROKEN, tl.int64)
    for begin in range(0, COLUMNS, BLOCK):
        if unsigned(highest_of(best, begin, CHUNKS, CHUNK, BLOCK)) >= key:
            column = begin + tl.arange(0, BLOCK)
            there = column < ids
            value = tl.load(scaled + column, mask=there, other=-float("inf"))
            found = unsigned(value)
            tie = (there & (found == key)).to(tl.int32)
            before = tl.cumsum(tie, axis=0) - tie + tied
            keep = there & ((found > key) | ((tie != 0) & (before < limit)))
            place = tl.cumsum(keep.to(tl.int32), axis=0) - 1 + count
            keep = keep & (place < BUDGET)
            keys = ranked(value, first + column)
            tl.store(record + place, keys, mask=keep)
            tl.store(raws + place, tl.load(logits + column, mask=keep, other=0.0), mask=keep)
            least = tl.minimum(least, tl.min(tl.where(keep, keys, BROKEN), axis=0))
            count += tl.sum(keep.to(tl.int32), axis=0)
            tied += tl.sum(tie, axis=0)
    return count, tl.where(ids > BUDGET, least, NOTHING)


@triton.jit
def draw_candidate(keys, last, whole, position, ints, floats, COUNT: tl.constexpr):
    """(key, sure): the best of the candidates `keys` [COUNT] of all ranks as (noisy value, id), NOTHING
    if there is none. `last` is the key behind which some may have been left out, `whole` all mass."""
    top_k, top_p, min_p = tl.load(ints + TOP_K), tl.load(floats + TOP_P), tl.load(floats + MIN_P)
    keys = tl.sort(keys, descending=True)
    place = tl.arange(0, COUNT)
    there = (keys >= last) & (keys != NOTHING)
    count = tl.sum(there.to(tl.int32), axis=0)
    value = tl.where(there, value_of(keys), -float("inf"))
    highest = tl.max(value, axis=0)
    weight = tl.where(there, tl.exp(value - highest), 0.0)
    lowest = tl.min(tl.where(there, weight, 2.0), axis=0)
    endless = tl.min(tl.where(there, value, float("inf")), axis=0) == -float("inf")
    closed = (last == NOTHING) | (lowest < min_p * (1.0 - CLOSE)) | endless
    limit = tl.where(top_k > 0, top_k, COUNT)
    closed = closed | ((top_k > 0) & (top_k <= count))
    keep = there & (weight >= min_p) & (value > -float("inf")) & (place < limit)
    sure = closed & (tl.abs(highest) < float("inf"))
    if top_p < 1.0:
        share = tl.where(keep, weight, 0.0).to(tl.float64)
        listed = tl.sum(share, axis=0)
        mass = tl.where(closed, listed, whole)
        error = tl.where(closed, EXACT, CLOSE) * mass
        goal = top_p.to(tl.float64) * mass
        before = tl.cumsum(share, axis=0) - share
        near = keep & (place > 0) & (tl.abs(before - goal) <= error)
        reached = (min_p == 0.0) & (top_k <= 0) & (listed > goal + error)
        sure = sure | (reached & (tl.abs(highest) < float("inf")))
        sure = sure & (tl.max(near.to(tl.int32), axis=0) == 0)
        keep = keep & ((before < goal) | (place == 0))
    index = index_of(keys)
    noisy = ranked(value + gumbel(index, position, ints), index)
    return tl.max(tl.where(keep, noisy, NOTHING), axis=0), sure
