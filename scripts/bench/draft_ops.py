"""Cases of the ops of a draft phase, behind verify steps of 8 drafts of which half are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from bench.timing import copies_for
from bench.token_ops import work
from bench.work import Case, Target, Work, kind_of
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._cases import Ranks
from inkling_engine.kernels.draft_candidates import draft_candidates
from inkling_engine.kernels.draft_commit import draft_commit
from inkling_engine.kernels.draft_gather import draft_gather
from inkling_engine.kernels.draft_input import draft_input
from inkling_engine.kernels.draft_metadata import DraftMeta, draft_metadata
from inkling_engine.kernels.draft_metadata.reference import draft_metadata as told
from inkling_engine.kernels.draft_sample import draft_sample
from inkling_engine.kernels.sample import sample

CONTEXT, DRAFTS, KEPT, PAGE_SIZE = 1024, 8, 4, 64
STOP_IDS, BIAS_IDS, TOP = 8, 32, 20


def cases(target: Target, rows: int) -> Iterator[Case]:
    """The cases of `rows` requests; an extend step's draft phase is not timed."""
    if kind_of(rows) == "decode":
        makers = [
            ("draft_metadata", "", metadata_work),
            ("draft_gather", "", gather_work),
            ("draft_input", "", input_work),
            ("draft_sample", "", sample_work),
            ("draft_candidates", "", candidates_work),
            ("draft_commit", "", commit_work),
            ("sample", "verify", verify_work),
        ]
        for op, name, make in makers:
            yield Case(op, name, rows, 0, partial(make, Rounds(target, rows)))


@dataclass
class Rounds:
    """`rows` requests behind a verify step, in slots 1, 2, ... of their own."""

    target: Target
    rows: int

    @cached_property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """Those of `draft_metadata`."""
        rows, given, device = self.rows, 1 + DRAFTS, self.target.device
        row = torch.arange(rows + 1, dtype=torch.int32)
        width = 2 + CONTEXT // PAGE_SIZE
        pages = torch.arange(1, 1 + (rows + 1) * width, dtype=torch.int32).view(-1, width)
        recent = torch.randint(100, (rows + 1, DRAFTS), dtype=torch.int32)
        tokens = torch.randint(100, (rows * given,), dtype=torch.int32)
        slots, lengths = row[1:], torch.full((rows,), CONTEXT, dtype=torch.int32)
        none = torch.zeros(rows, 1, dtype=torch.int32)
        tables = self.state.cpu(), pages, pages, recent
        step = tokens, slots, slots, row * given, lengths, none, none, torch.ones_like(tokens)
        sizes = PAGE_SIZE, DRAFTS, given
        return (*(tensor.to(device) for tensor in (*tables, *step)), *sizes)

    @cached_property
    def state(self) -> Tensor:
        """request_state behind the step."""
        state = torch.zeros(self.rows + 1, table.STATE_WIDTH, dtype=torch.int32)
        state[:, table.LENGTH], state[:, table.LAST_TOKEN] = CONTEXT + KEPT, 7
        return state.to(self.target.device)

    @cached_property
    def meta(self) -> DraftMeta:
        """What `draft_metadata` says of the rows."""
        values = [v.cpu() if isinstance(v, Tensor) else v for v in self.arguments]
        device = self.target.device
        return DraftMeta(*(t.to(device) for t in told(*values)))  # type: ignore[arg-type]

    @cached_property
    def request(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """token_counts, state, ints and floats of requests that sample at temperature 0.8."""
        lines, vocab, device = self.rows + 1, self.target.shape.vocab, self.target.device
        ints = torch.zeros(lines, table.INT_HEADER + STOP_IDS + BIAS_IDS, dtype=torch.int32)
        ints[:, table.INT_HEADER : table.INT_HEADER + STOP_IDS] = table.INERT_TOKEN
        ints[:, table.TOP_LOGPROBS], ints[:, table.DRAFT_LIMIT] = TOP, DRAFTS
        ints[:, table.SEED_LOW] = torch.arange(lines)
        floats = torch.zeros(lines, table.FLOAT_HEADER + BIAS_IDS)
        floats[:, table.TEMPERATURE] = 0.8
        floats[:, table.TOP_P] = floats[:, table.REPETITION] = 1
        counts = torch.zeros(lines, vocab, dtype=torch.int32, device=device)
        return counts, self.state, ints.to(device), floats.to(device)


def metadata_work(rounds: Rounds) -> Work:
    """All rows go on."""
    moved = 40 * rounds.rows * (1 + 3 * DRAFTS)
    return work(draft_metadata, [rounds.arguments] * 4, moved, 0, "cpu")


def gather_work(rounds: Rounds) -> Work:
    """Rows of the step and of the stash."""
    target, meta, width = rounds.target, rounds.meta, rounds.target.shape.hidden
    moved = 4 * width * len(meta.token_rows)
    which = meta.token_rows, meta.hidden_rows, meta.sources, meta.starts
    calls = [
        (
            target.normal(rounds.rows * (1 + DRAFTS), width),
            target.normal(rounds.rows + 1, DRAFTS, width),
            *which,
        )
        for _ in range(copies_for(moved))
    ]
    return work(draft_gather, calls, moved, 0, target.device)


def input_work(rounds: Rounds) -> Work:
    """The third depth, with the backbone's norm."""
    target, meta, s = rounds.target, rounds.meta, rounds.target.shape
    packed, embedding = len(meta.token_rows), target.normal(s.vocab, s.hidden)
    ranks = [tensor.to(target.device) for tensor in Ranks().tensors]
    norms = [target.near_one(s.hidden) for _ in range(3)]
    moved = 8 * packed * s.hidden
    rows = meta.token_rows, meta.starts, *ranks
    sizes = 2, DRAFTS, 0, 1, s.eps, 1, True
    calls = [
        (target.normal(packed, s.hidden), meta.ids, embedding, *norms, *rows, *sizes)
        for _ in range(copies_for(moved))
    ]
    return work(draft_input, calls, moved, 0, target.device)


def sample_work(rounds: Rounds) -> Work:
    """Rows at a temperature, at the fourth depth."""
    moved = 4.0 * rounds.rows * rounds.target.shape.vocab
    return work(draft_sample, sample_calls(rounds), moved, 0, "cpu", unequal=0.02)


def candidates_work(rounds: Rounds) -> Work:
    """The same on the first of several ranks; the others, absent, have nothing to read."""
    target = rounds.target
    ranks = [tensor.to(target.device) for tensor in Ranks(target.tp).tensors]
    numbers = 0, 1, target.tp, target.shape.vocab
    calls = [(*call, *ranks, *numbers) for call in sample_calls(rounds)]
    moved = 4.0 * rounds.rows * target.shape.vocab
    return work(draft_candidates, calls, moved, 0, "cpu", unequal=0.02)


def sample_calls(rounds: Rounds) -> list[tuple[Any, ...]]:
    """Arguments of `draft_sample`, each time over other logits."""
    target, meta, vocab = rounds.target, rounds.meta, rounds.target.shape.vocab
    moved = 4 * rounds.rows * vocab
    drafts = torch.zeros(rounds.rows + 1, DRAFTS, dtype=torch.int32, device=target.device)
    rows = meta.slots, meta.starts, meta.lengths, meta.emits
    return [
        (
            target.normal(rounds.rows, vocab, dtype=torch.float32, scale=3),
            *rounds.request,
            *(drafts.clone(), meta.ids.clone(), *rows),
            *(3, DRAFTS, STOP_IDS, BIAS_IDS),
        )
        for _ in range(min(8, copies_for(moved)))
    ]


def commit_work(rounds: Rounds) -> Work:
    """Stash and recent tokens of every row; no snapshot."""
    target, meta, width = rounds.target, rounds.meta, rounds.target.shape.hidden
    moved = 4 * rounds.rows * DRAFTS * width
    recent = torch.zeros(rounds.rows + 1, DRAFTS, dtype=torch.int32, device=target.device)
    rows = meta.ids, meta.slots, meta.starts, meta.lengths
    snapshots = meta.destination_slots, meta.destination_offsets
    calls = [
        (
            *(rounds.state.clone(), target.normal(rounds.rows + 1, DRAFTS, width), recent.clone()),
            *(rounds.request[2], target.normal(len(meta.token_rows), width)),
            *(*rows, *snapshots, meta.emits, DRAFTS),
        )
        for _ in range(copies_for(moved))
    ]
    return work(draft_commit, calls, moved, 0, target.device)


def verify_work(rounds: Rounds) -> Work:
    """The target's tokens behind a root and 8 drafts of each row."""
    target, vocab = rounds.target, rounds.target.shape.vocab
    tokens, slots, _, starts, lengths = rounds.arguments[4:9]
    at = torch.arange(rounds.rows * (1 + DRAFTS), dtype=torch.int32, device=target.device)
    rows = at // (1 + DRAFTS)
    moved = 4 * len(at) * vocab
    calls = [
        (
            target.normal(len(at), vocab, dtype=torch.float32, scale=3),
            *rounds.request,
            *(tokens, rows, slots, starts, lengths, at, torch.ones_like(at)),
            *(STOP_IDS, BIAS_IDS, min(TOP, vocab), DRAFTS),
        )
        for _ in range(min(8, copies_for(moved)))
    ]
    return work(sample, calls, moved, 0, "cpu", unequal=0.02)
