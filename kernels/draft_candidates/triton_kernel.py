"""Draft candidates in two launches: the best of each chunk of the own columns, then of all ranks'."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._conv_triton import LAYER_UNIT
from inkling_engine.kernels._exchange import FLAGS, exchange_words, half_words
from inkling_engine.kernels._exchange_triton import meet, part_at, sequence_of
from inkling_engine.kernels._sampling_triton import NOTHING, index_of
from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta
from inkling_engine.kernels.draft_sample.triton_kernel import BROKEN, CHUNK, best_guess


@triton.jit
def columns_kernel(
    logits, token_counts, request_state, request_ints, request_floats, draft_tokens, slots, starts,
    lengths, emits, rank, best, scaled_depth, LINES: tl.constexpr, COLUMNS: tl.constexpr,
    VOCAB: tl.constexpr, COUNTS: tl.constexpr, INTS: tl.constexpr, FLOATS: tl.constexpr,
    DRAFTS: tl.constexpr, STOP_IDS: tl.constexpr, BIAS_IDS: tl.constexpr,
    BIAS_LANES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """best [R, CHUNKS] i64: the highest processed, noisy logit of each chunk, and its id."""
    follow()
    chunk, row, depth = tl.program_id(0), tl.program_id(1), scaled_depth // LAYER_UNIT
    if tl.load(emits + row) == 0:
        return
    slot = tl.minimum(tl.maximum(tl.load(slots + row), 0), LINES - 1).to(tl.int64)
    ints, floats = request_ints + slot * INTS, request_floats + slot * FLOATS
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    index = tl.load(rank) * COLUMNS + column
    mask = (column < COLUMNS) & (index < VOCAB)
    raw = tl.load(logits + row.to(tl.int64) * COLUMNS + column, mask=mask, other=0.0)
    key = best_guess(
        raw, index, mask, row, slot, depth, token_counts, request_state, ints, floats, draft_tokens,
        starts, lengths, COUNTS, DRAFTS, STOP_IDS, BIAS_IDS, BIAS_LANES,
    )  # fmt: skip
    tl.store(best + row * CHUNKS + chunk, key)


@triton.jit
def meet_kernel(
    best, draft_tokens, ids, slots, starts, emits, peers, exchange, step_counter, rank,
    scaled_depth, call, LINES: tl.constexpr, ROWS: tl.constexpr, IDS: tl.constexpr,
    DRAFTS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, CALLS: tl.constexpr,
    WORLD: tl.constexpr, RANKS: tl.constexpr, HALF: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """The best of a row's chunks is given to all; the best of all ranks' is the guess."""
    follow()
    own, sequence = tl.load(rank), sequence_of(tl.load(step_counter), call, CALLS)
    kind: tl.constexpr = exchange.dtype
    mine = part_at(exchange.to(tl.int64), sequence, HALF, kind)
    lane, r, depth = tl.arange(0, LANES), tl.arange(0, RANKS), scaled_depth // LAYER_UNIT
    for i in range(ROUNDS):
        row = tl.program_id(0) + i * tl.num_programs(0)
        live = tl.load(emits + row, row < ROWS, other=0) != 0
        keys = tl.load(best + row * CHUNKS + lane, live & (lane < CHUNKS), other=NOTHING)
        tl.store(mine + row, tl.max(keys, axis=0), live)
    given = meet(peers, exchange, own, sequence, WORLD)
    blocks = tl.load(peers + r, r < WORLD, other=0)
    blocks = tl.where(r == own, exchange.to(tl.int64), blocks)
    for i in range(ROUNDS):
        row = tl.program_id(0) + i * tl.num_programs(0)
        if tl.load(emits + row, row < ROWS, other=0) != 0:
            known = (r < WORLD) & ((given >> r) & 1 != 0)
            part = part_at(blocks, sequence, HALF, kind) + row
            key = tl.max(tl.load(part, known, other=NOTHING, cache_modifier=".cg"), axis=0)
            token = tl.where((key == BROKEN) | (key == NOTHING), 0, index_of(key))
            slot = tl.load(slots + row).to(tl.int64)
            entry = tl.load(starts + row + 1) + row * DRAFTS + depth
            there = (slot > 0) & (slot < LINES)
            tl.store(draft_tokens + slot * DRAFTS + depth, token, mask=there)
            tl.store(ids + entry, token, mask=(entry >= 0) & (entry < IDS))


def draft_candidates(
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
    peers: Tensor,
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    call: int,
    calls: int,
    world: int,
    vocab: int,
) -> None:
    """Write the guesses of a depth; see the package docstring."""
    (rows, columns), (lines, ints) = logits.shape, request_ints.shape
    chunk = min(CHUNK, triton.next_power_of_2(columns))
    chunks = triton.cdiv(columns, chunk)
    best = logits.new_empty(rows, chunks, dtype=torch.int64)
    sizes = {"LINES": lines, "DRAFTS": drafts, "CHUNKS": chunks}
    launchable(columns_kernel)[(chunks, rows)](
        logits, token_counts, request_state, request_ints, request_floats, draft_tokens, slots,
        starts, lengths, emits, rank, best, LAYER_UNIT.value * depth, COLUMNS=columns, VOCAB=vocab,
        COUNTS=token_counts.shape[1], INTS=ints, FLOATS=request_floats.shape[1],
        STOP_IDS=stop_ids, BIAS_IDS=bias_ids,
        BIAS_LANES=triton.next_power_of_2(max(1, bias_ids)), CHUNK=chunk, **sizes, num_warps=4,
    )  # fmt: skip
    programs = min(FLAGS, rows)
    launchable(meet_kernel)[(programs,)](
        best, draft_tokens, ids, slots, starts, emits, peers, exchange, step_counter, rank,
        LAYER_UNIT.value * depth, LAYER_UNIT.value * call, ROWS=rows, IDS=ids.shape[0],
        LANES=triton.next_power_of_2(chunks), CALLS=calls, WORLD=world,
        RANKS=triton.next_power_of_2(world), HALF=half_words(exchange.shape[0], world),
        ROUNDS=triton.cdiv(rows, programs), **sizes, num_warps=1,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Inkling-small's vocabulary at TP 8 and 2: 8 rows, the last of 8 depths."""
    i64, i32 = {"dtype": torch.int64}, {"dtype": torch.int32}
    f32, cases = {"dtype": torch.float32}, []
    for world in (8, 2):
        columns = 201024 // world
        cases += launches(
            f"draft_candidates-tp{world}", draft_candidates, meta(8, columns, **f32),
            meta(129, 200058, **i32), meta(129, 8, **i32), meta(129, 52, **i32),
            meta(129, 40, **f32), meta(129, 8, **i32), meta(192, **i32), meta(8, **i32),
            meta(9, **i32), meta(8, **i32), meta(8, **i32), 7, 8, 8, 32, meta(8, **i64),
            meta(exchange_words(1 << 20, world), **i64), meta(4, **i64), meta(4, **i32), -1, 110, world,
            200058,
        )  # fmt: skip
    return cases
