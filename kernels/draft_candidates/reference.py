"""The guess of a draft depth by several ranks; see the package docstring."""

import torch
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._exchange import all_parts
from inkling_engine.kernels.sample.reference import counted, gumbel, process


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
    first = min(int(rank[0]) * logits.shape[1], vocab)
    emitting = emits.nonzero().flatten().tolist()
    best = torch.tensor([-torch.inf, 0.0]).repeat(
        len(logits), 1
    )  # value, infinite if broken, and id
    for row in emitting:
        slot = int(slots[row])
        lines = request_ints[slot], request_floats[slot]
        counts = counted(token_counts[slot], draft_tokens[slot, :depth])[:vocab]
        generated = int(request_state[slot, table.GENERATED]) + depth
        position = int(lengths[row] + starts[row + 1] - starts[row]) + 1 + depth
        values = _values(logits[row], first, counts, generated, position, lines, stop_ids, bias_ids)
        if len(values):
            best[row] = torch.stack([values.max(), values.argmax() + float(first)])
    parts = all_parts(best, peers, exchange, step_counter, rank, call, calls, world)
    given = torch.stack([part for part in parts if part is not None])
    for row in emitting:
        value, token = given[given[:, row, 0].argmax(), row].tolist()
        token = 0 if value == torch.inf else int(token)
        draft_tokens[int(slots[row]), depth] = token
        ids[int(starts[row + 1]) + row * drafts + depth] = token


def _values(
    raw: Tensor,
    first: int,
    counts: Tensor,
    generated: int,
    position: int,
    lines: tuple[Tensor, Tensor],
    stop_ids: int,
    bias_ids: int,
) -> Tensor:
    """What the ids from `first` on are chosen by, as far as `counts` [vocab]; infinite ones if a logit
    is not finite."""
    (ints, floats), vocab = lines, len(counts)
    own = slice(first, min(first + len(raw), vocab))
    raw = raw[: vocab - first]
    if not raw.isfinite().all():
        return torch.full_like(raw, torch.inf)
    wanted = torch.zeros(vocab)
    wanted[own] = raw
    wanted = process(wanted, counts, generated, ints, floats, stop_ids, bias_ids)
    if (temperature := floats[table.TEMPERATURE]) != 0:
        seed = ints[[table.SEED_LOW, table.SEED_HIGH]]
        wanted = wanted / temperature + gumbel(vocab, position, seed)
    return wanted[own]
