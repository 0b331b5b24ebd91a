"""Launches that exchange, in Triton's interpreter, with what the peers gave written beforehand.

It runs one program after another, so ranks cannot run at once. A child process runs this file, since
Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from kernels.test_candidates import Rows
from kernels.test_exchange import (
    CALLS,
    COLUMNS,
    STEP,
    TOKENS,
    UNSURE,
    VOCAB,
    WIDTH,
    ordered_sum,
    part,
)
from kernels.test_ops import assert_close
from support.launches import interpreted
from torch import Tensor

from inkling_engine.kernels import _exchange, _exchange_poll, _exchange_triton
from inkling_engine.kernels._case_rows import INERT, Row, Step
from inkling_engine.kernels._cases import normal
from inkling_engine.kernels._exchange import (
    CONTROL,
    ERROR,
    FLAGS,
    HEADER,
    LIMIT,
    PHASES,
    exchange_words,
    half_words,
    slot_words,
)
from inkling_engine.kernels._exchange_launches import pushed, summed
from inkling_engine.kernels._op import Op
from inkling_engine.kernels._triton import launches, meta
from inkling_engine.kernels.boundary import boundary
from inkling_engine.kernels.candidates import candidates
from inkling_engine.kernels.draft_input import draft_input
from inkling_engine.kernels.embed_norm import embed_norm
from inkling_engine.kernels.gather_logits import gather_logits
from inkling_engine.kernels.sample.cases import BIAS_IDS, FILTERS, STOP_IDS, TOP

pytest.importorskip("triton", reason="needs Triton")

WORLD, OWN, COUNTER = 4, 1, 7
SEGMENT = TOKENS * WIDTH // WORLD
ALONE = Step((Row(1, 9, 2), INERT, Row(2, 1), INERT), bucket_tokens=TOKENS)  # one launch, if pushed
STEPS = (STEP, ALONE)
Blocks = list[Tensor]


def slot_of(block: Tensor, call: int, source: int) -> Tensor:
    """Where rank `source` pushes in `call`."""
    sequence, slot = COUNTER * CALLS + call + 1, slot_words(len(block), WORLD)
    line = sequence % 2 * WORLD + source
    return block[HEADER + 2 * half_words(len(block), WORLD) + line * slot :][:slot]


def bits_of(part: Tensor) -> Tensor:
    """The elements of `part` as they are pushed: none has zero bits."""
    kind = torch.int16 if part.dtype == torch.bfloat16 else torch.int32
    bits = part.flatten().view(kind)
    return bits.where(bits != 0, torch.iinfo(kind).min)


def blocks_before(call: int, given: list[Tensor], pushed: bool, flag: int = PHASES) -> Blocks:
    """Every rank's block; as if the peers had published, or pushed, `given` in `call`."""
    sequence = COUNTER * CALLS + call + 1
    words = exchange_words(4 * TOKENS * WIDTH, WORLD if pushed else 0)
    blocks = [torch.zeros(words, dtype=torch.int64) for _ in given]
    for rank, one in enumerate(given):
        if rank != OWN and pushed:
            bits = bits_of(one)
            slot_of(blocks[OWN], call, rank).view(bits.dtype)[: len(bits)] = bits
        elif rank != OWN:
            part_of(blocks[rank], call, one.dtype)[: one.numel()] = one.flatten()
            blocks[rank][CONTROL : CONTROL + FLAGS] = flag * sequence
        blocks[rank][LIMIT] = 5  # polls, in the interpreter
    return blocks


def part_of(block: Tensor, call: int, dtype: torch.dtype) -> Tensor:
    """The half of `call` in a block without slots."""
    sequence = COUNTER * CALLS + call + 1
    return block[HEADER + sequence % 2 * half_words(len(block), 0) :].view(dtype)


def segments_summed(blocks: Blocks, call: int, given: list[Tensor], there: Sequence[int]) -> None:
    """What ranks other than this one have done with their segments of a sum, of those `there`."""
    total = torch.zeros(given[0].shape)
    for rank in there:
        total += given[rank].float()
    for rank in set(there) - {OWN}:
        segment = slice(rank * SEGMENT, (rank + 1) * SEGMENT)
        part_of(blocks[rank], call, given[0].dtype)[segment] = total.flatten()[segment]
        blocks[rank][CONTROL : CONTROL + FLAGS] += 1


def ranks(blocks: Blocks, absent: int | None = None) -> tuple[Tensor, ...]:
    """peers, exchange, step_counter, rank of the rank that is run."""
    addresses = [0 if r == absent else block.data_ptr() for r, block in enumerate(blocks)]
    peers = torch.tensor([*addresses, *[0] * (8 - len(blocks))])
    return peers, blocks[OWN], torch.tensor([COUNTER, 0, 0, 0]), torch.tensor([OWN, 0, 0, 0]).int()


def calls_of(dtype: torch.dtype) -> list[tuple[Op, int, list[Tensor], list[Any], list[Any]]]:
    """(op, call, what each rank gives, arguments before and after those of the exchange)."""
    table, norm = normal(WORLD * VOCAB, WIDTH, dtype=dtype), 1 + normal(WIDTH, dtype=dtype)
    tokens = torch.tensor([3, 2 * VOCAB + 1, WORLD * VOCAB - 1, VOCAB], dtype=torch.int32)
    rows = torch.zeros(TOKENS, dtype=torch.int32), torch.tensor([0, TOKENS], dtype=torch.int32)
    owners = tokens.long() // VOCAB
    held = [table[tokens.long()].where((owners == r)[:, None], 0) for r in range(WORLD)]
    mine = table[OWN * VOCAB : (OWN + 1) * VOCAB]
    x = [part(r, 0, dtype) for r in range(WORLD)]
    logits = [normal(TOKENS, COLUMNS, seed=r) for r in range(WORLD)]
    steps = [
        [x[OWN], x[0], normal(WIDTH, 4), norm, step.rings(1, 3, WIDTH, dtype)] for step in STEPS
    ]
    for values, step in zip(steps, STEPS, strict=True):
        values += [step.token_rows, step.slots, step.sources, step.starts, step.lengths]
        values += step.destinations
    norms, draft = (norm, norm, norm), (-1, CALLS, 1e-6, WORLD, True)
    return [
        (embed_norm, 0, held, [tokens, mine, norm], [0, CALLS, 1e-6, WORLD]),
        (boundary, 1, x, steps[0], [0, 1, CALLS, 1e-6, WORLD]),
        (boundary, 2, x, steps[1], [0, 2, CALLS, 1e-6, WORLD]),
        (gather_logits, 2, logits, [logits[OWN], UNSURE], [2, CALLS, WORLD, WORLD * COLUMNS - 3]),
        (draft_input, -1, held, [x[0], tokens, mine, *norms, *rows], [0, 0, *draft]),
    ]  # fmt: skip


def compare(
    op: Op, call: int, given: list[Tensor], before: list[Any], after: list[Any], absent: int | None,
    late: int | None, pushed: bool,
) -> None:  # fmt: skip
    """The launch and the reference on the same peers' parts: results, what is given, error word."""

    def run(how: Callable[..., Any], pushed: bool, flag: int) -> tuple[list[Tensor], Blocks]:
        blocks = blocks_before(call, given, pushed, flag)
        if op is boundary and flag == PHASES and not pushed:
            segments_summed(
                blocks, call, given, [r for r in range(WORLD) if r not in (absent, late)]
            )
        if pushed and (silent := late or absent) is not None:
            slot_of(blocks[OWN], call, silent).zero_()
        elif late is not None:
            blocks[late][CONTROL : CONTROL + FLAGS] -= 1
        copies = [one.clone() if isinstance(one, Tensor) else one for one in before]
        found = how(*copies, *ranks(blocks, absent), *after)
        return list(found) if isinstance(found, tuple) else [found], blocks

    (wanted, theirs), (found, ours) = run(op.reference, False, 1), run(op.launch, pushed, PHASES)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 8e-3 if one.dtype == torch.bfloat16 else 1e-6)
    assert int(ours[OWN][ERROR]) == int(theirs[OWN][ERROR]) == (0 if late is None else 1 + late)
    if pushed:
        published(call, given[OWN], ours, absent)
        return
    summed, sequence = op is boundary, COUNTER * CALLS + call + 1
    assert int(ours[OWN][CONTROL]) == PHASES * sequence + summed, "another sequence is published"
    left = given[OWN].flatten().clone()
    if summed:
        there = [part for r, part in enumerate(given) if r not in (absent, late)]
        segment = slice(OWN * SEGMENT, (OWN + 1) * SEGMENT)
        left[segment] = ordered_sum(there).flatten()[segment]
    assert torch.equal(part_of(ours[OWN], call, left.dtype)[: len(left)], left), "another part"


def published(call: int, own: Tensor, blocks: Blocks, absent: int | None) -> None:
    """Every peer that is there has this rank's part and nothing else; what came is cleaned away."""
    assert not blocks[OWN][HEADER:].any(), "a slot is not clean"
    for rank, block in enumerate(blocks):
        if rank not in (OWN, absent):
            slot, bits = slot_of(block, call, OWN), bits_of(own)
            assert torch.equal(slot.view(bits.dtype)[: len(bits)], bits), "another part is pushed"
            slot.zero_()
            assert not block[HEADER:].any(), "something else is pushed"


def a_flag_is_one_programs() -> None:
    """The part of a program whose flag has not come is not read."""
    op, call, given, before, after = calls_of(torch.float32)[3]
    blocks = blocks_before(call, given, pushed=False)
    blocks[3][CONTROL + 1] -= 1
    whole = op.launch(*before, *ranks(blocks), *after)
    wanted = torch.cat(given, 1)[:, :-3]
    same = (whole == wanted).all(0)
    assert same[: 3 * COLUMNS].all() and not same[3 * COLUMNS :].all()
    lost = torch.arange(TOKENS * COLUMNS).view(TOKENS, COLUMNS)[:, :-3]
    assert torch.equal((whole != wanted)[:, 3 * COLUMNS :], (lost >= 1024) & (lost < 2048))
    assert int(blocks[OWN][ERROR]) == 4


def what_a_program_misses_is_absent() -> None:
    """All that a rank pushed to a program, of which one element has not come (compiled, to a thread)."""
    op, call, given, before, after = calls_of(torch.float32)[1]
    found = []
    for lost in (slice(WIDTH + 6, WIDTH + 7), slice(WIDTH, 2 * WIDTH)):
        blocks = blocks_before(call, given, pushed=True)
        slot_of(blocks[OWN], call, 3).view(torch.int32)[lost] = 0
        copies = [one.clone() if isinstance(one, Tensor) else one for one in before]
        found.append(op.launch(*copies, *ranks(blocks), *after)[1])
        assert int(blocks[OWN][ERROR]) == 4
    assert torch.equal(found[0], found[1])


def a_sum_comes_piece_by_piece() -> None:
    """Over two ranks: two programs of four pieces, of which the other rank's second one has two."""
    x = [normal(7, 8192, seed=r) for r in range(2)]
    words, sequence = exchange_words(x[0].nbytes), COUNTER * CALLS + 2
    blocks = [torch.zeros(words, dtype=torch.int64) for _ in x]
    part_of(blocks[OWN], 1, torch.float32)[: x[0].numel()] = x[0].flatten()
    blocks[0][CONTROL : CONTROL + 2] = torch.tensor([3, 1]) + PHASES * sequence
    blocks[OWN][LIMIT] = 5
    peers, block, counter, own = ranks(blocks)
    with mock.patch.object(_exchange_triton, "FLAGS", 2):
        y = summed(x[OWN], (peers, block, counter, own), 1, CALLS, 2)
    wanted = x[0] + x[1]
    wanted[5] = x[1][5]
    assert torch.equal(y, wanted)
    assert torch.equal(part_of(blocks[0], 1, y.dtype)[: y.numel()], x[OWN].flatten())
    assert blocks[OWN][CONTROL : CONTROL + 2].tolist() == [PHASES * sequence + 3] * 2
    assert int(blocks[OWN][ERROR]) == 1


def a_sum_without_the_other_rank_is_its_own() -> None:
    """Over two ranks of which the other is absent, and nothing is waited for."""
    for dtype in (torch.float32, torch.bfloat16):
        x = normal(7, 8192, dtype=dtype)
        blocks = [torch.zeros(exchange_words(x.nbytes), dtype=torch.int64) for _ in range(2)]
        peers, block, counter, own = ranks(blocks, 0)
        assert torch.equal(summed(x, (peers, block, counter, own), 1, CALLS, 2), x)
        assert int(blocks[OWN][ERROR]) == 0


def test_rows_of_whole_vectors_are_pushed() -> None:
    block = torch.empty(exchange_words(1 << 12, 2), dtype=torch.int64, device="meta")
    for width, whole in ((40, True), (37, False)):
        part = torch.empty(4, width, dtype=torch.bfloat16, device="meta")
        assert pushed(part, block, 2) == whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [16, 64, 192, 1024, 4096, 6144, 16384])
@pytest.mark.parametrize("rows", [1, 8, 17, 128])
def test_no_other_warp_polls_a_vector(rows: int, width: int, dtype: torch.dtype) -> None:
    """What a warp has polled it zeroes, so another one could wait for it for ever."""
    block = meta(exchange_words(dtype.itemsize * 256 * width, 2), dtype=torch.int64)
    ranks = (
        meta(8, dtype=torch.int64),
        block,
        meta(4, dtype=torch.int64),
        meta(4, dtype=torch.int32),
    )
    ids, starts = meta(rows, dtype=torch.int32), meta(rows + 1, dtype=torch.int32)
    given, norm = meta(rows, width, dtype=dtype), meta(width, dtype=dtype)
    rings, taps = meta(3, 9, 3, width, dtype=dtype), meta(width, 4, dtype=torch.float32)
    rows_of = ids, ids, ids, starts, ids, meta(rows, 1, dtype=torch.int32)
    state = given, taps, norm, rings, *rows_of, rows_of[-1]
    cases = launches("embed", embed_norm.launch, ids, given, norm, *ranks, 0, 86, 1e-6, 2)
    cases += launches("boundary", boundary.launch, given, *state, *ranks, 3, 7, 86, 1e-6, 2)
    cases += launches("sum", summed, given, ranks, 7, 86, 2)
    polling = [case for case in cases if re.search(r"\btotal\(", case.kernel.src)]
    assert polling or not pushed(given, block, 2)
    for case in polling:
        vectors = case.constexprs["BLOCK"] * dtype.itemsize // _exchange_poll.VECTOR.value
        assert case.num_warps == 1 or vectors >= 32 * case.num_warps, case.name


def candidates_are_all_ranks() -> None:
    """Each rank gives its records alone, then one reads them all: the tokens of whole logits, where it
    says that they are proven. A rank left out is missed."""
    for budget, vocab in ((8, 230), (64, 200), (16, 4200)):
        logits = normal(len(FILTERS), vocab, scale=3)
        rows = Rows(logits, FILTERS, -(-vocab // WORLD) + 3, budget)
        blocks = [
            torch.zeros(exchange_words(1 << 16, WORLD), dtype=torch.int64) for _ in range(WORLD)
        ]
        sizes, step = (STOP_IDS, BIAS_IDS, TOP, 0), (*rows.tables, *rows.step, rows.emits)
        numbers = budget, 2, CALLS, WORLD, vocab
        for r in [rank for rank in range(WORLD) if rank != OWN] + [OWN]:
            peers, _, counter, own = ranks(blocks)
            own[0] = r
            if r != OWN:
                peers.zero_()
            arguments = rows.part(r), *step, *sizes, peers, blocks[r], counter, own, *numbers
            found = candidates.launch(*arguments)
        wanted, sure = rows.whole(native=False), found[4] == 0
        assert sure.any() and (budget == 64) <= sure.all()
        assert torch.equal(found[0][sure], wanted[0][sure])
        assert torch.equal(found[2], wanted[2])
        assert_close(found[1][sure], wanted[1][sure], 1e-5)
        assert_close(found[3], wanted[3], 1e-5)
        assert counter[2:].tolist() == ([0, 0] if sure.all() else [int((~sure).sum()), COUNTER + 1])


def test_assembly_is_written_into_programs_as_it_is() -> None:
    """Inductor escapes nothing in a kernel's constants, which it writes between quotes."""
    texts = [str(getattr(one, "value", "")) for one in vars(_exchange_poll).values()]
    waits = [text for text in texts if "poll:" in text]
    assert len(waits) == 6
    assert not any(character in text for character in "'\\\n" for text in waits)


def main() -> None:
    """All ops: with all peers, one absent, one that never comes."""
    from support.interpreter import repair_interpreter

    repair_interpreter()
    compared = 0
    for most in (1 << 18, 0):
        _exchange.MOST_PUSHED = most
        for dtype in (torch.float32, torch.bfloat16):
            for absent, late in ((None, None), (2, None), (None, 3)):
                for call in calls_of(dtype):
                    if most == 0 or call[0] is not gather_logits:
                        compare(*call, absent, late, pushed=most > 0)
                        compared += 1
        if most == 0:
            a_flag_is_one_programs()
            a_sum_comes_piece_by_piece()
            a_sum_without_the_other_rank_is_its_own()
            candidates_are_all_ranks()
        else:
            what_a_program_misses_is_absent()
    print(compared, "calls")


def test_launches_read_what_the_peers_gave() -> None:
    assert interpreted(__file__).splitlines()[-1] == "54 calls"


if __name__ == "__main__":
    main()
