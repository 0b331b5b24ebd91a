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
    rows, columns = logits.shape
    first = min(int(rank[0]) * columns, vocab)
    best = torch.tensor([-torch.inf, 0.0]).repeat(rows, 1)  # value, infinite if broken, and id
    for row in emits.nonzero().flatten().tolist():
        raw, slot = logits[row, : vocab - first], int(slots[row])
        if not raw.isfinite().all():
            best[row, 0] = torch.inf
        if len(raw) == 0 or best[row, 0] > 0:
            continue
        ints, floats = request_ints[slot], request_floats[slot]
        counts = counted(token_counts[slot], draft_tokens[slot, :depth])[:vocab]
        generated = int(request_state[slot, table.GENERATED]) + depth
        wanted = torch.zeros(vocab)
        wanted[first : first + len(raw)] = raw
        wanted = process(wanted, counts, generated, ints, floats, stop_ids, bias_ids)
        if (temperature := floats[table.TEMPERATURE]) != 0:
            position = int(lengths[row] + starts[row + 1] - starts[row]) + 1 + depth
            seed = ints[[table.SEED_LOW, table.SEED_HIGH]]
            wanted = wanted / temperature + gumbel(vocab, position, seed)
        own = wanted[first : first + len(raw)]
        best[row] = torch.stack([own.max(), own.argmax() + float(first)])
    parts = all_parts(best, peers, exchange, step_counter, rank, call, calls, world)
    given = torch.stack([part for part in parts if part is not None])
    for row in emits.nonzero().flatten().tolist():
        value, token = given[given[:, row, 0].argmax(), row].tolist()
        token = 0 if value == torch.inf else int(token)
        draft_tokens[int(slots[row]), depth] = token
        ids[int(starts[row + 1]) + row * drafts + depth] = token
