"""A row's results are the same bits whatever the batch: its size, the row's place, its neighbours.

Each op runs once over all tokens; then over subsets of them in any order, in batches of every size
that another code path could serve. Line 0 of the request table may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from inkling_engine.kernels._cases import Ranks, normal
from inkling_engine.kernels.embed_norm import embed_norm
from inkling_engine.kernels.experts import experts
from inkling_engine.kernels.head import head
from inkling_engine.kernels.linear import linear
from inkling_engine.kernels.moe import moe
from inkling_engine.kernels.router import router
from inkling_engine.kernels.router.cases import ROUTE_SCALE, Gate, gate_weights
from inkling_engine.kernels.step_metadata import StepMeta, step_metadata
from inkling_engine.kernels.step_metadata.cases import Row, Step, arguments
from inkling_engine.kernels.swiglu import swiglu

pytestmark = pytest.mark.usefixtures("native_library")

TOKENS = 512
SIZES = (1, 2, 3, 4, 5, 8, 9, 10, 17, 64, TOKENS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
Run = Callable[[Tensor], Tensor]  # token indices [n] -> their results [n, ...]


def bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers: NaN equals NaN, and 0 differs from -0."""
    return tensor.contiguous().view(torch.int16)


def assert_batch_invariant(run: Run) -> None:
    """Shuffled subsets of every size give the bits of the whole batch."""
    whole = run(torch.arange(TOKENS))
    generator = torch.Generator().manual_seed(1)
    for size in SIZES:
        for _ in range(3):
            some = torch.randperm(TOKENS, generator=generator)[:size]
            assert torch.equal(bits(run(some)), bits(whole[some])), f"differs in a batch of {size}"


@DTYPES
@pytest.mark.parametrize(("depth", "columns"), [(192, 640), (37, 70), (24, 23)])
def test_linear(depth: int, columns: int, dtype: torch.dtype) -> None:
    x = normal(TOKENS, depth, dtype=dtype)
    weight = normal(columns, depth, dtype=dtype)
    assert_batch_invariant(lambda some: linear(x[some], weight))


@DTYPES
def test_swiglu(dtype: torch.dtype) -> None:
    x, scale = normal(TOKENS, 2 * 37, dtype=dtype), torch.tensor([0.7])
    assert_batch_invariant(lambda some: swiglu(x[some], scale))


@DTYPES
def test_embed_norm(dtype: torch.dtype) -> None:
    embeddings, weight = normal(TOKENS, 192, dtype=dtype), normal(192, dtype=dtype)
    rest = *Ranks().tensors, 0, 1, 1e-6, 1
    assert_batch_invariant(lambda some: embed_norm(some.int(), embeddings, weight, *rest))


@DTYPES
def test_head(dtype: torch.dtype) -> None:
    x, weight = normal(TOKENS, 192, dtype=dtype), normal(301, 192, dtype=dtype)

    def run(some: Tensor) -> Tensor:
        logits: Tensor = head(x, weight, some.int(), torch.ones_like(some).int(), 0.25, 300)
        return logits

    assert_batch_invariant(run)


@DTYPES
@pytest.mark.parametrize("gate", [Gate(192, 8, 2, 2), Gate(37, 40, 1, 3)], ids=["tiny", "odd"])
@pytest.mark.parametrize("padding", [0, 3])
def test_router_and_experts(gate: Gate, padding: int, dtype: torch.dtype) -> None:
    y, weights = normal(TOKENS, gate.hidden, dtype=dtype), gate_weights(gate, dtype)
    count, width = gate.routed + gate.shared, 21
    w13 = normal(count, 2 * width, gate.hidden, dtype=dtype, scale=0.1)
    w2 = normal(count, gate.hidden, width, dtype=dtype, scale=0.1)

    def run(some: Tensor) -> Tensor:
        tokens = torch.cat([y[some], y.new_full((padding, gate.hidden), torch.nan)])
        starts = torch.tensor([0, len(some)], dtype=torch.int32)
        chosen, mixed, places = router(
            tokens, *weights, starts, gate.top_k, gate.shared, ROUTE_SCALE
        )
        out = experts(tokens, w13, w2, chosen, mixed, places, starts)
        sizes = gate.top_k, gate.shared, ROUTE_SCALE
        assert torch.equal(moe(tokens, *weights, w13, w2, starts, *sizes), out)
        results = torch.cat([chosen.view(torch.float32), mixed, places.float(), out.float()], dim=1)
        assert not results[len(some) :].any(), "padded tokens are not zero"
        return results[: len(some)]

    assert_batch_invariant(run)


PER_TOKEN = ("tokens", "positions", "full_locations", "window_locations")
PER_ROW = ("slots", "sources", "lengths", "destination_slots", "destination_offsets", "emits")
ROWS = [Row(3, 13, length=5, flags=1), Row(1, 1, length=9, flags=3), Row(5, 3, prompt=2), Row(2, 9)]


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_metadata_of_a_row_ignores_its_neighbours(row: int) -> None:
    together = arguments(Step(ROWS, tokens=32, destinations=3))
    begin = sum(other.tokens for other in ROWS[:row])
    columns = [column[row : row + 1] for column in together[9:13] if isinstance(column, Tensor)]
    assert isinstance(together[13], Tensor)
    alone = [*together[:9], *columns, together[13][begin:], *together[14:]]
    alone = tree_map_only(Tensor, torch.clone, alone)
    many, one = StepMeta(*step_metadata(*together)), StepMeta(*step_metadata(*alone))
    count = ROWS[row].tokens
    for name in PER_TOKEN:
        found, wanted = getattr(many, name)[begin : begin + count], getattr(one, name)[:count]
        assert torch.equal(found, wanted), name
    for name in PER_ROW:
        assert torch.equal(getattr(many, name)[row], getattr(one, name)[0]), name


@pytest.mark.parametrize("garbage", [0, -1, 2**31 - 1])
def test_line_zero_is_never_read(garbage: int) -> None:
    step = Step([*ROWS, Row(0, 0)], tokens=32, destinations=3)
    plain, soiled = arguments(step), arguments(step)
    for pool in soiled[:7]:
        assert isinstance(pool, Tensor)
        pool[0] = garbage
    wanted, found = step_metadata(*plain), step_metadata(*soiled)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
