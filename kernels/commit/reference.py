"""Commit of a step, row by row; see the package docstring."""

import torch
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels.table import Finish


def commit(
    request_state: Tensor,
    token_counts: Tensor,
    results_int: Tensor,
    results_float: Tensor,
    step_counter: Tensor,
    request_ints: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    slots: Tensor,
    starts: Tensor,
    emits: Tensor,
    stop_ids: int,
) -> None:
    """Write the step's results; see the package docstring."""
    line = int(step_counter[0]) % len(results_int)
    step_counter[0] += 1
    ints, floats = results_int[line], results_float[line]
    ints[: len(slots)] = 0
    floats[: len(slots)] = 0
    for row, slot in enumerate(slots.tolist()):
        if slot == 0:
            continue
        state = request_state[slot]
        state[table.LENGTH] += starts[row + 1] - starts[row]
        if emits[row]:
            state[table.LAST_TOKEN] = tokens[row]
            state[table.GENERATED] += 1
            token_counts[slot, int(tokens[row])] += 1
            state[table.FINISH] = _finish(state, request_ints[slot], logprobs[row], stop_ids)
        header = torch.stack([slots[row], tokens[row], state[table.FINISH], state[table.LENGTH]])
        ints[row] = torch.cat([header, top_tokens[row]])
        floats[row] = torch.cat([logprobs[row : row + 1], top_logprobs[row]])


def _finish(state: Tensor, ints: Tensor, logprob: Tensor, stop_ids: int) -> Finish:
    """Why a row that has just emitted LAST_TOKEN ends, if it does."""
    if logprob.isnan():
        return Finish.NON_FINITE
    if state[table.LAST_TOKEN] in ints[table.INT_HEADER :][:stop_ids]:
        return Finish.STOP
    if state[table.GENERATED] >= ints[table.MAX_TOKENS]:
        return Finish.LENGTH
    return Finish.NONE
