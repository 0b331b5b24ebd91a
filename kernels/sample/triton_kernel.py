"""Sampling in two launches, whatever a row asks for; nothing is sorted and nothing is random.

1. `scan`, a program a sample and chunk of the vocabulary: softmax statistics and top candidates of the
   raw logits; the processed logits, with noise where a row samples without filters; their best.
2. `pick`, a program a sample: combines the chunks. A sample with filters looks for the threshold key two
   bits at a time, first by count (top-k), then by probability mass (top-p), summed in fp64; chunks
   whose largest key is below what is known of the threshold are not read. The kept ids then get
   their noise.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._sampling_triton import (
    NOTHING,
    gumbel,
    index_of,
    keep_raw,
    offset_of,
    ordered,
    processed_behind,
    ranked,
    row_of,
    value_of,
)
from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta

CHUNK = 1024  # ids of a program of `scan`
UNROLL = 4  # blocks of two chunks that `pick` reads before it waits for one

TEMPERATURE = tl.constexpr(table.TEMPERATURE)
TOP_P = tl.constexpr(table.TOP_P)
MIN_P = tl.constexpr(table.MIN_P)
TOP_K = tl.constexpr(table.TOP_K)
TOP_LOGPROBS = tl.constexpr(table.TOP_LOGPROBS)
GENERATED = tl.constexpr(table.GENERATED)
STATE_WIDTH = tl.constexpr(table.STATE_WIDTH)


@triton.jit
def is_filtered(ints, floats):
    """Whether the row samples with min-p, top-k or top-p."""
    filters = (tl.load(floats + MIN_P) > 0.0) | (tl.load(ints + TOP_K) > 0)
    filters = filters | (tl.load(floats + TOP_P) < 1.0)
    return filters & (tl.load(floats + TEMPERATURE) != 0.0)


@triton.jit
def scan_chunk(
    chunk, s, row, slot, ints, floats, wanted, generated, temperature, logits, token_counts, tokens,
    starts, lengths, sample_rows, scaled, maxima, sums, best, top_keys, VOCAB: tl.constexpr,
    STOP_IDS: tl.constexpr, BIAS_IDS: tl.constexpr, BIAS_LANES: tl.constexpr, TOP: tl.constexpr,
    DRAFTS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """What `scan_kernel` writes of one chunk of a sample."""
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = index < VOCAB
    line = s.to(tl.int64) * VOCAB + index
    raw = tl.load(logits + line, mask=mask, other=-float("inf"))
    cell = s * CHUNKS + chunk
    keep_raw(raw, index, mask, cell, wanted, maxima, sums, top_keys, TOP)
    value = processed_behind(
        s, row, slot, raw, index, mask, ints, floats, generated, token_counts, tokens, starts,
        sample_rows, VOCAB, STOP_IDS, BIAS_IDS, BIAS_LANES, DRAFTS,
    )  # fmt: skip
    if temperature != 0.0:
        value = tl.div_rn(value, temperature)
        if is_filtered(ints, floats):
            tl.store(scaled + line, value, mask=mask)
        else:
            offset = offset_of(s, row, sample_rows, starts)
            value += gumbel(index, tl.load(lengths + row) + offset + 1, ints)
    tl.store(best + cell, tl.max(tl.where(mask, ranked(value, index), NOTHING), axis=0))


@triton.jit
def scan_kernel(
    logits, token_counts, request_state, request_ints, request_floats, tokens, token_rows, slots,
    starts, lengths, sample_rows, emits, scaled, maxima, sums, best, top_keys, LINES: tl.constexpr,
    VOCAB: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, INTS: tl.constexpr,
    FLOATS: tl.constexpr, STOP_IDS: tl.constexpr, BIAS_IDS: tl.constexpr,
    BIAS_LANES: tl.constexpr, TOP: tl.constexpr, DRAFTS: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """maxima (NaN if a logit is not finite), sums, best keys [S, CHUNKS], top_keys [S, CHUNKS, TOP]

    and, for samples with filters, the processed logits over the temperature, `scaled` [S, VOCAB].
    """
    chunk, s = tl.program_id(0), tl.program_id(1)
    row = row_of(s, sample_rows, token_rows, TOKENS, ROWS, DRAFTS)
    slot = tl.minimum(tl.maximum(tl.load(slots + row), 0), LINES - 1).to(tl.int64)
    ints, floats = request_ints + slot * INTS, request_floats + slot * FLOATS
    emit = tl.load(emits + s)
    wanted = tl.minimum(tl.load(ints + TOP_LOGPROBS), TOP)
    generated = tl.load(request_state + slot * STATE_WIDTH + GENERATED)
    temperature = tl.load(floats + TEMPERATURE)
    follow()  # only the logits come from the launch before
    if emit == 0:
        return
    scan_chunk(
        chunk, s, row, slot, ints, floats, wanted, generated, temperature, logits, token_counts,
        tokens, starts, lengths, sample_rows, scaled, maxima, sums, best, top_keys, VOCAB, STOP_IDS,
        BIAS_IDS, BIAS_LANES, TOP, DRAFTS, CHUNK, CHUNKS,
    )  # fmt: skip


@triton.jit
def unsigned(value):
    """uint32 that compares as the fp32 `value` does."""
    return ordered(value).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def highest_of(best, first, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr):
    """The largest value among SPAN ids from `first` on, from their chunks' best keys."""
    chunk = first // CHUNK + tl.arange(0, SPAN // CHUNK)
    return value_of(tl.max(tl.load(best + chunk, mask=chunk < CHUNKS, other=NOTHING), axis=0))


@triton.jit
def threshold(
    scaled, best, goal, maximum, min_p, floor, floor_share, BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """(key, left, ties): the largest key so that the ids at or above it reach the goal.

    By count, of all ids. By mass, of exp(value - maximum) where that is at least min_p and the key
    above `floor`, plus the share `floor_share` of those at `floor`; the goal is then a fraction of
    the whole. `left` is what those above the key leave of the goal, `ties` the sum of those at it.
    """
    key, highest_shift = tl.full((), 0, tl.uint32), tl.full((), 30, tl.uint32)
    left, ties = goal, goal * 0.0
    for step in range(16):
        shift = highest_shift - 2 * step
        sum0 = tl.zeros((BLOCK,), tl.float64)
        sum1, sum2, sum3 = sum0, sum0, sum0
        for first in range(0, VOCAB, BLOCK * UNROLL):
            if unsigned(highest_of(best, first, CHUNKS, CHUNK, BLOCK * UNROLL)) >= key:
                for part in tl.static_range(UNROLL):
                    index = first + part * BLOCK + tl.arange(0, BLOCK)
                    value = tl.load(scaled + index, mask=index < VOCAB, other=-float("inf"))
                    found = unsigned(value)
                    digit = (found ^ key) >> shift  # > 3 where a higher bit differs
                    if BY_MASS:
                        mass = tl.exp(value - maximum)
                        mass = tl.where((mass >= min_p) & (found >= floor), mass, 0.0)
                        weight = mass.to(tl.float64)
                        weight = tl.where(found == floor, weight * floor_share, weight)
                    else:
                        weight = (index < VOCAB).to(tl.float64)
                    sum0 += tl.where(digit == 0, weight, 0.0)
                    sum1 += tl.where(digit == 1, weight, 0.0)
                    sum2 += tl.where(digit == 2, weight, 0.0)
                    sum3 += tl.where(digit == 3, weight, 0.0)
        s0, s1, s2, s3 = tl.sum(sum0, 0), tl.sum(sum1, 0), tl.sum(sum2, 0), tl.sum(sum3, 0)
        if BY_MASS:
            whole = s0 + s1 + s2 + s3
            left = tl.where(step == 0, tl.maximum(left * whole, 1e-300), left)
        in3, in2, in1 = s3 >= left, s3 + s2 >= left, s3 + s2 + s1 >= left
        found_digit = tl.where(in3, 3, tl.where(in2, 2, tl.where(in1, 1, 0)))
        above = tl.where(in3, 0.0, tl.where(in2, s3, tl.where(in1, s3 + s2, s3 + s2 + s1)))
        ties = tl.where(in3, s3, tl.where(in2, s2, tl.where(in1, s1, s0)))
        left -= above
        key = key | (found_digit.to(tl.uint32) << shift)
    return key, left, ties


@triton.jit
def draw(
    scaled, best, position, ints, floats, maximum, VOCAB: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The token of a row with filters; `scaled` and `best` are the row's."""
    top_k, top_p, min_p = tl.load(ints + TOP_K), tl.load(floats + TOP_P), tl.load(floats + MIN_P)
    key, kept, share = tl.full((), 0, tl.uint32), tl.full((), VOCAB, tl.float64), 1.0
    share = kept * 0.0 + 1.0
    if top_k > 0:
        key, kept, ties = threshold(
            scaled, best, top_k.to(tl.float64), maximum, min_p, key, share, False, VOCAB, CHUNKS,
            CHUNK, BLOCK, UNROLL,
        )  # fmt: skip
        share = tl.minimum(kept / tl.maximum(ties, 1.0), 1.0)
    if top_p < 1.0:
        goal, floor = top_p.to(tl.float64), key
        key, left, ties = threshold(
            scaled, best, goal, maximum, min_p, floor, share, True, VOCAB, CHUNKS, CHUNK, BLOCK,
            UNROLL,
        )  # fmt: skip
        bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        needed = tl.maximum(tl.ceil(left / tl.exp(value - maximum).to(tl.float64)), 1.0)
        kept = tl.where(key == floor, tl.minimum(needed, kept), needed)
    token_key, tied = tl.full((), NOTHING, tl.int64), tl.full((), 0, tl.int32)
    limit = tl.minimum(kept, 1.0 * VOCAB).to(tl.int32)
    for first in range(0, VOCAB, BLOCK):
        if unsigned(highest_of(best, first, CHUNKS, CHUNK, BLOCK)) >= key:
            index = first + tl.arange(0, BLOCK)
            value = tl.load(scaled + index, mask=index < VOCAB, other=-float("inf"))
            found = unsigned(value)
            tie = (found == key).to(tl.int32)
            before = tl.cumsum(tie, axis=0) - tie + tied
            keep = (found > key) | ((tie != 0) & (before < limit))
            keep = keep & (tl.exp(value - maximum) >= min_p) & (value > -float("inf"))
            noisy = ranked(value + gumbel(index, position, ints), index)
            token_key = tl.maximum(token_key, tl.max(tl.where(keep, noisy, NOTHING), axis=0))
            tied += tl.sum(tie, axis=0)
    return tl.where(token_key == NOTHING, 0, index_of(token_key))


@triton.jit
def pick_kernel(
    logits, request_ints, request_floats, token_rows, slots, starts, lengths, sample_rows, emits,
    scaled, maxima, sums, best, top_keys, chosen_tokens, logprobs, top_tokens, top_logprobs,
    LINES: tl.constexpr, VOCAB: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    INTS: tl.constexpr, FLOATS: tl.constexpr, TOP: tl.constexpr, DRAFTS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, TOP_LANES: tl.constexpr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """A sample's token, its logprob and the top ones; if AGAIN only those of samples that emit."""
    s = tl.program_id(0)
    emit, lane = tl.load(emits + s) != 0, tl.arange(0, LANES)
    row = row_of(s, sample_rows, token_rows, TOKENS, ROWS, DRAFTS)
    slot = tl.minimum(tl.maximum(tl.load(slots + row), 0), LINES - 1).to(tl.int64)
    ints, floats = request_ints + slot * INTS, request_floats + slot * FLOATS
    filtered = is_filtered(ints, floats)
    follow()  # rows' settings are older than the launch before
    if AGAIN:  # noqa: SIM102  (a constant: no branch is compiled without it)
        if emit == 0:
            return
    here = emit & (lane < CHUNKS)
    maximum = tl.load(maxima + s * CHUNKS + lane, mask=here, other=-float("inf"))
    total = tl.load(sums + s * CHUNKS + lane, mask=here, other=0.0)
    keys = tl.load(best + s * CHUNKS + lane, mask=here, other=NOTHING)
    broken = tl.max((maximum != maximum).to(tl.int32), axis=0) != 0  # noqa: PLR0124
    highest = tl.max(maximum, axis=0)
    total = tl.sum(tl.where(here, total * tl.exp(maximum - highest), 0.0), axis=0)
    normaliser = highest + tl.log(total)
    good, nothing = emit & (broken == 0), tl.where(emit, float("nan"), 0.0)
    best_key = tl.max(keys, axis=0)
    token = index_of(best_key)
    line = s.to(tl.int64) * VOCAB
    if good & filtered:
        position = tl.load(lengths + row) + offset_of(s, row, sample_rows, starts) + 1
        token = draw(
            scaled + line, best + s * CHUNKS, position, ints, floats, value_of(best_key), VOCAB,
            CHUNKS, CHUNK, BLOCK, UNROLL,
        )  # fmt: skip
    tl.store(chosen_tokens + s, tl.where(good, token, 0))
    chosen = tl.load(logits + line + token, mask=good, other=0.0)
    tl.store(logprobs + s, tl.where(good, chosen - normaliser, nothing))
    if TOP > 0:
        lane = tl.arange(0, TOP_LANES)
        wanted = tl.where(emit, tl.minimum(tl.load(ints + TOP_LOGPROBS), TOP), 0)
        spare = (lane >= wanted) & (lane < TOP)
        tl.store(top_tokens + s * TOP + lane, tl.zeros_like(lane), mask=spare)
        tl.store(top_logprobs + s * TOP + lane, lane * 0.0, mask=spare)
        here = good & (lane < CHUNKS * TOP) & (lane % TOP < wanted)
        keys = tl.load(top_keys + s * CHUNKS * TOP + lane, mask=here, other=NOTHING)
        for place in range(wanted):
            key = tl.max(keys, axis=0)
            keys = tl.where(keys == key, NOTHING, keys)
            tl.store(top_tokens + s * TOP + place, tl.where(good, index_of(key), 0))
            logprob = tl.where(good, value_of(key) - normaliser, nothing)
            tl.store(top_logprobs + s * TOP + place, logprob)


def sample(
    logits: Tensor,
    token_counts: Tensor,
    request_state: Tensor,
    request_ints: Tensor,
    request_floats: Tensor,
    tokens: Tensor,
    token_rows: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    sample_rows: Tensor,
    emits: Tensor,
    stop_ids: int,
    bias_ids: int,
    top: int,
    drafts: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and logprobs of a step; see the package docstring."""
    samples = logits.shape[0]
    chosen, logprobs = slots.new_empty(samples), logits.new_empty(samples)
    top_tokens, top_logprobs = slots.new_empty(samples, top), logits.new_empty(samples, top)
    state = token_counts, request_state, request_ints, request_floats
    step = tokens, token_rows, slots, starts, lengths, sample_rows, emits
    results = chosen, logprobs, top_tokens, top_logprobs
    launch_sample(logits, *state, *step, stop_ids, bias_ids, top, drafts, *results)
    return results


def launch_sample(
    logits: Tensor,
    token_counts: Tensor,
    request_state: Tensor,
    request_ints: Tensor,
    request_floats: Tensor,
    tokens: Tensor,
    token_rows: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    sample_rows: Tensor,
    emits: Tensor,
    stop_ids: int,
    bias_ids: int,
    top: int,
    drafts: int,
    chosen: Tensor,
    logprobs: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    scan: Any = scan_kernel,
    warps: int = 4,
    span: int = 0,
) -> None:
    """Write what samples that emit give, and zeros of others unless a program scans `span` chunks."""
    samples, vocab = logits.shape
    chunk = min(CHUNK, triton.next_power_of_2(vocab))
    chunks = triton.cdiv(vocab, chunk)
    scaled = torch.empty_like(logits)
    maxima, sums = logits.new_empty(samples, chunks), logits.new_empty(samples, chunks)
    best = logits.new_empty(samples, chunks, dtype=torch.int64)
    top_keys = logits.new_empty(samples, chunks, max(1, top), dtype=torch.int64)
    (lines, ints), lanes = request_ints.shape, triton.next_power_of_2(chunks)
    sizes = {"LINES": lines, "VOCAB": vocab, "INTS": ints, "FLOATS": request_floats.shape[1]}
    sizes |= {"TOKENS": tokens.shape[0], "ROWS": slots.shape[0]}
    launchable(scan)[(triton.cdiv(chunks, span or 1), samples)](
        logits, token_counts, request_state, request_ints, request_floats, tokens, token_rows,
        slots, starts, lengths, sample_rows, emits, scaled, maxima, sums, best, top_keys, **sizes,
        STOP_IDS=stop_ids, BIAS_IDS=bias_ids,
        BIAS_LANES=triton.next_power_of_2(max(1, bias_ids)), TOP=top, DRAFTS=drafts, CHUNK=chunk,
        CHUNKS=chunks, **({"SPAN": span} if span else {}), num_warps=warps,
    )  # fmt: skip
    launchable(pick_kernel)[(samples,)](
        logits, request_ints, request_floats, token_rows, slots, starts, lengths, sample_rows,
        emits, scaled, maxima, sums, best, top_keys, chosen, logprobs, top_tokens, top_logprobs,
        **sizes, TOP=top, DRAFTS=drafts, CHUNK=chunk, CHUNKS=chunks,
        LANES=lanes, TOP_LANES=triton.next_power_of_2(chunks * max(1, top)), BLOCK=2 * chunk,
        UNROLL=min(UNROLL, lanes), AGAIN=span > 0, num_warps=16,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """A TP-8 shard of inkling-small's vocabulary, and the whole one; verification of 8 drafts."""
    cases = []
    for vocab, rows, drafts in ((25128, 32, 0), (200058, 32, 0), (200058, 4, 8)):
        lines, tokens = 129, rows * (1 + drafts)
        i32, f32 = {"dtype": torch.int32}, {"dtype": torch.float32}
        name = f"sample-{vocab}" + (f"-verify{drafts}" if drafts else "")
        cases += launches(
            name, sample, meta(tokens, vocab, **f32), meta(lines, vocab, **i32),
            meta(lines, 8, **i32), meta(lines, 52, **i32), meta(lines, 40, **f32),
            meta(tokens, **i32), meta(tokens, **i32), meta(rows, **i32), meta(rows + 1, **i32),
            meta(rows, **i32), meta(tokens, **i32), meta(tokens, **i32), 8, 32, 20, drafts,
        )  # fmt: skip
    return cases
