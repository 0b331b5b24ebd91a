"""Candidates in three launches.

1. `columns_kernel`, a program a sample and chunk of the own columns: as `sample`'s scan, and for samples
   with filters the mass of the chunk and its best ids, as many as a rank gives.
2. `record_kernel`, a program a sample: combines the chunks into the sample's record, right where the
   ranks exchange; the own candidates are the best of the chunks' best.
3. `choose_kernel`: the ranks meet, and a program a sample chooses from all ranks' records.

A record is 8-byte words: the best (value, id) as one key, BROKEN if a logit is not finite; maximum and
sum of the raw logits, the mass, and the raw logit of the best id, as fp32; the last candidate's key,
NOTHING if there is no other id; from HEADER on the keys of the top raw logits, the candidates' keys, and
their raw logits as fp32.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels import _candidates, table
from inkling_engine.kernels._candidates import BUDGET, record_words
from inkling_engine.kernels._conv_triton import LAYER_UNIT
from inkling_engine.kernels._exchange import FLAGS, exchange_words, half_words
from inkling_engine.kernels._exchange_triton import meet, part_at, sequence_of
from inkling_engine.kernels._sampling_triton import (
    NOTHING,
    gumbel,
    index_of,
    keep_raw,
    offset_of,
    processed_behind,
    ranked,
    row_of,
    value_of,
)
from inkling_engine.kernels._triton import CompileCase, follow, launchable, launches, meta
from inkling_engine.kernels.candidates.lists_triton import (
    BROKEN,
    draw_candidate,
    list_candidates,
    list_highest,
)
from inkling_engine.kernels.sample.triton_kernel import (
    CHUNK,
    GENERATED,
    STATE_WIDTH,
    TEMPERATURE,
    TOP_LOGPROBS,
    is_filtered,
)

MOST_CHUNKS = 64  # of the own columns: `record_kernel` holds the lists of all
RECORD_WARPS = 8

HEADER = tl.constexpr(_candidates.HEADER)
STEPS, WHOLE_STEPS = tl.constexpr(table.STEPS), tl.constexpr(table.WHOLE_STEPS)
WHOLE_SAMPLES, LAST_WHOLE = tl.constexpr(table.WHOLE_SAMPLES), tl.constexpr(table.LAST_WHOLE)


@triton.jit
def columns_kernel(
    logits, token_counts, request_state, request_ints, request_floats, tokens, token_rows, slots,
    starts, lengths, sample_rows, emits, rank, scaled, listed, maxima, sums, masses, best, top_keys,
    LINES: tl.constexpr, COLUMNS: tl.constexpr, VOCAB: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, INTS: tl.constexpr, FLOATS: tl.constexpr, STOP_IDS: tl.constexpr,
    BIAS_IDS: tl.constexpr, BIAS_LANES: tl.constexpr, TOP: tl.constexpr, DRAFTS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """maxima (NaN if a logit is not finite), sums, best keys [S, CHUNKS], top_keys [S, CHUNKS, TOP]
    and, for samples with filters, masses [S, CHUNKS], the processed logits over the temperature,
    `scaled` [S, COLUMNS], and the EACH highest of them with their ids, `listed` [S, CHUNKS, EACH]."""
    chunk, s = tl.program_id(0), tl.program_id(1)
    row = row_of(s, sample_rows, token_rows, TOKENS, ROWS, DRAFTS)
    slot = tl.minimum(tl.maximum(tl.load(slots + row), 0), LINES - 1).to(tl.int64)
    ints, floats = request_ints + slot * INTS, request_floats + slot * FLOATS
    emit = tl.load(emits + s)
    wanted = tl.minimum(tl.load(ints + TOP_LOGPROBS), TOP)
    generated = tl.load(request_state + slot * STATE_WIDTH + GENERATED)
    temperature = tl.load(floats + TEMPERATURE)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    index = tl.load(rank) * COLUMNS + column
    follow()  # only the logits come from the launch before
    if emit == 0:
        return
    mask = (column < COLUMNS) & (index < VOCAB)
    line = s.to(tl.int64) * COLUMNS + column
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
            value = tl.where(mask, value, -float("inf"))
            mass = tl.where(value > -float("inf"), tl.exp(value - tl.max(value, axis=0)), 0.0)
            tl.store(masses + cell, tl.sum(mass, axis=0))
            tl.store(scaled + line, value, mask=mask)
            tl.debug_barrier()
            # read again: export takes an address that depends on what a function made of its pointers
            # for one into all of them
            value = tl.load(scaled + line, mask=mask, other=-float("inf"))
            keys = tl.where(mask, ranked(value, index), NOTHING)
            list_highest(keys, listed + cell.to(tl.int64) * EACH, EACH)
        else:
            offset = offset_of(s, row, sample_rows, starts)
            value += gumbel(index, tl.load(lengths + row) + offset + 1, ints)
    tl.store(best + cell, tl.max(tl.where(mask, ranked(value, index), NOTHING), axis=0))


@triton.jit
def record_kernel(
    logits, request_ints, request_floats, token_rows, slots, sample_rows, emits, exchange,
    step_counter, rank, listed, maxima, sums, masses, best, top_keys, call, LINES: tl.constexpr,
    COLUMNS: tl.constexpr, VOCAB: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    INTS: tl.constexpr, FLOATS: tl.constexpr, TOP: tl.constexpr, DRAFTS: tl.constexpr,
    CHUNKS: tl.constexpr, EACH: tl.constexpr, LANES: tl.constexpr, TOP_LANES: tl.constexpr,
    LIST_LANES: tl.constexpr, BUDGET: tl.constexpr, CALLS: tl.constexpr, HALF: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Write a sample's record out of its chunks."""
    s, lane = tl.program_id(0), tl.arange(0, LANES)
    row = row_of(s, sample_rows, token_rows, TOKENS, ROWS, DRAFTS)
    slot = tl.minimum(tl.maximum(tl.load(slots + row), 0), LINES - 1).to(tl.int64)
    ints, floats = request_ints + slot * INTS, request_floats + slot * FLOATS
    filtered, wanted = is_filtered(ints, floats), tl.minimum(tl.load(ints + TOP_LOGPROBS), TOP)
    first = tl.load(rank) * COLUMNS
    ids = tl.minimum(COLUMNS, VOCAB - first)
    emit = tl.load(emits + s)
    follow()
    if emit == 0:
        return
    sequence = sequence_of(tl.load(step_counter + STEPS), call, CALLS)
    kind: tl.constexpr = exchange.dtype
    record = part_at(exchange.to(tl.int64), sequence, HALF, kind) + s.to(tl.int64) * WORDS
    raws, line = record.to(logits.dtype), s.to(tl.int64) * COLUMNS
    maximum = tl.load(maxima + s * CHUNKS + lane, mask=lane < CHUNKS, other=-float("inf"))
    total = tl.load(sums + s * CHUNKS + lane, mask=lane < CHUNKS, other=0.0)
    keys = tl.load(best + s * CHUNKS + lane, mask=lane < CHUNKS, other=NOTHING)
    broken = tl.max((maximum != maximum).to(tl.int32), axis=0) != 0  # noqa: PLR0124
    highest, key = tl.max(maximum, axis=0), tl.max(keys, axis=0)
    scale = tl.where(maximum > -float("inf"), tl.exp(maximum - highest), 0.0)
    at = index_of(key) - first
    tl.store(record, tl.where(broken, BROKEN, key))
    tl.store(raws + 2, highest)
    tl.store(raws + 3, tl.sum(total * scale, axis=0))
    tl.store(raws + 5, tl.load(logits + line + at, mask=(at >= 0) & (at < ids), other=0.0))
    if filtered:
        value = value_of(keys)
        mass = tl.load(masses + s * CHUNKS + lane, mask=lane < CHUNKS, other=0.0)
        scale = tl.where(value > -float("inf"), tl.exp(value - value_of(key)), 0.0)
        tl.store(raws + 4, tl.sum(mass * scale, axis=0))
        to, own = record + HEADER + TOP, listed + s.to(tl.int64) * (CHUNKS * EACH)
        last = list_candidates(
            to, raws + 2 * (HEADER + TOP + BUDGET), logits + line, own, first, ids, CHUNKS * EACH,
            LIST_LANES, BUDGET,
        )  # fmt: skip
        tl.store(record + 3, last)
    if TOP > 0:
        each = tl.arange(0, TOP_LANES)
        here = (each < CHUNKS * TOP) & (each % TOP < wanted)
        tops = tl.load(top_keys + s * CHUNKS * TOP + each, mask=here, other=NOTHING)
        for place in range(wanted):
            top = tl.max(tops, axis=0)
            tops = tl.where(tops == top, NOTHING, tops)
            tl.store(record + HEADER + place, top)


@triton.jit
def words_at(
    r, peers, exchange, own, given, sequence, offset, WORLD: tl.constexpr, HALF: tl.constexpr
):
    """Pointers to the word `offset` of the parts of ranks `r`, and which of them have given one."""
    there = (r < WORLD) & ((given >> r) & 1 != 0)
    block = tl.where(r == own, exchange.to(tl.int64), tl.load(peers + r, there, other=0))
    kind: tl.constexpr = exchange.dtype
    return part_at(block, sequence, HALF, kind) + offset, there


@triton.jit
def choose_kernel(
    request_ints, request_floats, token_rows, slots, starts, lengths, sample_rows, emits, peers,
    exchange, step_counter, rank, chosen_tokens, logprobs, top_tokens, top_logprobs, unsure, call,
    LINES: tl.constexpr, SAMPLES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    INTS: tl.constexpr, FLOATS: tl.constexpr, TOP: tl.constexpr, DRAFTS: tl.constexpr,
    ALL_TOPS: tl.constexpr, BUDGET: tl.constexpr, CALLS: tl.constexpr, WORLD: tl.constexpr,
    RANKS: tl.constexpr, HALF: tl.constexpr, WORDS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Samples' tokens, their logprobs and the top ones, and whether they are unsure."""
    own, program = tl.load(rank), tl.program_id(0)
    follow()
    step = tl.load(step_counter + STEPS)
    sequence = sequence_of(step, call, CALLS)
    floating: tl.constexpr = logprobs.dtype
    given = meet(peers, exchange, own, sequence, WORLD)
    for i in range(ROUNDS):
        s = program + i * tl.num_programs(0)
        emit = tl.load(emits + s, s < SAMPLES, other=0) != 0
        row = row_of(tl.minimum(s, SAMPLES - 1), sample_rows, token_rows, TOKENS, ROWS, DRAFTS)
        slot = tl.minimum(tl.maximum(tl.load(slots + tl.minimum(row, ROWS - 1)), 0), LINES - 1)
        ints = request_ints + slot.to(tl.int64) * INTS
        floats = request_floats + slot.to(tl.int64) * FLOATS
        start = s.to(tl.int64) * WORDS
        at, here = words_at(
            tl.arange(0, RANKS), peers, exchange, own, given, sequence, start, WORLD, HALF
        )
        here = here & emit
        keys = tl.load(at, here, other=NOTHING, cache_modifier=".cg")
        numbers = at.to(floating)
        maximum = tl.load(numbers + 2, here, other=-float("inf"), cache_modifier=".cg")
        total = tl.load(numbers + 3, here, other=0.0, cache_modifier=".cg")
        raw = tl.load(numbers + 5, here, other=0.0, cache_modifier=".cg")
        key = tl.max(keys, axis=0)
        good, sure = emit & (key != BROKEN), emit | True
        nothing = tl.where(emit, float("nan"), 0.0)
        highest = tl.max(maximum, axis=0)
        scale = tl.where(maximum > -float("inf"), tl.exp(maximum - highest), 0.0)
        normaliser = highest + tl.log(tl.sum(total * scale, axis=0))
        token = tl.where(key == NOTHING, 0, index_of(key))
        chosen = tl.sum(tl.where(keys == key, raw, 0.0), axis=0)
        if good & is_filtered(ints, floats):
            mass = tl.load(numbers + 4, here, other=0.0, cache_modifier=".cg")
            scale = tl.where(keys != NOTHING, tl.exp(value_of(keys) - value_of(key)), 0.0)
            whole = tl.sum((mass * scale).to(tl.float64), axis=0)
            last = tl.max(tl.load(at + 3, here, other=NOTHING, cache_modifier=".cg"), axis=0)
            each = tl.arange(0, RANKS * BUDGET)
            listed = start + HEADER + TOP + each % BUDGET
            entries, inside = words_at(
                each // BUDGET, peers, exchange, own, given, sequence, listed, WORLD, HALF
            )
            found = tl.load(entries, inside, other=NOTHING, cache_modifier=".cg")
            position = tl.load(lengths + row) + offset_of(s, row, sample_rows, starts) + 1
            drawn, sure = draw_candidate(found, last, whole, position, ints, floats, RANKS * BUDGET)
            token = tl.where((drawn == NOTHING) | ~sure, 0, index_of(drawn))
            raws = (entries - each % BUDGET + BUDGET).to(floating) + each % BUDGET
            values = tl.load(raws, inside, other=0.0, cache_modifier=".cg")
            same = (found != NOTHING) & (index_of(found) == token)
            chosen = tl.where(sure, tl.sum(tl.where(same, values, 0.0), axis=0), normaliser)
        tl.store(chosen_tokens + s, tl.where(good, token, 0), mask=s < SAMPLES)
        tl.store(logprobs + s, tl.where(good, chosen - normaliser, nothing), mask=s < SAMPLES)
        tl.store(unsure + s, (good & ~sure).to(tl.int32), mask=s < SAMPLES)
        if good & ~sure:
            tl.atomic_add(step_counter + WHOLE_SAMPLES, 1)
            if tl.atomic_xchg(step_counter + LAST_WHOLE, step + 1) != step + 1:
                tl.atomic_add(step_counter + WHOLE_STEPS, 1)
        if TOP > 0:
            lane = tl.arange(0, ALL_TOPS)
            wanted = tl.where(emit, tl.minimum(tl.load(ints + TOP_LOGPROBS), TOP), 0)
            spare = (lane >= wanted) & (lane < TOP) & (s < SAMPLES)
            tl.store(top_tokens + s * TOP + lane, tl.zeros_like(lane), mask=spare)
            tl.store(top_logprobs + s * TOP + lane, lane * 0.0, mask=spare)
            ahead = start + HEADER + lane % TOP
            entries, inside = words_at(
                lane // TOP, peers, exchange, own, given, sequence, ahead, WORLD, HALF
            )
            inside = inside & good & (lane % TOP < wanted)
            tops = tl.load(entries, inside, other=NOTHING, cache_modifier=".cg")
            for place in range(wanted):
                top = tl.max(tops, axis=0)
                tops = tl.where(tops == top, NOTHING, tops)
                real = good & (top != NOTHING)
                tl.store(top_tokens + s * TOP + place, tl.where(real, index_of(top), 0))
                logprob = tl.where(real, value_of(top) - normaliser, tl.where(good, 0.0, nothing))
                tl.store(top_logprobs + s * TOP + place, logprob)


def candidates(
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
    peers: Tensor,
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    budget: int,
    call: int,
    calls: int,
    world: int,
    vocab: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens and logprobs of a step, where they are proven; see the package docstring."""
    samples, (lines, ints) = logits.shape[0], request_ints.shape
    sizes = {"LINES": lines, "TOKENS": tokens.shape[0], "ROWS": slots.shape[0], "INTS": ints}
    sizes |= {"FLOATS": request_floats.shape[1], "TOP": top, "DRAFTS": drafts}
    part = {"CALLS": calls, "HALF": half_words(exchange.shape[0], world)}
    part |= {"BUDGET": budget, "WORDS": record_words(top, budget)}
    assert samples * part["WORDS"] <= part["HALF"], "records are larger than the exchange's halves"
    state = token_counts, request_state, request_ints, request_floats
    step = tokens, token_rows, slots, starts, lengths, sample_rows, emits
    biases = {"STOP_IDS": stop_ids, "BIAS_IDS": bias_ids}
    biases["BIAS_LANES"] = triton.next_power_of_2(max(1, bias_ids))
    block, number = (exchange, step_counter, rank), LAYER_UNIT.value * call
    launch_records(logits, state, step, block, number, vocab, sizes, part, biases)
    return launch_choice(logits, state, step, (peers, *block), number, world, sizes | part)


def launch_records(
    logits: Tensor,
    state: tuple[Tensor, ...],
    step: tuple[Tensor, ...],
    block: tuple[Tensor, Tensor, Tensor],
    number: int,
    vocab: int,
    sizes: dict[str, int],
    part: dict[str, int],
    biases: dict[str, int],
) -> None:
    """Write the samples' records where the ranks exchange."""
    samples, columns = logits.shape
    least = triton.cdiv(columns, MOST_CHUNKS)
    chunk = triton.next_power_of_2(max(min(CHUNK, columns), least))
    chunks, top = triton.cdiv(columns, chunk), sizes["TOP"]
    each = min(part["BUDGET"], chunk)
    scaled = torch.empty_like(logits)
    listed = logits.new_empty(samples, chunks, each, dtype=torch.int64)
    maxima, sums, masses = (logits.new_empty(samples, chunks) for _ in range(3))
    best = logits.new_empty(samples, chunks, dtype=torch.int64)
    top_keys = logits.new_empty(samples, chunks, max(1, top), dtype=torch.int64)
    found = listed, maxima, sums, masses, best, top_keys
    cut = {"COLUMNS": columns, "VOCAB": vocab, "CHUNKS": chunks, "EACH": each}
    launchable(columns_kernel)[(chunks, samples)](
        logits, *state, *step, block[2], scaled, *found, **sizes, **cut, **biases, CHUNK=chunk,
        num_warps=max(1, min(16, chunk // 128)),
    )  # fmt: skip
    (_, token_rows, slots, _, _, sample_rows, emits), tables = step, state[2:]
    launchable(record_kernel)[(samples,)](
        logits, *tables, token_rows, slots, sample_rows, emits, *block, *found, number,
        **sizes, **cut, **part, LANES=triton.next_power_of_2(chunks),
        TOP_LANES=triton.next_power_of_2(chunks * max(1, top)),
        LIST_LANES=max(part["BUDGET"], triton.next_power_of_2(chunks * each)),
        num_warps=RECORD_WARPS,
    )  # fmt: skip


def launch_choice(
    logits: Tensor,
    state: tuple[Tensor, ...],
    step: tuple[Tensor, ...],
    ranks: tuple[Tensor, Tensor, Tensor, Tensor],
    number: int,
    world: int,
    sizes: dict[str, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Choose from the records of all ranks."""
    samples, emits, top = logits.shape[0], step[-1], sizes["TOP"]
    chosen, logprobs, unsure = (t.new_empty(samples) for t in (emits, logits, emits))
    top_tokens, top_logprobs = emits.new_empty(samples, top), logits.new_empty(samples, top)
    programs, lanes = min(FLAGS, samples), triton.next_power_of_2(world)
    launchable(choose_kernel)[(programs,)](
        *state[2:], *step[1:], *ranks, chosen, logprobs, top_tokens, top_logprobs, unsure, number,
        **sizes, SAMPLES=samples, WORLD=world, RANKS=lanes,
        ALL_TOPS=triton.next_power_of_2(lanes * max(1, top)),
        ROUNDS=triton.cdiv(samples, programs), num_warps=2 if world <= 2 else 4,
    )  # fmt: skip
    return chosen, logprobs, top_tokens, top_logprobs, unsure


def compile_cases() -> list[CompileCase]:
    """Inkling-small's vocabulary at TP 8 and 2; verification of 8 drafts, of more than FLAGS tokens."""
    i64, i32 = {"dtype": torch.int64}, {"dtype": torch.int32}
    f32, cases = {"dtype": torch.float32}, []
    for world, rows, drafts in ((8, 32, 0), (2, 32, 0), (8, 32, 8)):
        columns, tokens = 201024 // world, rows * (1 + drafts)
        name = f"candidates-tp{world}" + (f"-verify{drafts}" if drafts else "")
        cases += launches(
            name, candidates, meta(tokens, columns, **f32), meta(129, 200058, **i32),
            meta(129, 8, **i32), meta(129, 52, **i32), meta(129, 40, **f32),
            meta(tokens, **i32), meta(tokens, **i32), meta(rows, **i32), meta(rows + 1, **i32),
            meta(rows, **i32), meta(tokens, **i32), meta(tokens, **i32), 8, 32, 20, drafts,
            meta(8, **i64), meta(exchange_words(1 << 24, world), **i64), meta(4, **i64), meta(4, **i32),
            BUDGET, 85, 87, world, 200058,
        )  # fmt: skip
    return cases
