"""Draft sampling in two launches: the best of each chunk of the vocabulary, then of all."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._conv_triton import LAYER_UNIT
from inkling_engine.kernels._sampling_triton import NOTHING, gumbel, index_of, processed, ranked
from inkling_engine.kernels._triton import (
    CompileCase,
    await_last,
    begin_next,
    launchable,
    launches,
    meta,
)

CHUNK = 256  # ids of a program of the scan; 2 us a depth less than 1024 at 25,128 ids

TEMPERATURE = tl.constexpr(table.TEMPERATURE)
GENERATED = tl.constexpr(table.GENERATED)
STATE_WIDTH = tl.constexpr(table.STATE_WIDTH)
BROKEN = tl.constexpr(2**63 - 1)  # above any (value, id): a logit is not finite


@triton.jit
def best_guess(
    raw, index, mask, row, slot, depth, token_counts, request_state, ints, floats, draft_tokens,
    starts, lengths, COUNTS: tl.constexpr, DRAFTS: tl.constexpr, STOP_IDS: tl.constexpr,
    BIAS_IDS: tl.constexpr, BIAS_LANES: tl.constexpr,
):  # fmt: skip
    """The highest processed, noisy logit of the ids `index`, and its id; BROKEN if one is not finite."""
    finite = tl.min((tl.abs(raw) < float("inf")).to(tl.int32), axis=0)
    generated = tl.load(request_state + slot * STATE_WIDTH + GENERATED)
    value = processed(
        raw, index, mask, token_counts + slot * COUNTS, ints, floats, generated,
        draft_tokens + slot * DRAFTS, depth, STOP_IDS, BIAS_IDS, BIAS_LANES,
    )  # fmt: skip
    temperature = tl.load(floats + TEMPERATURE)
    if temperature != 0.0:
        end = tl.load(lengths + row) + tl.load(starts + row + 1) - tl.load(starts + row)
        value = tl.div_rn(value, temperature) + gumbel(index, end + 1 + depth, ints)
    key = tl.max(tl.where(mask, ranked(value, index), NOTHING), axis=0)
    return tl.where(finite != 0, key, BROKEN)


@triton.jit
def draft_scan_kernel(
    logits, token_counts, request_state, request_ints, request_floats, draft_tokens, slots, starts,
    lengths, emits, best, scaled_depth, LINES: tl.constexpr, VOCAB: tl.constexpr,
    COUNTS: tl.constexpr,
    INTS: tl.constexpr, FLOATS: tl.constexpr, DRAFTS: tl.constexpr,
    STOP_IDS: tl.constexpr, BIAS_IDS: tl.constexpr, BIAS_LANES: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """best [R, CHUNKS] i64: the highest processed, noisy logit of each chunk, and its id."""
    begin_next()
    await_last()
    chunk, row, depth = tl.program_id(0), tl.program_id(1), scaled_depth // LAYER_UNIT
    if tl.load(emits + row) == 0:
        return
    slot = tl.minimum(tl.maximum(tl.load(slots + row), 0), LINES - 1).to(tl.int64)
    ints, floats = request_ints + slot * INTS, request_floats + slot * FLOATS
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = index < VOCAB
    raw = tl.load(logits + row.to(tl.int64) * VOCAB + index, mask=mask, other=0.0)
    key = best_guess(
        raw, index, mask, row, slot, depth, token_counts, request_state, ints, floats, draft_tokens,
        starts, lengths, COUNTS, DRAFTS, STOP_IDS, BIAS_IDS, BIAS_LANES,
    )  # fmt: skip
    tl.store(best + row * CHUNKS + chunk, key)


@triton.jit
def draft_pick_kernel(
    best, draft_tokens, ids, slots, starts, emits, scaled_depth, LINES: tl.constexpr,
    IDS: tl.constexpr,
    DRAFTS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best of a row's chunks."""
    begin_next()
    await_last()
    row, lane, depth = tl.program_id(0), tl.arange(0, LANES), scaled_depth // LAYER_UNIT
    if tl.load(emits + row) == 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    entry = tl.load(starts + row + 1) + row * DRAFTS + depth
    keys = tl.load(best + row * CHUNKS + lane, mask=lane < CHUNKS, other=NOTHING)
    key = tl.max(keys, axis=0)
    token = tl.where(key == BROKEN, 0, index_of(key))
    tl.store(draft_tokens + slot * DRAFTS + depth, token, mask=(slot > 0) & (slot < LINES))
    tl.store(ids + entry, token, mask=(entry >= 0) & (entry < IDS))


def draft_sample(
    logits: Tensor,
    token_counts: Tensor,
    request_state: Tensor,
    request_ints: Tensor,
    request_floats: Tensor,
    draft_tokens: Tensor,
    ids: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    emits: Tensor,
    depth: int,
    drafts: int,
    stop_ids: int,
    bias_ids: int,
) -> None:
    """Write the guesses of a depth; see the package docstring."""
    (rows, vocab), (lines, ints) = logits.shape, request_ints.shape
    chunk = min(CHUNK, triton.next_power_of_2(vocab))
    chunks = triton.cdiv(vocab, chunk)
    best = logits.new_empty(rows, chunks, dtype=torch.int64)
    sizes = {"LINES": lines, "DRAFTS": drafts, "CHUNKS": chunks}
    launchable(draft_scan_kernel)[(chunks, rows)](
        logits, token_counts, request_state, request_ints, request_floats, draft_tokens, slots,
        starts, lengths, emits, best, LAYER_UNIT.value * depth, VOCAB=vocab,
        COUNTS=token_counts.shape[1], INTS=ints,
        FLOATS=request_floats.shape[1], STOP_IDS=stop_ids, BIAS_IDS=bias_ids,
        BIAS_LANES=triton.next_power_of_2(max(1, bias_ids)), CHUNK=chunk, **sizes, num_warps=4,
    )  # fmt: skip
    launchable(draft_pick_kernel)[(rows,)](
        best, draft_tokens, ids, slots, starts, emits, LAYER_UNIT.value * depth, IDS=ids.shape[0],
        LANES=triton.next_power_of_2(chunks), **sizes, num_warps=1,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Inkling-small's vocabulary and a part of it: 8 rows, the last of 8 depths."""
    i32, f32, cases = {"dtype": torch.int32}, {"dtype": torch.float32}, []
    for vocab in (32768, 200058):
        cases += launches(
            f"draft_sample-{vocab}", draft_sample, meta(8, vocab, **f32),
            meta(129, 200058, **i32), meta(129, 8, **i32), meta(129, 52, **i32),
            meta(129, 40, **f32), meta(129, 8, **i32), meta(192, **i32), meta(8, **i32),
            meta(9, **i32), meta(8, **i32), meta(8, **i32), 7, 8, 8, 32,
        )  # fmt: skip
    return cases
