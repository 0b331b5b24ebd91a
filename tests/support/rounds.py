"""Requests decoded token by token, and the same ones in a verify step, by the table's ops alone.

The model is a function of a request's tokens so far. `plain` keeps the tables after each step, so
that a verify step can be held to the plain step that emitted as many tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._cases import normal
from inkling_engine.kernels._op import Op
from inkling_engine.kernels.commit import commit
from inkling_engine.kernels.sample import sample
from inkling_engine.kernels.step_metadata import StepMeta, step_metadata

VOCAB, STOP_IDS, BIAS_IDS, TOP = 13, 2, 2, 3
PAGE, WIDTH, RING, WAITING, SLOTS = 4, 12, 5, 3, 24
FIRST_SNAPSHOT = 8
_FLOATS = ("TEMPERATURE", "TOP_P", "MIN_P", "PRESENCE", "FREQUENCY", "REPETITION")

Tables = dict[str, Tensor]


@dataclass(frozen=True)
class Draw:
    """One request: `length` tokens of state, then the root; `agree` drafts will be right."""

    length: int = 5
    generated: int = 1
    max_tokens: int = 1000
    min_tokens: int = 0
    top_k: int = 0
    floats: tuple[float, ...] = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    stops: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    top: int = TOP
    seed: int = 1
    broken: int = -1  # logits behind this position are not finite
    agree: int = 0
    valid: int = 99  # drafts that are there, at most K
    force: int = 0


def history(draw: Draw) -> list[int]:
    """The request's tokens up to and with the root."""
    tokens = torch.randint(VOCAB, (draw.length + 1,), generator=_seeded(draw.seed))
    return [int(token) for token in tokens]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(draw: Draw, tokens: Sequence[int]) -> Tensor:
    """Logits [V] behind `tokens`, which begin with position 0."""
    logits = normal(VOCAB, scale=2.0, seed=hash((draw.seed, *tokens)))
    if draw.broken == len(tokens) - 1:
        logits[3] = torch.nan
    return logits


def altered(op: Op, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Within the block the op's reference is `change`, which gets the right one and the arguments
    by name."""
    right = op.reference
    names = list(inspect.signature(right).parameters)

    def wrong(*values: Any) -> Any:
        return change(lambda a: right(*a.values()), dict(zip(names, values, strict=True)))

    @contextmanager
    def planted() -> Iterator[None]:
        object.__setattr__(op, "reference", wrong)
        try:
            yield
        finally:
            object.__setattr__(op, "reference", right)

    return planted()


@dataclass(frozen=True)
class Fed:
    """Tokens that a step of no drafts is given by slot, where each starts, and who samples."""

    tokens: Mapping[int, Sequence[int]]
    sources: Mapping[int, int]
    sampled: frozenset[int]

    def rows(self, count: int) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """row_slots, row_counts, row_sources and row_flags [count], and the bucket's token ids."""
        live = sorted(self.tokens)
        columns = torch.zeros(4, count, dtype=torch.int32)
        for row, slot in enumerate(live):
            flag = table.SAMPLE if slot in self.sampled else 0
            line = [slot, len(self.tokens[slot]), self.sources.get(slot, 0), flag]
            columns[:, row] = torch.tensor(line)
        ids = [token for slot in live for token in self.tokens[slot]]
        slots, counts, sources, flags = columns
        return (slots, counts, sources, flags), torch.tensor([*ids, 0, 0], dtype=torch.int32)


@dataclass
class Batch:
    """Rows of requests at slots 1, 2, ... with an inert row in front, in steps of K drafts."""

    draws: Sequence[Draw]
    drafts: int
    grid: int
    tables: Tables = field(init=False)

    def __post_init__(self) -> None:
        lines, row = 1 + len(self.draws), 1 + self.drafts
        ints = table.INT_HEADER + STOP_IDS + BIAS_IDS
        self.tables = {
            "request_state": _garbage(lines, table.STATE_WIDTH),
            "request_ints": _garbage(lines, ints),
            "request_floats": torch.full((lines, table.FLOAT_HEADER + BIAS_IDS), torch.nan),
            "token_counts": _garbage(lines, VOCAB),
            "full_table": torch.randint(1, 50, (lines, WIDTH)).int(),
            "window_table": torch.randint(1, 50, (lines, RING)).int(),
            "snapshot_slots": _garbage(lines, WAITING),
            "snapshot_lengths": torch.zeros(SLOTS, dtype=torch.int32),
            "draft_tokens": torch.randint(VOCAB, (lines, self.drafts)).int(),
            "results_int": _garbage(2, lines, table.RESULT_HEADER + row * (1 + TOP)),
            "results_float": torch.full((2, lines, row * (1 + TOP)), torch.nan),
            "step_counter": torch.tensor([4, 0, 0, 0]),
        }
        for slot, draw in enumerate(self.draws, start=1):
            self._admit(slot, draw)

    def _admit(self, slot: int, draw: Draw) -> None:
        state = {
            table.LENGTH: draw.length,
            table.LAST_TOKEN: history(draw)[-1],
            table.GENERATED: draw.generated,
            table.DRAFTS: min(draw.valid, self.drafts),
        }
        self.tables["request_state"][slot] = 0
        for column, value in state.items():
            self.tables["request_state"][slot, column] = value
        ints, floats = self.tables["request_ints"][slot], self.tables["request_floats"][slot]
        ints[table.MAX_TOKENS], ints[table.MIN_TOKENS] = draw.max_tokens, draw.min_tokens
        ints[table.TOP_K], ints[table.TOP_LOGPROBS] = draw.top_k, draw.top
        ints[table.SEED_LOW], ints[table.SEED_HIGH] = draw.seed, 7
        ints[table.FORCE_ACCEPT], ints[table.DRAFT_LIMIT] = draw.force, self.drafts
        stops = (*draw.stops, table.INERT_TOKEN, table.INERT_TOKEN)[:STOP_IDS]
        biased = (*draw.bias, (0, 0.0), (0, 0.0))[:BIAS_IDS]
        ints[table.INT_HEADER :] = torch.tensor([*stops, *(token for token, _ in biased)])
        for name, number in zip(_FLOATS, draw.floats, strict=True):
            floats[getattr(table, name)] = number
        floats[table.FLOAT_HEADER :] = torch.tensor([value for _, value in biased])
        counts = torch.tensor(history(draw)).bincount(minlength=VOCAB)
        self.tables["token_counts"][slot] = counts.int()
        destinations = FIRST_SNAPSHOT + WAITING * slot + torch.arange(WAITING, dtype=torch.int32)
        destinations[draw.seed % WAITING] = 0
        self.tables["snapshot_slots"][slot] = destinations

    def set_drafts(self, slot: int, tokens: Sequence[int]) -> None:
        """The drafts that the next verify step of `slot` finds."""
        self.tables["draft_tokens"][slot, : len(tokens)] = torch.tensor(tokens).int()

    def metadata(self, drafts: int, fed: Fed | None = None) -> StepMeta:
        """The step's metadata: every slot fed from the table, and sampled; or what is `fed`."""
        rows = 1 + len(self.draws)
        slots = torch.arange(rows, dtype=torch.int32)
        flags = (slots > 0).int() * (table.SAMPLE | table.FROM_TABLE)
        given = slots, (slots > 0).int(), torch.zeros_like(slots), flags
        tokens, destinations = _zeros(rows * (1 + drafts)), 1
        if fed is not None:
            given, tokens = fed.rows(rows)
            destinations = (len(tokens) - 1) // self.grid + 1
        ints, floats = self.tables["request_ints"], self.tables["request_floats"]
        admissions = torch.zeros(rows, table.ADMIT_HEADER + ints.shape[1], dtype=torch.int32)
        one_shot = admissions, torch.zeros(rows, floats.shape[1]), _zeros(1, 4), _zeros(rows, 4)
        pools = list(self.tables.values())[:9]
        sizes = PAGE, self.grid, destinations, drafts
        return StepMeta(*step_metadata(*pools, *given, tokens, *one_shot, *sizes))

    def step(self, drafts: int, known: Sequence[Sequence[int]], fed: Fed | None = None) -> StepMeta:
        """One step of `drafts` drafts; `known` are the requests' tokens, at least those processed."""
        meta = self.metadata(drafts, fed)
        logits = torch.zeros(len(meta.emits), VOCAB)
        for s in meta.emits.nonzero().flatten().tolist():
            at = int(meta.sample_rows[s])
            row = int(meta.token_rows[at])
            slot, begin = int(meta.slots[row]), int(meta.starts[row])
            processed = known[slot - 1][: int(meta.lengths[row])]
            tokens = [*processed, *meta.tokens[begin : at + 1].tolist()]
            logits[s] = model(self.draws[slot - 1], tokens)
        self.finish(meta, logits, drafts)
        return meta

    def finish(self, meta: StepMeta, logits: Tensor, drafts: int) -> None:
        """Sample from `logits` [samples, V], and commit."""
        t = self.tables
        lines = (t[name] for name in ("token_counts", "request_state", "request_ints"))
        placed = meta.tokens, meta.token_rows, meta.slots, meta.starts, meta.lengths
        emitting = meta.sample_rows, meta.emits
        limits = STOP_IDS, BIAS_IDS, TOP, drafts
        chosen = sample(logits, *lines, t["request_floats"], *placed, *emitting, *limits)
        destinations = meta.destination_slots, meta.destination_offsets
        rows = meta.tokens, meta.slots, meta.starts, meta.lengths, meta.emits, *destinations
        results = t["results_int"], t["results_float"], t["step_counter"]
        snapshots = t["snapshot_slots"], t["snapshot_lengths"]
        written = t["request_state"], t["token_counts"], *results, *snapshots
        commit(*written, t["request_ints"], *chosen, *rows, STOP_IDS, drafts)

    def result(self, slot: int) -> Result:
        """The last step's result line of `slot`."""
        line = (int(self.tables["step_counter"][0]) - 1) % 2
        ints, floats = (self.tables[f"results_{kind}"][line, slot] for kind in ("int", "float"))
        most = 1 + self.drafts
        header, tokens, top = ints.split([table.RESULT_HEADER, most, most * TOP])
        logprobs, top_logprobs = floats.split([most, most * TOP])
        tops = top.view(most, TOP), top_logprobs.view(most, TOP)
        return Result(header.tolist(), tokens, logprobs, *tops)


@dataclass(frozen=True)
class Result:
    """A result line: the header and what was emitted, [1 + K] and [1 + K, top]."""

    header: list[int]
    tokens: Tensor
    logprobs: Tensor
    top: Tensor
    top_logprobs: Tensor

    def emitted(self, at: int) -> list[Any]:
        """Token, logprob, top tokens and top logprobs of the emitted token `at`; NaN as None."""
        values = [self.logprobs[at].item(), *self.top_logprobs[at].tolist()]
        numbers = [None if value != value else value for value in values]  # noqa: PLR0124
        return [int(self.tokens[at]), numbers, self.top[at].tolist()]


@dataclass
class Plain:
    """What plain decoding does: after each step the tables, and what each slot emitted."""

    tables: list[Tables]
    emitted: list[list[list[Any]]]  # by slot - 1, then by step


def plain(draws: Sequence[Draw], drafts: int, grid: int, steps: int) -> Plain:
    """Decode `steps` tokens of each request one by one."""
    batch = Batch(draws, drafts, grid)
    known, kept = [history(draw) for draw in draws], Plain([clone(batch.tables)], [])
    kept.emitted = [[] for _ in draws]
    for _ in range(steps):
        batch.step(0, known)
        kept.tables.append(clone(batch.tables))
        for slot in range(1, 1 + len(draws)):
            result = batch.result(slot)
            if result.header[table.RESULT_COUNT]:
                kept.emitted[slot - 1].append(result.emitted(0))
                known[slot - 1].append(int(result.tokens[0]))
    return kept


def clone(tables: Tables) -> Tables:
    """A copy of every table."""
    return {name: tensor.clone() for name, tensor in tables.items()}


def _garbage(*shape: int) -> Tensor:
    return torch.full(shape, 0x5A5A5A5A, dtype=torch.int32)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)
