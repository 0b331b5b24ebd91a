"""Samples drawn again; see the package docstring."""

from torch import Tensor

from inkling_engine.kernels.sample.reference import sample


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
    found = sample(logits, *state, *step, stop_ids, bias_ids, top, drafts)
    rows = unsure.nonzero().flatten()
    for results, one in zip((chosen, logprobs, top_tokens, top_logprobs), found, strict=True):
        results[rows] = one[rows]
