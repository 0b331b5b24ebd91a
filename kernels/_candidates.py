"""What a rank gives of its columns of the logits, for `candidates` (stdlib only)."""

BUDGET = 64  # ids of each rank that rows with filters are drawn from
CLOSE = 1e-5  # of a mass: what sums in fp32, and exp, may be wrong by
EXACT = 1e-9  # of a mass: what sums of the same terms in fp64 may differ by
HEADER = 8  # words before the ids


def record_words(top: int, budget: int) -> int:
    """Words of 8 bytes that a rank gives for a sample."""
    return HEADER + 2 * top + 3 * budget
