"""Which rows of a request a draft phase runs again: a number that plans need too, so without torch."""


def behind(drafts: int, most: int) -> int:
    """Rows before a request's new tokens that may have read drafts: K = `drafts` behind a chunk, whose
    next token the phase before did not know, K - 1 in a verify step (`most` > 0): it was sampled."""
    return drafts - 1 if most else drafts
