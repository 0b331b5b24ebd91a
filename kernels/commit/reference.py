"""Commit of a step, row by row; see the package docstring."""

import torch
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels.step_metadata.reference import take
from inkling_engine.kernels.table import Finish


def commit(
    request_state: Tensor,
    token_counts: Tensor,
    results_int: Tensor,
    results_float: Tensor,
    step_counter: Tensor,
    snapshot_slots: Tensor,
    snapshot_lengths: Tensor,
    request_ints: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    step_tokens: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    emits: Tensor,
    destination_slots: Tensor,
    destination_offsets: Tensor,
    stop_ids: int,
    drafts: int,
) -> None:
    """Write the step's results; see the package docstring."""
    step, most = int(step_counter[0]), results_float.shape[2] // (1 + top_tokens.shape[1])
    step_counter[0] += 1
    lines = results_int[step % len(results_int)], results_float[step % len(results_int)]
    ints, floats = (line[: len(slots)].zero_() for line in lines)
    for row, slot in enumerate(slots.tolist()):
        if slot == 0:
            continue
        state, (begin, end) = request_state[slot], starts[row : row + 2].tolist()
        first, guesses = (begin, step_tokens[begin + 1 : end]) if drafts else (row, tokens[:0])
        count = 0
        if emits[first]:
            limits = request_ints[slot]
            run = _run(guesses, tokens[first:], int(limits[table.FORCE_ACCEPT]), step)
            count = _emit(state, token_counts[slot], limits, run, logprobs[first:], stop_ids)
            kept = slice(first, first + count)
            _lay(ints[row, table.RESULT_HEADER :], run[:count], top_tokens[kept], most)
            _lay(floats[row], logprobs[kept], top_logprobs[kept], most)
        state[table.LENGTH] += count if drafts and count else end - begin
        header = [slot, count, state[table.FINISH], state[table.LENGTH], len(guesses)]
        ints[row, : table.RESULT_HEADER] = torch.tensor(header)
        if drafts:
            destinations = destination_slots[row], destination_offsets[row]
            _pass(snapshot_slots[slot], snapshot_lengths, destinations, lengths[row], state)


def _run(guesses: Tensor, tokens: Tensor, forced: int, step: int) -> Tensor:
    """Leading `guesses` that are the target's `tokens`, or as many as FORCE_ACCEPT says, and then
    the target's next one."""
    accepted = int((guesses == tokens[: len(guesses)]).int().cumprod(0).sum())
    if forced:
        accepted = min((forced - 1) >> (4 * (step % 2)) & 15, len(guesses))
    return torch.cat([guesses[:accepted], tokens[accepted : accepted + 1]])


def _emit(
    state: Tensor, counts: Tensor, ints: Tensor, run: Tensor, logprobs: Tensor, stop_ids: int
) -> int:
    """Emit the tokens of `run` up to the one that ends the request; how many were."""
    for place, token in enumerate(run.tolist()):
        state[table.LAST_TOKEN] = token
        state[table.GENERATED] += 1
        counts[token] += 1
        state[table.FINISH] = _finish(state, ints, logprobs[place], stop_ids)
        if state[table.FINISH]:
            return place + 1
    return len(run)


def _pass(
    waiting: Tensor,
    snapshot_lengths: Tensor,
    destinations: tuple[Tensor, Tensor],
    length: Tensor,
    state: Tensor,
) -> None:
    """Record the boundaries that the row has reached, and take them off its list `waiting`."""
    boundaries = [int(length) + offset for offset in destinations[1].tolist() if offset]
    passed = [boundary for boundary in boundaries if boundary <= int(state[table.LENGTH])]
    for slot, boundary in zip(destinations[0].tolist(), passed, strict=False):
        if slot:
            snapshot_lengths[slot] = boundary
    take(waiting, len(passed))


def _finish(state: Tensor, ints: Tensor, logprob: Tensor, stop_ids: int) -> Finish:
    """Why a row that has just emitted LAST_TOKEN ends, if it does."""
    if logprob.isnan():
        return Finish.NON_FINITE
    if state[table.LAST_TOKEN] in ints[table.INT_HEADER :][:stop_ids]:
        return Finish.STOP
    if state[table.GENERATED] >= ints[table.MAX_TOKENS]:
        return Finish.LENGTH
    return Finish.NONE


def _lay(line: Tensor, chosen: Tensor, top: Tensor, most: int) -> None:
    """Write the values of the chosen tokens [n], then of the top ones [n, top], each at its place
    among `most` tokens."""
    line[: len(chosen)] = chosen
    line[most : most + top.numel()] = top.flatten()
