"""A rank's list of candidates, and the draw from the lists of all ranks (see `triton_kernel.py`)."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import triton
import triton.language as tl

from inkling_engine.kernels import _candidates
from inkling_engine.kernels._sampling_triton import NOTHING, gumbel, index_of, ranked, value_of
from inkling_engine.kernels.sample.triton_kernel import MIN_P, TOP_K, TOP_P

CLOSE, EXACT = tl.constexpr(_candidates.CLOSE), tl.constexpr(_candidates.EXACT)
BROKEN = tl.constexpr(2**63 - 1)  # above any (value, id)


@triton.jit
def highest(keys, GOAL: tl.constexpr):
    """Which of the distinct `keys` are the GOAL highest; all but NOTHING if there are no more.

    The key of that rank is found bit by bit, until as many are not below what is known of it.
    """
    nonnegative = tl.sum((keys >= 0).to(tl.int32), axis=0)
    enough = nonnegative >= GOAL
    count = tl.where(enough, nonnegative, tl.sum((keys != NOTHING).to(tl.int32), axis=0))
    key = tl.where(enough, tl.full((), 0, tl.int64), tl.full((), NOTHING, tl.int64))
    step = tl.full((), 2**62, tl.int64)
    while (step > 0) & (count > GOAL):
        reached = tl.sum((keys >= key + step).to(tl.int32), axis=0)
        enough = reached >= GOAL
        key = tl.where(enough, key + step, key)
        count = tl.where(enough, reached, count)
        step = step >> 1
    return (keys >= key) & (keys != NOTHING)


@triton.jit
def list_highest(keys, to, GOAL: tl.constexpr):
    """Write the GOAL highest of the distinct `keys` to `to`, in no order, and NOTHING where there are
    none. Returns the lowest of them."""
    taken = highest(keys, GOAL)
    place = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(to + place, keys, mask=taken)
    spare = tl.arange(0, GOAL)
    tl.store(to + spare, tl.full((GOAL,), NOTHING, tl.int64), mask=spare > tl.max(place, axis=0))
    return tl.min(tl.where(taken, keys, BROKEN), axis=0)


@triton.jit
def list_candidates(
    record, raws, logits, listed, first, ids, LISTED: tl.constexpr, LANES: tl.constexpr,
    BUDGET: tl.constexpr,
):  # fmt: skip
    """Write the keys of a sample's candidates to `record`, in no order, and their raw logits to `raws`.

    They are among the LISTED keys of its chunks. Returns the last one's key, NOTHING if the `ids` from
    `first` on are no more. All pointers are the sample's.
    """
    lane = tl.arange(0, LANES)
    keys = tl.load(listed + lane, mask=lane < LISTED, other=NOTHING)
    least = list_highest(keys, record, BUDGET)
    tl.debug_barrier()  # what other threads wrote is read now
    place = tl.arange(0, BUDGET)
    keys = tl.load(record + place)
    there = keys != NOTHING
    tl.store(raws + place, tl.load(logits + (index_of(keys) - first), mask=there), mask=there)
    return tl.where(ids > BUDGET, least, NOTHING)


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
