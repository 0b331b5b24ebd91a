"""Sampling from candidates; see the package docstring.

A record is fp64: how many ids the rank has, then what the names below say; the best id, the top raw
logits and the candidates are (value, id) or (value, id, raw logit), values being logits / T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._candidates import CLOSE, EXACT, HEADER, record_words
from inkling_engine.kernels._exchange import all_parts
from inkling_engine.kernels.sample.reference import counted, gumbel, process

IDS, BROKEN, MAXIMUM, SUM, MASS, BEST = range(6)


class Draw(NamedTuple):
    """A choice from candidates: the id, its raw logit, whether it is proven."""

    token: int
    raw: float
    sure: bool


class Place(NamedTuple):
    """A sample's line of the request table, what its row has generated, and where it will stand."""

    ints: Tensor
    floats: Tensor
    counts: Tensor
    generated: int
    position: int

    @property
    def filtered(self) -> bool:
        """Whether it samples with min-p, top-k or top-p."""
        floats, top_k = self.floats, int(self.ints[table.TOP_K])
        filters = floats[table.MIN_P] > 0 or floats[table.TOP_P] < 1 or top_k > 0
        return bool(filters and floats[table.TEMPERATURE] != 0)

    def noise(self, vocab: int) -> Tensor:
        """[vocab] f32."""
        return gumbel(vocab, self.position, self.ints[[table.SEED_LOW, table.SEED_HIGH]])


def candidates(
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
    peers: Tensor,
    exchange: Tensor,
    step_counter: Tensor,
    rank: Tensor,
    budget: int,
    call: int,
    calls: int,
    world: int,
    vocab: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens and logprobs of a step, where they are proven; see the package docstring."""
    samples, columns = logits.shape
    state = token_counts, request_state, request_ints, request_floats
    step = tokens, token_rows, slots, starts, lengths, sample_rows
    places = {s: _place(s, *state, *step, drafts) for s in emits.nonzero().flatten().tolist()}
    own = torch.zeros(samples, record_words(top, budget), dtype=torch.float64)
    first = min(int(rank[0]) * columns, vocab)
    for s, place in places.items():
        raw = logits[s, : vocab - first]
        wanted = torch.zeros(vocab)
        wanted[first : first + len(raw)] = raw
        wanted = process(wanted, *place[2:4], *place[:2], stop_ids, bias_ids)
        own[s] = _record(raw, wanted[first : first + len(raw)], place, first, top, budget)
    parts = all_parts(own, peers, exchange, step_counter, rank, call, calls, world)
    chosen, tops = tokens.new_zeros(samples), tokens.new_zeros(samples, top)
    logprobs, top_logprobs = torch.zeros(samples), torch.zeros(samples, top)
    results = chosen, logprobs, tops, top_logprobs, torch.zeros_like(chosen)
    for s, place in places.items():
        if records := [part[s] for part in parts if part is not None and part[s, IDS] > 0]:
            lines = [result[s] for result in results]
            _choose(torch.stack(records), place, lines, top, budget, vocab)
    _count(step_counter, int(results[-1].sum()))
    return results


def _place(
    s: int,
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
    drafts: int,
) -> Place:
    """That of sample `s`."""
    at = int(sample_rows[s])
    row = int(token_rows[at])
    slot, begin = int(slots[row]), int(starts[row])
    ahead = tokens[begin + 1 : at + 1] if drafts else tokens[:0]
    return Place(
        request_ints[slot],
        request_floats[slot],
        counted(token_counts[slot], ahead),
        int(request_state[slot, table.GENERATED]) + len(ahead),
        int(lengths[row]) + at - begin + 1,
    )


def _count(step_counter: Tensor, unsure: int) -> None:
    """Count so many unsure samples of a step."""
    if unsure:
        step_counter[table.WHOLE_STEPS] += 1
        step_counter[table.WHOLE_SAMPLES] += unsure
        step_counter[table.LAST_WHOLE] = step_counter[table.STEPS] + 1


def _record(raw: Tensor, wanted: Tensor, place: Place, first: int, top: int, budget: int) -> Tensor:
    """What this rank gives of a sample with the logits `raw`, processed ones `wanted`."""
    record = torch.zeros(record_words(top, budget), dtype=torch.float64)
    record[IDS] = len(raw)
    if len(raw) == 0:
        return record
    record[BROKEN] = not raw.isfinite().all()
    record[MAXIMUM] = raw.max()
    record[SUM] = (raw - raw.max()).exp().sum()
    best = raw.sort(descending=True, stable=True).indices[:top]
    tops = record[HEADER : HEADER + 2 * top].view(top, 2)
    tops[: len(best)] = torch.stack([raw[best].double(), best + first], 1)
    temperature = place.floats[table.TEMPERATURE]
    scaled = wanted if temperature == 0 else wanted / temperature
    if place.filtered:
        order = scaled.sort(descending=True, stable=True).indices[:budget]
        ids = record[HEADER + 2 * top :].view(budget, 3)
        ids[: len(order)] = torch.stack([scaled[order].double(), order + first, raw[order]], 1)
        record[MASS] = (scaled - scaled.max()).exp().double().sum()
    elif temperature != 0:
        scaled = scaled + place.noise(first + len(raw))[first:]
    at = int(scaled.argmax())
    record[BEST : BEST + 3] = torch.stack(
        [scaled[at].double(), raw.new_tensor(at + first), raw[at]]
    )
    return record


def _choose(
    records: Tensor, place: Place, results: list[Tensor], top: int, budget: int, vocab: int
) -> None:
    """Write a sample's `results` from the ranks' `records` [ranks, words]."""
    chosen, logprob, top_tokens, top_logprobs, unsure = results
    wanted = max(0, min(int(place.ints[table.TOP_LOGPROBS]), top))
    if records[:, BROKEN].any():
        logprob.fill_(torch.nan)
        top_logprobs[:wanted] = torch.nan
        return
    highest = records[:, MAXIMUM].max()
    total = (records[:, SUM] * (records[:, MAXIMUM] - highest).exp()).sum()
    normaliser = highest + total.log()
    best = _in_order(records[:, BEST : BEST + 3])[0].tolist()
    draw = Draw(int(best[1]), best[2], True)
    if place.filtered:
        draw = _draw(records, place, top, budget, vocab)
    unsure.fill_(not draw.sure)
    if draw.sure:
        chosen.fill_(draw.token)
        logprob.fill_(float(draw.raw - normaliser))
    given = records[:, IDS].clamp(max=top).int().tolist()
    tops = records[:, HEADER : HEADER + 2 * top].unflatten(1, (top, 2))
    pairs = _in_order(torch.cat([pair[:n] for pair, n in zip(tops, given, strict=True)]))[:wanted]
    top_tokens[: len(pairs)] = pairs[:, 1].int()
    top_logprobs[: len(pairs)] = (pairs[:, 0] - normaliser).float()


def _in_order(entries: Tensor) -> Tensor:
    """Entries (value, id, ...) by descending value, then ascending id."""
    entries = entries[entries[:, 1].argsort()]
    return entries[entries[:, 0].sort(descending=True, stable=True).indices]


def _draw(records: Tensor, place: Place, top: int, budget: int, vocab: int) -> Draw:
    """The choice of a row with filters."""
    entries, known = _known(records, top, budget)
    values, ids = entries[:, 0].float(), entries[:, 1].long()
    if not values[0].isfinite():
        return Draw(0, 0.0, False)
    min_p, top_k = float(place.floats[table.MIN_P]), int(place.ints[table.TOP_K])
    top_p = float(place.floats[table.TOP_P])
    weights = (values - values[0]).exp()
    kept = (weights >= min_p) & (values > -torch.inf)
    sure = closed = (
        known
        or 0 < top_k <= len(kept)
        or float(weights[-1]) < min_p * (1 - CLOSE)
        or float(values[-1]) == -torch.inf
    )
    if top_k > 0:
        kept[top_k:] = False
    if top_p < 1:
        share = weights.where(kept, 0).double()
        whole, error = share.sum(), EXACT
        if not closed:
            best = records[:, HEADER + 2 * top]
            whole, error = (records[:, MASS] * (best - values[0]).exp()).sum(), CLOSE
            sure = min_p == 0 and top_k <= 0 and bool(share.sum() > (top_p + error) * whole)
        before = share.cumsum(0) - share
        near = kept & ((before - top_p * whole).abs() <= error * whole)
        sure = sure and not near[1:].any()
        kept &= before < top_p * whole
        kept[0] = True
    noisy = (values + place.noise(vocab)[ids])[kept]
    token = int(ids[kept][noisy == noisy.max()].min())
    return Draw(token, float(entries[ids == token, 2]), sure)


def _known(records: Tensor, top: int, budget: int) -> tuple[Tensor, bool]:
    """The candidates in order down to the first one behind which a rank may have left out one that
    would come next; whether none was left out."""
    lists = records[:, HEADER + 2 * top :].unflatten(1, (budget, 3))
    counts = records[:, IDS].int().tolist()
    entries = _in_order(torch.cat([one[:n] for one, n in zip(lists, counts, strict=True)]))
    last = [one[-1, 1] for one, n in zip(lists, counts, strict=True) if n > budget]
    ends = [int((entries[:, 1] == token).nonzero()[0]) for token in last]
    return entries[: 1 + min(ends, default=len(entries) - 1)], not ends
