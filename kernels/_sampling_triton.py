"""What a token is chosen by, for all ops that sample: rows, penalties, noise, order of values.

(value, id) pairs are ordered as one int64: highest value first, then lowest id.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import triton
import triton.language as tl

from inkling_engine.kernels import table

PRESENCE = tl.constexpr(table.PRESENCE)
FREQUENCY = tl.constexpr(table.FREQUENCY)
REPETITION = tl.constexpr(table.REPETITION)
FLOAT_HEADER = tl.constexpr(table.FLOAT_HEADER)
MIN_TOKENS = tl.constexpr(table.MIN_TOKENS)
SEED_LOW = tl.constexpr(table.SEED_LOW)
SEED_HIGH = tl.constexpr(table.SEED_HIGH)
INT_HEADER = tl.constexpr(table.INT_HEADER)
COUNTED = tl.constexpr(table.PROMPT_SEEN - 1)
LAST_ID = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-(2**63) + 1)  # below any (value, id)


@triton.jit
def ordered(value):
    """int32 that compares as the fp32 `value` does; both zeros are one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ranked(value, index):
    """int64 that is larger for a higher value, then for a lower index."""
    return (ordered(value).to(tl.int64) << 32) | (index ^ LAST_ID).to(tl.int64)


@triton.jit
def index_of(key):
    return (key & LAST_ID).to(tl.int32) ^ LAST_ID


@triton.jit
def value_of(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def logarithm(x):
    """ln of a normal x > 0 to about 1 ulp (Cephes' polynomial, as in the native kernel)."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    n = exponent.to(tl.float32)
    p = tl.fma(m, 7.0376836292e-2, -1.1514610310e-1)
    p = tl.fma(p, m, 1.1676998740e-1)
    p = tl.fma(p, m, -1.2420140846e-1)
    p = tl.fma(p, m, 1.4249322787e-1)
    p = tl.fma(p, m, -1.6668057665e-1)
    p = tl.fma(p, m, 2.0000714765e-1)
    p = tl.fma(p, m, -2.4999993993e-1)
    p = tl.fma(p, m, 3.3333331174e-1)
    square = m * m
    y = tl.fma(n, -2.12194440e-4, p * m * square)
    y = tl.fma(square, -0.5, y)
    return tl.fma(n, 0.693359375, m + y)


@triton.jit
def gumbel(index, position, ints):
    """Noise of token ids at a position under the seed of the table line `ints`."""
    low = tl.load(ints + SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(ints + SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    zero = tl.zeros_like(index)
    word, _, _, _ = tl.philox(low | (high << 32), index, zero + position, zero, zero)
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    rest = 1.0 - u
    safe = tl.where(rest == 1.0, 0.5, rest)
    exponential = tl.where(rest == 1.0, u, tl.div_rn(logarithm(safe) * u, safe - 1.0))
    return -logarithm(exponential)


@triton.jit
def processed(
    logit, index, mask, counts, ints, floats, generated, ahead, drafts, STOP_IDS: tl.constexpr,
    BIAS_IDS: tl.constexpr, BIAS_LANES: tl.constexpr,
):  # fmt: skip
    """Logits after bias, stop mask and penalties; so many `drafts` from `ahead` on are generated."""
    lane = tl.arange(0, BIAS_LANES)
    biases = tl.load(floats + FLOAT_HEADER + lane, mask=lane < BIAS_IDS, other=0.0)
    if tl.max((biases != 0.0).to(tl.int32), axis=0) != 0:
        for i in range(BIAS_IDS):
            bias = tl.load(floats + FLOAT_HEADER + i)
            token = tl.load(ints + INT_HEADER + STOP_IDS + i)
            logit = tl.where((index == token) & (bias != 0.0), logit + bias, logit)
    if generated + drafts < tl.load(ints + MIN_TOKENS):
        for i in range(STOP_IDS):
            token = tl.load(ints + INT_HEADER + i)
            logit = tl.where(index == token, -float("inf"), logit)
    repetition, frequency = tl.load(floats + REPETITION), tl.load(floats + FREQUENCY)
    presence = tl.load(floats + PRESENCE)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        count = tl.load(counts + index, mask=mask, other=0)
        for i in range(drafts):
            count += (index == tl.load(ahead + i)).to(tl.int32)
        repeated = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
        logit = tl.where(count != 0, repeated, logit)
        output = (count & COUNTED).to(tl.float32)
        logit = logit - frequency * output - tl.where(output > 0.0, presence, 0.0)
    return logit


@triton.jit
def row_of(
    s, sample_rows, token_rows, TOKENS: tl.constexpr, ROWS: tl.constexpr, DRAFTS: tl.constexpr
):
    """The row of sample `s`; without drafts it is row `s`, which needs no look."""
    row = s
    if DRAFTS > 0:
        at = tl.minimum(tl.maximum(tl.load(sample_rows + s), 0), TOKENS - 1)
        row = tl.minimum(tl.maximum(tl.load(token_rows + at), 0), ROWS - 1)
    return row


@triton.jit
def offset_of(s, row, sample_rows, starts):
    """How many tokens of its row stand before the one that sample `s` is behind."""
    return tl.load(sample_rows + s) - tl.load(starts + row)


@triton.jit
def keep_raw(raw, index, mask, cell, wanted, maxima, sums, top_keys, TOP: tl.constexpr):
    """Write what is known of a chunk's raw logits: their maximum, the sum of their exponentials and the
    `wanted` highest."""
    finite = tl.min((~mask | (tl.abs(raw) < float("inf"))).to(tl.int32), axis=0)
    maximum = tl.max(raw, axis=0)
    power = tl.where(mask, tl.exp(raw - maximum), 0.0)
    tl.store(maxima + cell, tl.where(finite != 0, maximum, float("nan")))
    tl.store(sums + cell, tl.sum(power, axis=0))
    key = tl.where(mask, ranked(raw, index), NOTHING)
    for place in range(wanted):
        highest = tl.max(key, axis=0)
        tl.store(top_keys + cell * TOP + place, highest)
        key = tl.where(key == highest, NOTHING, key)


@triton.jit
def processed_behind(
    s, row, slot, raw, index, mask, ints, floats, generated, token_counts, tokens, starts,
    sample_rows, VOCAB: tl.constexpr, STOP_IDS: tl.constexpr, BIAS_IDS: tl.constexpr,
    BIAS_LANES: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """A sample's logits after bias, stop mask and penalties; drafts before it count as generated."""
    counts, ahead, drafts = token_counts + slot * VOCAB, tokens, 0
    if DRAFTS > 0:
        ahead = tokens + tl.load(starts + row) + 1
        drafts = tl.minimum(tl.maximum(offset_of(s, row, sample_rows, starts), 0), DRAFTS)
    return processed(
        raw, index, mask, counts, ints, floats, generated, ahead, drafts, STOP_IDS, BIAS_IDS,
        BIAS_LANES,
    )  # fmt: skip
