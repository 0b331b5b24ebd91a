"""Drawing again in `sample`'s two launches, which do nothing for samples that are sure."""

import torch
from torch import Tensor

from inkling_engine.kernels._triton import CompileCase, launches, meta
from inkling_engine.kernels.sample.triton_kernel import launch_sample


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
    launch_sample(logits, *state, *step, stop_ids, bias_ids, top, drafts, *results, again=True)


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
