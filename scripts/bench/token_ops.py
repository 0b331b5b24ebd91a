"""Cases of the ops over tokens and rows: everything but attention and experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from bench.attention_ops import prologue_arguments
from bench.setting import Setting
from bench.timing import copies_for, nbytes
from bench.work import Case, Target, Work, check_op, kind_of
from torch import Tensor

from inkling_engine.artifacts.spec import ModelShape
from inkling_engine.compile.models.inkling.block import exchange
from inkling_engine.kernels import table
from inkling_engine.kernels._cases import Ranks
from inkling_engine.kernels._exchange import exchange_words
from inkling_engine.kernels._op import Op
from inkling_engine.kernels.attention_prologue import attention_prologue
from inkling_engine.kernels.boundary import boundary
from inkling_engine.kernels.commit import commit
from inkling_engine.kernels.embed_norm import embed_norm
from inkling_engine.kernels.gather_logits import gather_logits
from inkling_engine.kernels.head import head
from inkling_engine.kernels.linear import linear
from inkling_engine.kernels.rmsnorm import rmsnorm
from inkling_engine.kernels.sample import sample
from inkling_engine.kernels.step_metadata import step_metadata
from inkling_engine.kernels.swiglu import swiglu

CONTEXT = 1024  # of the rows of ops that do not read it
MATRICES: dict[str, Callable[[ModelShape], tuple[int, int]]] = {
    "qkvr": lambda s: (s.local.heads * (s.local.head_dim + s.rel_dim) + _kv_width(s), s.hidden),
    "o": lambda s: (s.hidden, s.local.heads * s.local.head_dim),
    "dense w13": lambda s: (2 * s.dense_width, s.hidden),
    "dense w2": lambda s: (s.hidden, s.dense_width),
}
"""Rows and columns of the weight of each use of `linear`."""


def cases(target: Target, rows: int) -> Iterator[Case]:
    """The cases at `rows` rows (decode) or tokens (extend)."""
    for name in MATRICES:
        yield Case("linear", name, rows, 0, partial(linear_work, target, rows, name))
    makers = [
        ("embed_norm", embed_norm_work),
        ("rmsnorm", rmsnorm_work),
        ("swiglu", swiglu_work),
        ("attention_prologue", prologue_work),
        ("boundary", boundary_work),
        ("step_metadata", metadata_work),
    ]
    if kind_of(rows) == "decode":
        makers += [("head", head_work), ("commit", commit_work), ("gather_logits", gather_work)]
        yield Case("sample", "greedy", rows, 0, partial(sample_work, target, rows, 0.0))
        yield Case("sample", "top-p", rows, 0, partial(sample_work, target, rows, 0.8))
    for op, make in makers:
        yield Case(op, "", rows, 0, partial(make, target, rows))


def work(
    op: Op, calls: list[tuple[Any, ...]], moved: float, flops: float, device: str, **check: float
) -> Work:
    """An op on each of `calls`' arguments, the first of them checked."""
    sides = {"ours": [partial(op, *arguments) for arguments in calls]}
    return Work(moved, flops, sides, partial(check_op, op, calls[0], device, **check))


def linear_work(target: Target, rows: int, name: str) -> Work:
    """A product with one of the model's matrices; torch.mm beside it."""
    n, k = MATRICES[name](target.shape)
    moved, flops = 2 * (n * k + rows * (n + k)), 2.0 * rows * n * k
    calls = [
        (target.normal(rows, k), target.normal(n, k, scale=k**-0.5))
        for _ in range(copies_for(moved))
    ]
    made = work(linear, calls, moved, flops, target.device)
    return _beside(target, made, {"torch.mm": [partial(torch.mm, x, w.T) for x, w in calls]})


def head_work(target: Target, rows: int) -> Work:
    """Logits of every row; torch.mm with fp32 results beside it."""
    s = target.shape
    moved = 2 * s.hidden * (s.vocab + rows) + 4 * rows * s.vocab
    ids = torch.arange(rows, dtype=torch.int32, device=target.device)
    ones = torch.ones_like(ids)
    calls = [
        (
            target.normal(rows, s.hidden),
            target.normal(s.vocab, s.hidden, scale=s.hidden**-0.5),
            ids,
            ones,
            1.0 / s.mup,
            s.vocab,
        )
        for _ in range(copies_for(moved))
    ]
    made = work(head, calls, moved, 2.0 * rows * s.vocab * s.hidden, target.device)
    product = partial(torch.mm, out_dtype=torch.float32)
    return _beside(target, made, {"torch.mm": [partial(product, c[0], c[1].T) for c in calls]})


def embed_norm_work(target: Target, rows: int) -> Work:
    """Rows of the embedding, each call for other tokens."""
    s, device = target.shape, target.device
    table_, weight = target.normal(s.vocab, s.hidden), target.near_one(s.hidden)
    ranks = [tensor.to(device) for tensor in Ranks().tensors]
    moved = 4 * rows * s.hidden
    calls = [
        (
            torch.randint(s.vocab, (rows,), dtype=torch.int32, device=device),
            *(table_, weight, *ranks, 0, 1, s.eps, 1),
        )
        for _ in range(copies_for(moved))
    ]
    return work(embed_norm, calls, moved, 0, device)


def gather_work(target: Target, rows: int) -> Work:
    """One rank's columns published and laid out; the other ranks, absent, have nothing to read."""
    world, columns = target.tp, target.shape.vocab
    moved = 4 * rows * 3 * columns
    ranks = Ranks(world, words=exchange_words(4 * rows * columns, world)).tensors
    calls = [
        (
            target.normal(rows, columns, dtype=torch.float32),
            torch.ones(rows, dtype=torch.int32, device=target.device),
            *(tensor.to(target.device) for tensor in ranks),
            *(0, 1, world, columns),
        )
        for _ in range(copies_for(moved))
    ]
    return work(gather_logits, calls, moved, 0, target.device)


def rmsnorm_work(target: Target, rows: int) -> Work:
    """The norm of hidden rows; torch's fused one beside it."""
    s = target.shape
    moved = 4 * rows * s.hidden
    calls = [
        (target.normal(rows, s.hidden), target.near_one(s.hidden), s.eps)
        for _ in range(copies_for(moved))
    ]
    norm = torch.nn.functional.rms_norm
    theirs = [partial(norm, x, (s.hidden,), weight, eps) for x, weight, eps in calls]
    return _beside(target, work(rmsnorm, calls, moved, 0, target.device), {"torch": theirs})


def swiglu_work(target: Target, rows: int) -> Work:
    """The activation of a dense MLP."""
    width = target.shape.dense_width
    scale = torch.full((1,), 0.7, device=target.device)
    moved = 6 * rows * width
    calls = [(target.normal(rows, 2 * width), scale) for _ in range(copies_for(moved))]
    return work(swiglu, calls, moved, 0, target.device)


def setting_for(target: Target, rows: int, layers: int) -> Setting:
    """A decode step of `rows` rows, or an extend step of one row of `rows` tokens."""
    kind = kind_of(rows)
    requests = rows if kind == "decode" else 1
    return Setting(target.shape, kind, requests, rows, CONTEXT, layers, target.device)


def prologue_work(target: Target, rows: int) -> Work:
    """Window layers: convolution, norms and pages of the new tokens."""
    s, kind = target.shape, target.shape.local
    width, query = _kv_width(s), kind.heads * kind.head_dim
    total = query + width + kind.heads * s.rel_dim
    moved = 2 * rows * (total + query + width) + 4 * rows * kind.heads * s.rel_dim + 16 * width
    copies = min(16, copies_for(moved))
    setting = setting_for(target, rows, copies)
    moved += 2 * 2 * nbytes(setting.pools["conv_kv_window"][0, : setting.rows])
    scaling = kind.heads, s.log_floor, s.log_alpha, s.eps
    calls = [
        (*prologue_arguments(target, setting, "window"), layer, *scaling) for layer in range(copies)
    ]
    return work(attention_prologue, calls, moved, 0, target.device)


def boundary_work(target: Target, rows: int) -> Work:
    """Convolution, residual and the next norm; one rank, so nothing is reduced."""
    s = target.shape
    moved = 8 * rows * s.hidden + 18 * s.hidden
    copies = min(16, copies_for(moved))
    setting = setting_for(target, rows, -(-copies // 2))
    moved += 2 * nbytes(setting.pools["conv_attn"][0, : setting.rows])
    calls = [
        (
            target.normal(rows, s.hidden),
            target.normal(rows, s.hidden),
            target.normal(s.hidden, 4, scale=0.5, dtype=torch.float32),
            target.near_one(s.hidden),
            setting.pools["conv_attn"],
            setting.meta.token_rows,
            *setting.row_state,
            *exchange(setting.pools),
            *(layer, 0, 1, s.eps, 1),
        )
        for layer in range(copies)
    ]
    return work(boundary, calls, moved, 0, target.device)


def metadata_work(target: Target, rows: int) -> Work:
    """All rows admitted in the first step, none in the repeated ones."""
    setting = setting_for(target, rows, 1)
    calls = [setting.table_arguments() for _ in range(4)]
    moved = sum(nbytes(tensor) for tensor in setting.row_inputs.values())
    moved += sum(nbytes(tensor) for tensor in setting.meta)
    return work(step_metadata, calls, moved, 0, "cpu")


def sample_work(target: Target, rows: int, temperature: float) -> Work:
    """Greedy rows, or rows at a temperature with top-p 0.95."""
    calls, moved = sample_calls(target, rows, temperature), 8.0 * rows * target.shape.vocab
    return work(sample, calls, moved, 0, "cpu", unequal=0.02 if temperature else 0.0)


def sample_calls(target: Target, rows: int, temperature: float) -> list[tuple[Any, ...]]:
    """Arguments of `sample`, each time over other logits."""
    setting = setting_for(target, rows, 1)
    pools, meta, limits = setting.pools, setting.meta, setting.spec.limits
    _, ints, floats, state, _, _ = _request_tables(setting)
    floats[:, table.TEMPERATURE] = temperature
    floats[:, table.TOP_P] = 0.95 if temperature else 1.0
    moved = 8 * rows * target.shape.vocab
    return [
        (
            target.normal(rows, target.shape.vocab, dtype=torch.float32, scale=3),
            pools["token_counts"].clone(),
            *(state, ints, floats),
            *(meta.tokens, meta.token_rows, meta.slots, meta.starts, meta.lengths),
            *(meta.sample_rows, meta.emits),
            *(limits.stop_ids, limits.bias_ids, limits.top_logprobs, 0),
        )
        for _ in range(min(8, copies_for(moved)))
    ]


def commit_work(target: Target, rows: int) -> Work:
    """Results of a step of emitting rows."""
    setting = setting_for(target, rows, 1)
    meta, limits, device = setting.meta, setting.spec.limits, target.device
    counts, ints, _, state, results, floats = _request_tables(setting)
    tokens = torch.randint(100, (rows,), dtype=torch.int32, device=device)
    logprobs = -target.normal(rows, dtype=torch.float32).abs()
    tops = torch.randint(100, (rows, limits.top_logprobs), dtype=torch.int32, device=device)
    top_logprobs = target.normal(rows, limits.top_logprobs, dtype=torch.float32)
    arguments = (
        *(state, counts, results, floats, setting.pools["step_counter"].clone()),
        *(setting.pools["snapshot_slots"], setting.pools["snapshot_lengths"], ints),
        *(tokens, logprobs, tops, top_logprobs, meta.tokens, meta.slots, meta.starts),
        *(meta.lengths, meta.emits, meta.destination_slots, meta.destination_offsets),
        *(limits.stop_ids, 0),
    )
    moved = 2 * nbytes(tops, top_logprobs, tokens, logprobs) + 2 * nbytes(state)
    return work(commit, [arguments] * 8, moved, 0, "cpu")


def _request_tables(setting: Setting) -> tuple[Tensor, ...]:
    """token_counts, request_ints, _floats, _state and results of admitted rows, all copies."""
    arguments = setting.table_arguments()
    step_metadata(*arguments)
    state, ints, floats, counts = arguments[:4]
    results = (setting.pools[name].clone() for name in ("results_int", "results_float"))
    tensors = (counts, ints, floats, state, *results)
    return tuple(tensor for tensor in tensors if isinstance(tensor, Tensor))


def _beside(target: Target, made: Work, peers: dict[str, Any]) -> Work:
    if target.own_only:
        return made
    return Work(made.moved, made.flops, {**made.sides, **peers}, made.check, made.notes)


def _kv_width(shape: ModelShape) -> int:
    """Channels of k and v of a window layer."""
    return 2 * shape.local.kv_heads * shape.local.head_dim
