"""Shapes, inputs and tolerances of draft sampling. Tokens are chosen: results are equal."""

import torch

from inkling_engine.kernels._case_drafts import LINES, ROUNDS
from inkling_engine.kernels._cases import Case, normal
from inkling_engine.kernels.sample.cases import BIAS_IDS, STOP_IDS, Request, counts, table_lines

_REQUESTS = [
    Request(),
    Request(temperature=0.9, top_k=1, seed=(4, 5)),
    Request(temperature=1.3, presence=2.0, repetition=1.4),
    Request(presence=3.0, frequency=2.0, bias=((7, 20.0), (46, 90.0))),
    Request(temperature=0.7, stops=(3, 5, 48), min_tokens=6, bias=((5, 30.0), (3, 25.0))),
    Request(temperature=1.0, top_p=0.1, min_p=0.5),
    Request(repetition=1.9),
]


def _case(name: str, depth: int, vocab: int, broken: int = -1, extra: int = 0) -> Case:
    """Logits over the first `vocab` of `extra` more tokens; row `broken` has one that is NaN."""
    spec = ROUNDS[name]
    meta, rows = spec.meta, len(spec.rows)
    logits = normal(rows, vocab, scale=2, seed=depth)
    if broken >= 0:
        logits[broken, vocab - 1] = torch.nan
    logits[meta.emits == 0] = torch.nan
    drafts = torch.randint(
        8, (LINES, spec.drafts), generator=torch.Generator().manual_seed(2), dtype=torch.int32
    )
    arguments = (
        logits,
        counts(LINES, vocab + extra),
        *table_lines(_REQUESTS),
        drafts,
        *(meta.ids, meta.slots, meta.starts, meta.lengths, meta.emits),
        *(depth, spec.drafts, STOP_IDS, BIAS_IDS),
    )
    return Case(f"{name}-{depth}-{vocab}", arguments, tolerance=0)


def cases() -> list[Case]:
    """First and last depths, a cut vocabulary, logits that are not finite, more than a chunk."""
    return [
        _case("verify", 0, 50),
        _case("verify", 2, 50, broken=1),
        _case("extend", 3, 40, extra=10),
        _case("extend", 0, 2040),
        _case("verify-one", 7, 150),
        _case("inert", 1, 50),
    ]
