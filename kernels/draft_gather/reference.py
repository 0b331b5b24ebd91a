"""Target hidden states of a draft phase's rows; see the package docstring."""

from torch import Tensor


def draft_gather(
    hidden: Tensor,
    draft_hidden: Tensor,
    token_rows: Tensor,
    hidden_rows: Tensor,
    sources: Tensor,
    starts: Tensor,
) -> Tensor:
    """Collect [T', H] from the step and the stash; see the package docstring."""
    gathered = hidden.new_zeros(len(token_rows), hidden.shape[1])
    for i in range(int(starts[-1])):
        row, behind = int(hidden_rows[i]), int(hidden_rows[i]) - len(hidden)
        stash = draft_hidden[int(sources[token_rows[i]])]
        gathered[i] = hidden[row] if behind < 0 else stash[behind]
    return gathered
