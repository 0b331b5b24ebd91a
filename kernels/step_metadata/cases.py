"""States, rows and one-shot lines of step metadata. Everything is an integer: results are equal."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inkling_engine.kernels import table
from inkling_engine.kernels._cases import Case

LINES, SLOTS = 7, 12  # slots 1..6 live, 7..11 snapshots
INTS, FLOATS, VOCAB = table.INT_HEADER + 3, table.FLOAT_HEADER + 1, 50
WIDTH, RING, WAITING = 8, 3, 4
PAGE_SIZE, GRID = 4, 8
GARBAGE = 0x5A5A5A5A  # what line 0 holds


class Row(NamedTuple):
    """One row of a step and the state of its slot."""

    slot: int
    tokens: int
    length: int = 0
    flags: int = 0
    source: int = 0
    finish: int = table.Finish.NONE
    prompt: int = 1000
    drafts: int = 0  # valid ones
    left: int = 1000  # tokens that may still be generated


class Step(NamedTuple):
    """The rows of a step in a bucket of `tokens`, with the one-shot lines it applies."""

    rows: list[Row]
    tokens: int
    admissions: Sequence[tuple[int, int, int]] = ()  # slot, length, generated
    pages: Sequence[tuple[int, int, int, int]] = ()  # table, slot, index, page
    snapshots: Sequence[tuple[int, list[int]]] = ()  # slot, destinations
    destinations: int = 1
    drafts: int = 0
    fed: Sequence[int] = ()  # the first ids; the others are drawn


_DECODE = table.SAMPLE | table.FROM_TABLE
_MANY = [
    Row(3, 13, length=5, flags=table.SAMPLE),
    Row(1, 1, length=9, flags=_DECODE),
    Row(0, 0),
    Row(2, 2, length=30, source=9),
    Row(5, 3, length=0, prompt=2),
    Row(4, 0, length=11, flags=table.SAMPLE),
]
_VERIFY = [
    Row(3, 1, length=5, flags=_DECODE, drafts=3),
    Row(1, 1, length=9, flags=_DECODE, drafts=7, source=8),
    Row(0, 0),
    Row(2, 1, length=30, flags=_DECODE, drafts=3, left=2),
    Row(5, 1, length=14, flags=_DECODE, drafts=0),
    Row(4, 1, length=7, flags=table.SAMPLE, drafts=2),
    Row(6, 1, length=11, flags=table.FROM_TABLE, drafts=2),
]
_STEPS = {
    "one-decode": Step([Row(2, 1, length=6, flags=_DECODE)], tokens=1),
    "one-extend": Step([Row(6, 5, length=14, flags=table.SAMPLE)], tokens=16, destinations=2),
    "decode": Step([Row(s, 1, length=3 * s + 1, flags=_DECODE) for s in (4, 2, 6, 1)], tokens=4),
    "mixed": Step(_MANY, tokens=24, destinations=3),
    "full-bucket": Step(_MANY, tokens=19, destinations=2),
    "no-live-rows": Step([Row(0, 0), Row(0, 0)], tokens=8),
    "finished": Step(
        [
            Row(1, 2, length=7, finish=table.Finish.STOP, flags=table.SAMPLE),
            Row(2, 3, length=2),
            Row(3, 1, length=5, finish=table.Finish.LENGTH, flags=_DECODE),
            Row(4, 1, length=8, flags=_DECODE),
        ],
        tokens=8,
    ),
    "one-shot": Step(
        [Row(3, 6, flags=table.SAMPLE), Row(1, 1, length=17, flags=_DECODE)],
        tokens=8,
        admissions=[(3, 4, 2), (5, 0, 0)],
        pages=[(table.FULL_TABLE, 3, 1, 21), (table.WINDOW_TABLE, 3, 2, 22), (0, 6, 7, 23)],
        snapshots=[(3, [10, 0, 0, 0]), (1, [7, 8, 9, 10])],
    ),
    "crossings": Step(
        [Row(1, 33, length=7), Row(2, 9, length=8), Row(3, 8, length=0), Row(4, 7, length=0)],
        tokens=64,
        snapshots=[(1, [7, 0, 8, 9]), (2, [10, 11, 0, 0]), (3, [0, 7, 0, 0]), (4, [9, 0, 0, 0])],
        destinations=6,
    ),
    "ring": Step(
        [Row(1, 21, length=2), Row(2, 1, length=12, flags=_DECODE)], tokens=24, destinations=3
    ),
    "verify": Step(_VERIFY, tokens=28, drafts=3, snapshots=[(1, [0, 9, 0, 0])]),
    "verify-one": Step([Row(2, 1, length=6, flags=_DECODE, drafts=8)], tokens=9, drafts=8),
    "verify-last": Step(
        [
            Row(4, 1, length=15, flags=_DECODE, drafts=2, left=1),
            Row(2, 1, length=15, flags=_DECODE, drafts=2, left=0),
            Row(1, 1, length=4, flags=_DECODE, drafts=1, finish=table.Finish.STOP),
            Row(3, 0, length=4, flags=_DECODE, drafts=1),
        ],
        tokens=12,
        drafts=2,
    ),
    "extend-drops-drafts": Step(
        [Row(3, 6, flags=table.SAMPLE), Row(1, 1, length=17, flags=_DECODE, drafts=1)], tokens=8
    ),
    "replay": Step([Row(1, 9, length=3, prompt=7, flags=table.SAMPLE)], tokens=16, destinations=2),
    "no-ids": Step(
        [Row(1, 9, length=3, prompt=7, flags=table.SAMPLE)],
        tokens=16,
        destinations=2,
        fed=[-1, VOCAB, 3, 3, 3, -1, VOCAB],  # before and after the prompt's end
    ),
}


def cases() -> list[Case]:
    """Decode and extend rows, inert and finished ones, one-shot lines, crossings, the ring."""
    return [Case(name, arguments(step), tolerance=0) for name, step in _STEPS.items()]


def arguments(step: Step, seed: int = 0) -> tuple[Tensor | int, ...]:
    """The op's arguments: seeded tables, garbage in line 0 and in unused one-shot lines."""
    generator = torch.Generator().manual_seed(seed)

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    state, request_ints = ints(VOCAB, LINES, table.STATE_WIDTH), ints(9, LINES, INTS)
    counts, drafts = ints(3, LINES, VOCAB), ints(VOCAB, LINES, max(1, step.drafts))
    full, window = ints(40, LINES, WIDTH), ints(40, LINES, RING)
    snapshots, snapshot_lengths = 7 + ints(5, LINES, WAITING), ints(9, SLOTS)
    floats = torch.rand(LINES, FLOATS, generator=generator)
    for tensor in (state, request_ints, counts, full, window, snapshots, drafts):
        tensor[0] = GARBAGE
    floats[0] = torch.nan
    state[1:, table.FINISH] = 0
    for row in step.rows:
        if row.slot:
            state[row.slot, table.LENGTH], state[row.slot, table.FINISH] = row.length, row.finish
            state[row.slot, table.DRAFTS] = row.drafts
            request_ints[row.slot, table.PROMPT_LENGTH] = row.prompt
            generated = state[row.slot, table.GENERATED]
            request_ints[row.slot, table.MAX_TOKENS] = generated + row.left
    pools = (state, request_ints, floats, counts, full, window, snapshots, snapshot_lengths, drafts)
    fed = sum(row.tokens for row in step.rows)
    token_ids = torch.cat([ints(60, fed), ints(1, step.tokens - fed)])
    token_ids[: len(step.fed)] = torch.tensor(step.fed, dtype=torch.int32)
    columns = zip(*((r.slot, r.tokens, r.source, r.flags) for r in step.rows), strict=True)
    rows = [torch.tensor(column, dtype=torch.int32) for column in columns]
    one_shot = _one_shot_lines(step, len(step.rows), generator)
    return (*pools, *rows, token_ids, *one_shot, PAGE_SIZE, GRID, step.destinations, step.drafts)


def _one_shot_lines(step: Step, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    admit_ints = torch.full((rows, table.ADMIT_HEADER + INTS), GARBAGE, dtype=torch.int32)
    admit_floats = torch.full((rows, FLOATS), torch.nan)
    updates = 2 * (step.tokens // PAGE_SIZE + 2 * rows)
    page_updates = torch.full((updates, 4), GARBAGE, dtype=torch.int32)
    snapshot_updates = torch.full((rows, 1 + WAITING), GARBAGE, dtype=torch.int32)
    admit_ints[:, 0] = page_updates[:, 1] = snapshot_updates[:, 0] = 0
    for line, header in enumerate(step.admissions):
        columns = torch.randint(9, (INTS,), generator=generator, dtype=torch.int32)
        admit_ints[line] = torch.cat([torch.tensor([*header, 0], dtype=torch.int32), columns])
        admit_floats[line] = torch.rand(FLOATS, generator=generator)
    for line, update in enumerate(step.pages):
        page_updates[line] = torch.tensor(update, dtype=torch.int32)
    for line, (slot, waiting) in enumerate(step.snapshots):
        snapshot_updates[line] = torch.tensor([slot, *waiting], dtype=torch.int32)
    return admit_ints, admit_floats, page_updates, snapshot_updates
