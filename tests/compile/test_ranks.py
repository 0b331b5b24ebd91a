"""The step over all ranks of the trained model: what one rank alone gives, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import tiny_config, write_random
from support.prompts import python_prompts
from support.ranks import Ranks, convert
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, LayerKind
from inkling_engine.compile.driver import Chunk, Guesses
from inkling_engine.compile.export import program_inputs
from inkling_engine.compile.options import DECODE_KIND
from inkling_engine.compile.plan import TINY
from inkling_engine.kernels import table
from inkling_engine.kernels._candidates import BUDGET

pytestmark = pytest.mark.usefixtures("native_library")

CLOSE = 1e-5
LENGTHS = (21, 1, 34)  # prompts of the three rows
STEPS = 6
PROMPT = Bucket(kind="extend", rows=1, tokens=LENGTHS[0])


class Traffic:
    """Three requests, the last sampled: prompts in two chunks, then rounds of whatever was drawn."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.rows = ranks, 3
        self.prompts = python_prompts(LENGTHS)
        self.done = [0, 0, 0]
        self.lines: list[list[int]] = []

    def prompt(self, size: int) -> list[Tensor]:
        """Up to `size` tokens of each prompt; the logits of each rank."""
        chunks = []
        for i, prompt in enumerate(self.prompts):
            part, start = prompt[self.done[i] : self.done[i] + size], self.done[i]
            sample = start + len(part) == len(prompt)
            snapshots = (4 + i,) if start else ()
            heat = 0.8 if i == 2 else 0.0
            chunks.append(Chunk(1 + i, start, part, not start, sample, heat, snapshots))
        chunks = [chunk for chunk in chunks if chunk.tokens]
        return self._step(Bucket(kind="extend", rows=self.rows, tokens=3 * size + 2), chunks)

    def round(self) -> list[Tensor]:
        """A token of each request, or a round on the drafts that the step before left."""
        drafts = self.ranks.spec.spec_depth
        guesses = Guesses((), 0) if drafts else None
        chunks = [Chunk(1 + i, start, guesses=guesses) for i, start in enumerate(self.done)]
        tokens = self.rows * (1 + drafts)
        bucket = Bucket(kind=DECODE_KIND[drafts > 0], rows=self.rows, tokens=tokens, drafts=drafts)
        return self._step(bucket, chunks)

    def _step(self, bucket: Bucket, chunks: Sequence[Chunk]) -> list[Tensor]:
        logits = self.ranks.step(bucket, chunks)
        ints, _ = self.ranks.machines[0].results(len(chunks))
        for chunk, line in zip(chunks, ints.tolist(), strict=True):
            most = max(line[table.RESULT_COUNT], 0 if chunk.tokens else 1)
            self.done[chunk.slot - 1] += chunk.count if chunk.tokens else most
            self.lines.append(line[: table.RESULT_HEADER + line[table.RESULT_COUNT]])
        return logits


def pair(folder: Path, scratch: Path, tp: int, **given: Any) -> tuple[Traffic, Traffic]:
    """The same traffic for one rank and for `tp`."""
    whole, split = (Traffic(convert(folder, scratch, ranks, **given)) for ranks in (1, tp))
    return whole, split


def require_equal(whole: Traffic, split: Traffic, expected: Tensor, found: list[Tensor]) -> None:
    """The ranks' columns are one rank's logits but for rounding; tokens are the same."""
    logits = torch.cat(found, 1)[:, : expected.shape[1]]
    assert torch.allclose(logits, expected, rtol=CLOSE, atol=CLOSE), (logits - expected).abs().max()
    assert split.lines == whole.lines
    for name, pools in split.ranks.replicated():
        assert all(torch.equal(pool, pools[0]) for pool in pools), name


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize(("tp", "native"), [(2, True), (4, True), (8, True), (4, False)])
def test_all_ranks_give_what_one_gives(tmp_path: Path, tp: int, native: bool, drafts: int) -> None:
    """Of the tiny model's 2 kv heads of full layers each is held by 2 of 4 ranks, and by 4 of 8."""
    whole, split = pair(TINY, tmp_path, tp, native=native, spec_depth=drafts)
    for size in (20, 16):
        require_equal(whole, split, whole.prompt(size)[0], split.prompt(size))
    for _ in range(STEPS):
        require_equal(whole, split, whole.round()[0], split.round())
    assert len(set(chain.from_iterable(whole.lines))) > 20
    _require_kv(whole.ranks, split.ranks)


@pytest.mark.parametrize(("tp", "native", "drafts"), [(2, True, 0), (4, True, 2), (2, False, 0)])
def test_filters_give_what_one_rank_gives(
    tmp_path: Path, tp: int, native: bool, drafts: int
) -> None:
    """From candidates, and from whole logits where a row asks for more of them than there are."""
    whole, split = pair(TINY, tmp_path, tp, native=native, spec_depth=drafts)
    for size in (20, 16):
        require_equal(whole, split, whole.prompt(size)[0], split.prompt(size))
    for machine in (*whole.ranks.machines, *split.ranks.machines):
        ints, floats = machine.pools["request_ints"], machine.pools["request_floats"]
        floats[1:, table.TEMPERATURE] = torch.tensor([1.5, 1.0, 0.8])
        floats[2, table.TOP_P], floats[3, table.MIN_P] = 0.9, 0.05
        ints[3, table.TOP_K] = 30
    before = 0
    for top_k in (BUDGET, 2 * tp * BUDGET):
        for machine in (*whole.ranks.machines, *split.ranks.machines):
            machine.pools["request_ints"][1, table.TOP_K] = top_k
        for _ in range(STEPS):
            require_equal(whole, split, whole.round()[0], split.round())
        counter = split.ranks.machines[0].pools["step_counter"]
        steps = int(counter[table.WHOLE_STEPS]) - before
        assert steps == STEPS if top_k > BUDGET else steps < STEPS
        before += steps
    assert whole.ranks.machines[0].pools["step_counter"][1:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("tp", [3, 6])
def test_any_number_of_ranks_that_divides(tmp_path: Path, tp: int) -> None:
    """6 heads over 3 kv heads in full layers and 1 in window layers; a last rank of unreal ids, drafts
    from less than two ranks' ids."""
    config = tiny_config()
    config["text_config"] |= {"num_attention_heads": 6, "num_key_value_heads": 3}
    config["text_config"] |= {"swa_num_attention_heads": 6, "swa_num_key_value_heads": 1}
    config["text_config"] |= {"vocab_size": 480, "unpadded_vocab_size": 317}
    folder = write_random(tmp_path / "six", config, seed=4)
    given: dict[str, Any] = {
        "native": True,
        "spec_depth": 2,
        "draft_vocab": 131,
        "extend_buckets": "128x3",
    }
    whole, split = pair(folder, tmp_path, tp, **given)
    for traffic in (whole, split):
        traffic.prompts = [[(7 * i + n) % 317 for i in range(n)] for n in LENGTHS]
    require_equal(whole, split, whole.prompt(40)[0], split.prompt(40))
    for _ in range(STEPS):
        require_equal(whole, split, whole.round()[0], split.round())


@pytest.mark.parametrize("tp", [2, 4])
def test_drawn_weights_are_shares_of_one_model(tmp_path: Path, tp: int) -> None:
    """Each rank draws its own, and all together give what one rank gives that draws all."""
    whole, split = pair(TINY, tmp_path, tp, native=True, drawn=3)
    for size in (20, 16):
        require_equal(whole, split, whole.prompt(size)[0], split.prompt(size))
    for _ in range(STEPS):
        require_equal(whole, split, whole.round()[0], split.round())
    assert len(set(chain.from_iterable(whole.lines))) > 12


def test_what_a_rank_would_have_given_is_missed(tmp_path: Path) -> None:
    """An absent rank is not waited for, and its part is in the answers."""
    whole, split = pair(TINY, tmp_path, 2, native=True)
    first = split.ranks.machines[0]
    first.pools["peers"].zero_()
    rows = first.rows(program_inputs(first.spec, PROMPT, ()), [Chunk(1, 0, whole.prompts[0], True)])
    alone = first.native(PROMPT, rows)[0]
    expected = whole.ranks.step(PROMPT, [Chunk(1, 0, whole.prompts[0], True)])[0][0]
    assert (alone - expected[:1024]).abs().max() > 1


def _require_kv(whole: Ranks, split: Ranks) -> None:
    """Keys and values of each rank are those of its heads."""
    shape = whole.spec.shape
    for name, kind in (("kv_full", shape.full), ("kv_window", shape.local)):
        for rank, machine in enumerate(split.machines):
            found, expected = machine.pools[name], whole.machines[0].pools[name]
            heads = expected[:, :, :, _heads(kind, len(split.machines), rank)]
            assert torch.allclose(found[:, 1:], heads[:, 1:], rtol=CLOSE, atol=CLOSE), (name, rank)


def _heads(kind: LayerKind, tp: int, rank: int) -> slice:
    first = rank * kind.kv_heads // tp
    return slice(first, first + max(1, kind.kv_heads // tp))
