"""The guess of a draft depth; see the package docstring."""

from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels.sample.reference import counted, gumbel, process


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
    for row in emits.nonzero().flatten().tolist():
        raw, slot, frontier = logits[row], int(slots[row]), int(starts[row + 1])
        token = 0
        if raw.isfinite().all():
            ints, floats = request_ints[slot], request_floats[slot]
            counts = counted(token_counts[slot], draft_tokens[slot, :depth])[: len(raw)]
            generated = int(request_state[slot, table.GENERATED]) + depth
            wanted = process(raw, counts, generated, ints, floats, stop_ids, bias_ids)
            if (temperature := floats[table.TEMPERATURE]) != 0:
                position = int(lengths[row]) + frontier - int(starts[row]) + 1 + depth
                seed = ints[[table.SEED_LOW, table.SEED_HIGH]]
                wanted = wanted / temperature + gumbel(len(raw), position, seed)
            token = int(wanted.argmax())
        draft_tokens[slot, depth] = ids[frontier + row * drafts + depth] = token
