"""Attention gives the same bits however queries are batched, and looks only where it may.

Attention reads state and writes none, so one request can stand in many rows of a call, each row a
chunk of its own: a whole cut of a sequence is one call.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inkling_engine.kernels._case_rows import INERT, Row, Step
from inkling_engine.kernels._cases import Case, normal
from inkling_engine.kernels.attention_decode import attention_decode
from inkling_engine.kernels.attention_decode.cases import cases as decode_cases
from inkling_engine.kernels.attention_extend import attention_extend
from inkling_engine.kernels.attention_extend.cases import BIG, FULL, LOCAL, SMALL, Heads
from inkling_engine.kernels.attention_prologue import attention_prologue
from inkling_engine.kernels.attention_verify import attention_verify

pytestmark = pytest.mark.usefixtures("native_library")

LINES = 4
TOTAL = 300  # positions of the request, past window 128 and extent 256
DECODE_CASES = decode_cases()
SHAPES = {"full": FULL, "local": LOCAL, "big": BIG, "small": SMALL}


class Request(NamedTuple):
    """A request in slot 2: queries of every position and a pool that holds all keys and values."""

    shape: Heads
    q: Tensor
    r: Tensor
    rel_proj: Tensor
    pool: Tensor


def sized(rows: tuple[Row, ...], tokens: int, page_size: int = 64) -> Step:
    """A step over the request's pool."""
    return Step(rows, tokens, page_size, table_width=-(-TOTAL // page_size), lines=LINES)


def make_request(shape: Heads, dtype: torch.dtype = torch.float32, page_size: int = 64) -> Request:
    """Seeded; whatever is not a position of slot 2 is NaN."""
    step = sized((Row(2, 0, TOTAL),), TOTAL, page_size)
    return Request(
        shape,
        normal(TOTAL, shape.heads, shape.dim, dtype=dtype, scale=3),
        normal(TOTAL, shape.heads, shape.rel),
        normal(shape.rel, shape.extent, dtype=dtype, scale=0.5),
        step.kv(1, shape.kv_heads, shape.dim, dtype),
    )


def attend(
    request: Request, rows: list[Row], *, most: int = 0, first: int = 0, padding: int = 0
) -> Tensor:
    """One call with `rows`, each a chunk of the request's positions (inert ones left out); a verify
    step if `most` is given."""
    chunks = [torch.arange(row.length, row.length + row.count) for row in rows]
    chosen = torch.cat([*chunks, torch.full((padding,), TOTAL - 1)])
    step = sized(tuple(rows), len(chosen), request.pool.shape[4])
    table = sized((Row(2, 0, TOTAL),), TOTAL, request.pool.shape[4]).page_table
    op = attention_verify if most else attention_extend
    q, r = request.q[chosen], request.r[chosen]
    metadata = table, step.slots, step.starts, step.lengths
    bounds = (first, most) if most else (first,)
    output = op(q, r, request.rel_proj, request.pool, *metadata, 0, request.shape.window, *bounds)
    assert isinstance(output, Tensor) and not output[len(chosen) - padding :].any()
    return output[: len(chosen) - padding]


def dense(request: Request, position: int) -> Tensor:
    """fp64 output [Nq * D] of one position, key by key, head by head."""
    shape, page_size = request.shape, request.pool.shape[4]
    pages = sized((Row(2, 0, TOTAL),), TOTAL, page_size).page_table[2].tolist()
    pool = request.pool[0].double()
    output = torch.zeros(shape.heads, shape.dim, dtype=torch.float64)
    for head in range(shape.heads):
        group = head // (shape.heads // shape.kv_heads)
        weights, values = [], []
        for key in range(position + 1):
            distance = position - key
            if shape.window and distance >= shape.window:
                continue
            k, v = pool[pages[key // page_size], :, group, key % page_size]
            score = float(request.q[position, head].double() @ k) / shape.dim
            if distance < shape.extent:
                bank = request.rel_proj[:, distance].double()
                score += float(request.r[position, head].double() @ bank)
            weights.append(math.exp(score))
            values.append(v * weights[-1])
        output[head] = torch.stack(values).sum(0) / sum(weights)
    return output.flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_one_row_and_a_row_a_token_give_equal_bits(name: str, dtype: torch.dtype) -> None:
    request = make_request(SHAPES[name], dtype)
    whole = attend(request, [Row(2, 0, TOTAL)], padding=3)
    singles = [Row(2, position) for position in range(TOTAL)]
    assert torch.equal(attend(request, singles, most=1), whole)
    assert torch.equal(attend(request, singles), whole)
    ragged = [Row(2, at, min(1 + at % 9, TOTAL - at)) for at in range(0, TOTAL, 9)]
    verified = torch.cat([torch.arange(row.length, row.length + row.count) for row in ragged])
    assert torch.equal(attend(request, ragged, most=9, padding=2), whole[verified])
    for position in (0, 63, 64, 127, 128, 255, 256, TOTAL - 1):
        alone = attend(request, [singles[position]], most=1)
        assert torch.equal(alone[0], whole[position])


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """The whole request cut into chunks, shuffled, with inert rows among them."""
    counts = draw(st.lists(st.sampled_from([1, 2, 3, 15, 16, 17, 63, 64, 65, 100]), max_size=12))
    rows, length = [], 0
    for count in [*counts, TOTAL]:
        count = min(count, TOTAL - length)
        rows += [Row(2, length, count)] if count else [INERT]
        length += count
    return draw(st.permutations(rows))


@functools.cache
def whole_request(name: str, page_size: int) -> tuple[Request, Tensor]:
    """A request and its output computed in one piece; not to be changed."""
    request = make_request(SHAPES[name], page_size=page_size)
    return request, attend(request, [Row(2, 0, TOTAL)])


@pytest.mark.parametrize("page_size", [64, 16, 4, 128])
@settings(max_examples=40)
@given(rows=batches(), name=st.sampled_from(["full", "local", "small"]))
def test_any_cut_in_any_order_gives_equal_bits(page_size: int, rows: list[Row], name: str) -> None:
    request, whole = whole_request(name, page_size)
    order = torch.cat([torch.arange(row.length, row.length + row.count) for row in rows])
    assert torch.equal(attend(request, rows), whole[order])


def test_page_size_changes_no_bits() -> None:
    outputs = []
    for page_size in (64, 32, 8, 128):
        request = make_request(LOCAL, page_size=page_size)
        outputs.append(attend(request, [Row(2, 0, TOTAL)]))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("garbage", [0.0, 1e30, -torch.inf])
@pytest.mark.parametrize("name", ["full", "local", "small"])
def test_what_is_not_the_requests_own_past_changes_nothing(name: str, garbage: float) -> None:
    """Other pages, page 0, keys after the query and keys before its window."""
    request = make_request(SHAPES[name])
    whole = attend(request, [Row(2, 0, TOTAL)])
    own = request.pool.isnan()
    assert own.any() and not own.all()
    foreign = request._replace(pool=torch.where(own, garbage, request.pool))
    assert torch.equal(attend(foreign, [Row(2, 0, TOTAL)]), whole)
    pages = sized((Row(2, 0, TOTAL),), TOTAL).page_table[2].tolist()
    for position in (0, 70, 127, 128, 200, 255):
        pool = request.pool.clone()
        first = max(0, position + 1 - request.shape.window) if request.shape.window else 0
        for unseen in [*range(first), *range(position + 1, TOTAL)]:
            pool[0, pages[unseen // 64], :, :, unseen % 64] = garbage
        alone = attend(request._replace(pool=pool), [Row(2, position)], most=1)
        assert torch.equal(alone[0], whole[position])


@pytest.mark.parametrize("name", ["full", "local", "big", "small"])
def test_edges_of_window_and_extent_agree_with_a_dense_softmax(name: str) -> None:
    request = make_request(SHAPES[name])
    edges = {1, request.shape.window, request.shape.extent, 64, TOTAL}
    near = {edge + step for edge in edges for step in (-2, -1, 0, 1)}
    positions = sorted(position for position in near if 0 <= position < TOTAL)
    found = attend(request, [Row(2, position) for position in positions], most=1)
    for position, output in zip(positions, found, strict=True):
        torch.testing.assert_close(output.double(), dense(request, position), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("window", "extent"), [(0, 12), (8, 8)])
def test_first_key_outside_window_or_extent(window: int, extent: int) -> None:
    """One key carries all the weight: is it seen, and with its bias, at exactly these distances?"""
    shape = replace(SMALL, heads=1, dim=16, window=window, extent=extent)
    request = make_request(shape)
    request.pool[0, :, 0].nan_to_num_(0).zero_()
    request.pool[0, :, 1].nan_to_num_(0).zero_()
    page = sized((Row(2, 0, TOTAL),), TOTAL).page_table[2, 1]
    request.pool[0, page, 1, 0, 6] = 1.0  # position 70
    request.rel_proj.fill_(0).select(1, extent - 1).fill_(100.0)
    request.r.fill_(1.0)
    rows = [Row(2, 70 + extent + distance, 1) for distance in (-1, 0)]
    inside, outside = attend(request, rows, most=1)[:, 0].tolist()
    assert (inside, outside) == (1.0, 0.0)  # outside, the next key has the biased distance


def test_ring_of_pages_holds_a_window() -> None:
    """A window layer's table names only the last pages; older positions have been overwritten."""
    shape, width = LOCAL, 3
    plain = make_request(shape)
    step = sized((Row(2, 0, TOTAL),), TOTAL)
    ring = torch.zeros(LINES, width, dtype=torch.int32)
    for position in range(170, TOTAL):
        ring[2, position // 64 % width] = step.page_table[2, position // 64]
    rows = sized((Row(2, 297, 3),), 3)
    tail = rows.slots, rows.starts, rows.lengths, 0, shape.window, 0
    q, r = plain.q[297:], plain.r[297:]
    found = attention_extend(q, r, plain.rel_proj, plain.pool, ring, *tail)
    wanted = attention_extend(q, r, plain.rel_proj, plain.pool, step.page_table, *tail)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("most", [1, 5])
def test_verify_refuses_a_longer_row(most: int) -> None:
    request = make_request(SMALL)
    attend(request, [Row(2, 0, most)], most=most)
    with pytest.raises(RuntimeError, match="more tokens than `most`"):
        attend(request, [Row(2, 0, most + 1)], most=most)


@pytest.mark.parametrize("name", ["full", "local", "small"])
@pytest.mark.parametrize("first", [1, 8, 64, 100])
def test_keys_before_the_first_are_not_there(name: str, first: int) -> None:
    """The same as a request without them, whatever lies in their place."""
    request = make_request(SHAPES[name], page_size=4)
    whole = attend(request, [Row(2, first, 150)], first=first)
    pages = sized((Row(2, 0, TOTAL),), TOTAL, 4).page_table[2].tolist()
    spoilt, shifted = request.pool.clone(), request.pool.clone()
    for position in range(TOTAL):
        place = pages[position // 4], position % 4
        if position < first:
            spoilt[:, place[0], :, :, place[1]] = torch.nan
        else:
            moved = pages[(position - first) // 4], (position - first) % 4
            shifted[:, moved[0], :, :, moved[1]] = request.pool[:, place[0], :, :, place[1]]
    assert torch.equal(
        attend(request._replace(pool=spoilt), [Row(2, first, 150)], first=first), whole
    )
    q, r = request.q.roll(-first, 0), request.r.roll(-first, 0)
    fresh = attend(request._replace(pool=shifted, q=q, r=r), [Row(2, 0, 150)])
    torch.testing.assert_close(whole, fresh, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.name)
def test_a_decode_step_is_prologue_and_attention_to_the_bit(case: Case) -> None:
    ours, theirs = (
        [a.clone() if isinstance(a, Tensor) else a for a in case.arguments] for _ in range(2)
    )
    found = attention_decode(*ours)
    *prologue, rel_proj, table, layer, heads, window, floor, alpha, eps = theirs
    q, r = attention_prologue(*prologue, layer, heads, floor, alpha, eps)
    rows = theirs[9], theirs[11], theirs[12]
    assert torch.equal(
        found, attention_extend(q, r, rel_proj, theirs[4], table, *rows, layer, window, 0)
    )
    for written in (4, 5):
        assert torch.equal(ours[written].nan_to_num(), theirs[written].nan_to_num())


def test_decode_refuses_a_row_of_two_tokens() -> None:
    arguments = list(DECODE_CASES[0].arguments)
    arguments[11] = torch.tensor([0, 2, 2, 2, 2, 2, 2, 2], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="at most one token"):
        attention_decode(*arguments)


def test_not_finite_queries_spoil_only_themselves() -> None:
    request = make_request(FULL)
    whole = attend(request, [Row(2, 0, TOTAL)])
    request.q[17, 3] = torch.nan
    spoilt = attend(request, [Row(2, 0, TOTAL)]).view(TOTAL, FULL.heads, FULL.dim)
    assert spoilt[17, 3].isnan().all()
    spoilt[17, 3] = whole.view_as(spoilt)[17, 3]
    assert torch.equal(spoilt.view_as(whole), whole)
