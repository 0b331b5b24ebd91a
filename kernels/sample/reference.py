"""Sampling: penalties, filters, counter-based Gumbel noise; see the package docstring."""

import torch
from torch import Tensor

from inkling_engine.kernels import table

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def sample(
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
    emits: Tensor,
    stop_ids: int,
    bias_ids: int,
    top: int,
    drafts: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and logprobs of a step; see the package docstring."""
    samples = len(logits)
    chosen, logprobs = torch.zeros(samples, dtype=torch.int32), torch.zeros(samples)
    top_tokens = torch.zeros(samples, top, dtype=torch.int32)
    top_logprobs = torch.zeros(samples, top)
    for s in emits.nonzero().flatten().tolist():
        raw, at = logits[s], int(sample_rows[s])
        row = int(token_rows[at])
        slot, begin = int(slots[row]), int(starts[row])
        ints, floats = request_ints[slot], request_floats[slot]
        wanted_top = max(0, min(int(ints[table.TOP_LOGPROBS]), top))
        if not raw.isfinite().all():
            logprobs[s] = top_logprobs[s, :wanted_top] = torch.nan
            continue
        ahead = tokens[begin + 1 : at + 1] if drafts else tokens[:0]
        counts = counted(token_counts[slot], ahead)
        generated = int(request_state[slot, table.GENERATED]) + len(ahead)
        wanted = process(raw, counts, generated, ints, floats, stop_ids, bias_ids)
        chosen[s] = token = choose(wanted, int(lengths[row]) + at - begin + 1, ints, floats)
        all_logprobs = raw.log_softmax(0)
        logprobs[s] = all_logprobs[token]
        best = raw.sort(descending=True, stable=True).indices[:wanted_top]
        top_tokens[s, :wanted_top], top_logprobs[s, :wanted_top] = best, all_logprobs[best]
    return chosen, logprobs, top_tokens, top_logprobs


def counted(counts: Tensor, ahead: Tensor) -> Tensor:
    """`counts` [V] as they will be when the drafts `ahead` have been accepted."""
    return counts.index_add(0, ahead.long(), torch.ones_like(ahead))


def process(
    raw: Tensor,
    counts: Tensor,
    generated: int,
    ints: Tensor,
    floats: Tensor,
    stop_ids: int,
    bias_ids: int,
) -> Tensor:
    """Logits [V] of one row after bias, stop mask and penalties (order of the package docstring)."""
    logits = raw.clone()
    ids = ints[table.INT_HEADER + stop_ids :][:bias_ids].tolist()
    for token, value in zip(ids, floats[table.FLOAT_HEADER :][:bias_ids].tolist(), strict=True):
        if value != 0 and token < len(logits):
            logits[token] += value
    if generated < int(ints[table.MIN_TOKENS]):
        stops = ints[table.INT_HEADER :][:stop_ids]
        logits[stops[stops < len(logits)].long()] = -torch.inf
    repetition = floats[table.REPETITION]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts != 0, repeated, logits)
    output = counts & (table.PROMPT_SEEN - 1)
    return logits - floats[table.FREQUENCY] * output - floats[table.PRESENCE] * (output > 0)


def choose(logits: Tensor, position: int, ints: Tensor, floats: Tensor) -> int:
    """The token of one row with processed `logits` [V], to stand at `position`."""
    temperature = floats[table.TEMPERATURE]
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits / temperature
    kept = filtered(
        scaled, float(floats[table.MIN_P]), int(ints[table.TOP_K]), float(floats[table.TOP_P])
    )
    noise = gumbel(len(logits), position, ints[[table.SEED_LOW, table.SEED_HIGH]])
    return int((scaled + noise).where(kept, -torch.inf).argmax())


def filtered(scaled: Tensor, min_p: float, top_k: int, top_p: float) -> Tensor:
    """Which of the logits `scaled` [V] pass min-p, top-k and top-p, as bool [V]."""
    order = scaled.sort(descending=True, stable=True).indices
    weights = (scaled[order] - scaled.max()).exp()
    kept = (weights >= min_p) & (scaled[order] > -torch.inf)
    if top_k > 0:
        kept[top_k:] = False
    if top_p < 1:
        share = weights.where(kept, 0).double()  # fp64: a long vocabulary's sums must not drift
        kept &= share.cumsum(0) - share < top_p * share.sum()
        kept[0] = True
    return torch.zeros_like(kept).scatter(0, order, kept)


def gumbel(vocab: int, position: int, seed: Tensor) -> Tensor:
    """Standard Gumbel noise [vocab] f32 of the tokens at `position` under `seed` [2] i32."""
    words = philox(torch.arange(vocab), position, int(seed[0]) & _WORD, int(seed[1]) & _WORD)
    uniform = ((words[0].float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-uniform)).log()


def philox(
    first: Tensor, second: int, key0: int, key1: int, third: int = 0, fourth: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10 (Salmon et al. 2011) of the counters (first, second, third, fourth).

    `first` is int64 of 32-bit words, any shape; the four output words have its shape.
    """
    c = first, first.new_tensor(second), first.new_tensor(third), first.new_tensor(fourth)
    for step in range(_ROUNDS):
        k0, k1 = (
            (key + step * weyl) & _WORD for key, weyl in zip((key0, key1), _WEYL, strict=True)
        )
        low, high = c[0] * _MULTIPLIERS[0], c[2] * _MULTIPLIERS[1]  # modulo 2^64
        c = (
            (high >> 32 & _WORD) ^ c[1] ^ k0,
            high & _WORD,
            (low >> 32 & _WORD) ^ c[3] ^ k1,
            low & _WORD,
        )
    shape = first.shape
    return c[0].expand(shape), c[1].expand(shape), c[2].expand(shape), c[3].expand(shape)
