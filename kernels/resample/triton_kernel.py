"""Drawing again in `sample`'s two launches, which do nothing for samples that are sure."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_engine.kernels._sampling_triton import row_of
from inkling_engine.kernels._triton import CompileCase, follow, launches, meta
from inkling_engine.kernels.sample.triton_kernel import (
    GENERATED,
    STATE_WIDTH,
    TEMPERATURE,
    TOP_LOGPROBS,
    launch_sample,
    scan_chunk,
)

SPAN, WARPS = 28, 2  # chunks and warps of a program of the scan


@triton.jit
def scan_again_kernel(
    logits, token_counts, request_state, request_ints, request_floats, tokens, token_rows, slots,
    starts, lengths, sample_rows, emits, scaled, maxima, sums, best, top_keys, LINES: tl.constexpr,
    VOCAB: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, INTS: tl.constexpr,
    FLOATS: tl.constexpr, STOP_IDS: tl.constexpr, BIAS_IDS: tl.constexpr,
    BIAS_LANES: tl.constexpr, TOP: tl.constexpr, DRAFTS: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """`scan_kernel` by programs of SPAN chunks, few of which have to end where no sample emits."""
    s = tl.program_id(1)
    follow()
    if tl.load(emits + s) == 0:
        return
    row = row_of(s, sample_rows, token_rows, TOKENS, ROWS, DRAFTS)
    slot = tl.minimum(tl.maximum(tl.load(slots + row), 0), LINES - 1).to(tl.int64)
    ints, floats = request_ints + slot * INTS, request_floats + slot * FLOATS
    wanted = tl.minimum(tl.load(ints + TOP_LOGPROBS), TOP)
    generated = tl.load(request_state + slot * STATE_WIDTH + GENERATED)
    temperature, first = tl.load(floats + TEMPERATURE), tl.program_id(0) * SPAN
    for chunk in range(first, tl.minimum(first + SPAN, CHUNKS)):
        scan_chunk(
            chunk, s, row, slot, ints, floats, wanted, generated, temperature, logits, token_counts,
            tokens, starts, lengths, sample_rows, scaled, maxima, sums, best, top_keys, VOCAB,
            STOP_IDS, BIAS_IDS, BIAS_LANES, TOP, DRAFTS, CHUNK, CHUNKS,
        )  # fmt: skip


def resample(
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
    unsure: Tensor,
    stop_ids: int,
    bias_ids: int,
    top: int,
    drafts: int,
    chosen: Tensor,
    logprobs: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
) -> None:
    """Write the results of unsure samples; see the package docstring."""
    state = token_counts, request_state, request_ints, request_floats
    step = tokens, token_rows, slots, starts, lengths, sample_rows, unsure
    results = chosen, logprobs, top_tokens, top_logprobs
    launch_sample(
        logits,
        *state,
        *step,
        stop_ids,
        bias_ids,
        top,
        drafts,
        *results,
        scan_again_kernel,
        WARPS,
        SPAN,
    )


def compile_cases() -> list[CompileCase]:
    """Inkling-small's vocabulary; verification of 8 drafts."""
    cases, vocab, lines = [], 200058, 129
    i32, f32 = {"dtype": torch.int32}, {"dtype": torch.float32}
    for rows, drafts in ((32, 0), (4, 8)):
        tokens = rows * (1 + drafts)
        name = "resample" + (f"-verify{drafts}" if drafts else "")
        cases += launches(
            name, resample, meta(tokens, vocab, **f32), meta(lines, vocab, **i32),
            meta(lines, 8, **i32), meta(lines, 52, **i32), meta(lines, 40, **f32),
            meta(tokens, **i32), meta(tokens, **i32), meta(rows, **i32), meta(rows + 1, **i32),
            meta(rows, **i32), meta(tokens, **i32), meta(tokens, **i32), 8, 32, 20, drafts,
            meta(tokens, **i32), meta(tokens, **f32), meta(tokens, 20, **i32),
            meta(tokens, 20, **f32),
        )  # fmt: skip
    return cases
