"""Layout of an engine's state and row inputs: names, dtypes and shapes, without torch.

The pools outlive every step, the rows are one bucket's static inputs; both become explicit
program inputs in the order given here.
"""

from __future__ import annotations

import math

from inkling_engine.artifacts.manifest import DType, RowEntry, TensorEntry
from inkling_engine.artifacts.spec import Bucket, EngineSpec, LayerKind
from inkling_engine.kernels import table
from inkling_engine.kernels._candidates import BUDGET, record_words
from inkling_engine.kernels._draft_rows import behind
from inkling_engine.kernels._exchange import exchange_words

ROW_ALIGNMENT = 64
MAX_WORLD = 8
ITEM_SIZE = {"float32": 4, "bfloat16": 2, "int32": 4, "int64": 8}


def destinations(spec: EngineSpec, bucket: Bucket) -> int:
    """Most grid boundaries that one row of `bucket` can cross in a step."""
    longest = bucket.tokens if bucket.kind == "extend" else 1 + bucket.drafts
    return (longest - 1) // spec.snapshot_grid + 1


def pool_entries(spec: EngineSpec) -> tuple[TensorEntry, ...]:
    """Every pool of one rank, in program input order."""
    drafts = _draft_pools(spec) if spec.spec_depth else []
    return (*_state_pools(spec), *drafts, *_table_pools(spec))


def samples(bucket: Bucket) -> int:
    """Rows of the step's logits: one a request, in a verify step one a token."""
    return bucket.tokens if bucket.drafts else bucket.rows


def draft_rows(spec: EngineSpec, bucket: Bucket) -> int:
    """Packed rows of the draft phase of a step of `bucket`."""
    return bucket.tokens + bucket.rows * behind(spec.spec_depth, bucket.drafts)


def row_entries(spec: EngineSpec, bucket: Bucket) -> tuple[tuple[RowEntry, ...], int]:
    """Row inputs of `bucket` as views of one buffer, and the buffer's size in bytes."""
    rows, tokens = bucket.rows, bucket.tokens
    updates = 2 * ((tokens + rows * spec.spec_depth) // spec.page_size + 2 * rows)
    shapes: dict[str, tuple[int, ...]] = {
        "row_slots": (rows,),
        "row_counts": (rows,),
        "row_sources": (rows,),
        "row_flags": (rows,),
        "token_ids": (tokens,),
        "admit_ints": (rows, table.ADMIT_HEADER + int_columns(spec)),
        "admit_floats": (rows, float_columns(spec)),
        "page_updates": (updates, 4),
        "snapshot_updates": (rows, 1 + _most_destinations(spec)),
    }
    entries, offset = [], 0
    for name, shape in shapes.items():
        dtype: DType = "float32" if name == "admit_floats" else "int32"
        entries.append(RowEntry(name=name, dtype=dtype, shape=shape, offset=offset))
        offset += -(-math.prod(shape) * 4 // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return tuple(entries), offset


def int_columns(spec: EngineSpec) -> int:
    """Width of `request_ints`."""
    return table.INT_HEADER + spec.limits.stop_ids + spec.limits.bias_ids


def float_columns(spec: EngineSpec) -> int:
    """Width of `request_floats`."""
    return table.FLOAT_HEADER + spec.limits.bias_ids


def entry_bytes(entry: TensorEntry) -> int:
    """Size of a tensor in bytes."""
    return math.prod(entry.shape) * ITEM_SIZE[entry.dtype]


def rank_kv_heads(kind: LayerKind, tp: int) -> int:
    """KV heads that one rank holds; replicated when there are more ranks than heads."""
    return max(1, kind.kv_heads // tp)


def _most_destinations(spec: EngineSpec) -> int:
    return max(destinations(spec, bucket) for bucket in spec.buckets)


def _state_pools(spec: EngineSpec) -> list[TensorEntry]:
    kinds = [spec.shape.is_local(layer) for layer in range(spec.shape.layers)]
    return _block_pools(spec, "", kinds)


def _draft_pools(spec: EngineSpec) -> list[TensorEntry]:
    """The depths' KV and windows, and what the rows behind a frontier are computed again from: the
    target's last hidden rows and the last tokens of each slot."""
    depths, slots = spec.spec_depth, spec.pools.slots
    kinds = [depth in spec.shape.drafts.local_depths for depth in range(depths)]
    hidden, recent = (slots, depths, spec.shape.hidden), (slots, depths)
    return [
        *_block_pools(spec, "draft_", kinds),
        TensorEntry(name="draft_hidden", dtype=spec.dtype, shape=hidden),
        TensorEntry(name="recent_tokens", dtype="int32", shape=recent),
    ]


def _block_pools(spec: EngineSpec, family: str, kinds: list[bool]) -> list[TensorEntry]:
    """KV pages and convolution rings of blocks that are local where `kinds` says so."""
    shape, sizes, act, ring = spec.shape, spec.pools, spec.dtype, spec.conv_ring
    entries = []
    for name, kind, pages in (
        ("full", shape.full, sizes.full_pages),
        ("window", shape.local, sizes.window_pages),
    ):
        blocks = kinds.count(name == "window")
        heads = rank_kv_heads(kind, spec.tp)
        paged = (blocks, pages, 2, heads, spec.page_size, kind.head_dim)
        taps = (blocks, sizes.slots, ring, 2 * heads * kind.head_dim)
        entries.append(TensorEntry(name=f"kv_{family}{name}", dtype=act, shape=paged))
        entries.append(TensorEntry(name=f"conv_kv_{family}{name}", dtype=act, shape=taps))
    for name in ("attn", "mlp"):
        taps = (len(kinds), sizes.slots, ring, shape.hidden)
        entries.append(TensorEntry(name=f"conv_{family}{name}", dtype=act, shape=taps))
    return entries


def _table_pools(spec: EngineSpec) -> list[TensorEntry]:
    sizes, top = spec.pools, spec.limits.top_logprobs
    lines, emitted = 1 + spec.max_running, 1 + spec.spec_depth
    rows = max(bucket.rows for bucket in spec.buckets)
    ints: dict[str, tuple[int, ...]] = {
        "request_state": (lines, table.STATE_WIDTH),
        "request_ints": (lines, int_columns(spec)),
        "token_counts": (lines, spec.shape.real_vocab),
        "full_table": (lines, sizes.table_width),
        "window_table": (lines, sizes.window_ring),
        "snapshot_slots": (lines, _most_destinations(spec)),
        "snapshot_lengths": (sizes.slots,),
        "draft_tokens": (lines, max(spec.spec_depth, 1)),
        "results_int": (sizes.results, rows, table.RESULT_HEADER + emitted * (1 + top)),
        "rank": (4,),
    }
    entries = [TensorEntry(name=n, dtype="int32", shape=s) for n, s in ints.items()]
    floats: dict[str, tuple[int, ...]] = {
        "request_floats": (lines, float_columns(spec)),
        "results_float": (sizes.results, rows, emitted * (1 + top)),
    }
    entries += [TensorEntry(name=n, dtype="float32", shape=s) for n, s in floats.items()]
    pushers = spec.tp if spec.tp > 1 and spec.device == "cuda" else 0
    words = exchange_words(_largest_part(spec) if spec.tp > 1 else 0, pushers)
    wide = {"step_counter": (4,), "peers": (MAX_WORLD,), "exchange": (words,)}
    return entries + [TensorEntry(name=n, dtype="int64", shape=s) for n, s in wide.items()]


def _largest_part(spec: EngineSpec) -> int:
    """Most bytes that a rank gives the others at once: rows of a step or of its draft phase, its
    columns of the logits or its candidates."""
    hidden, columns = spec.shape.hidden * ITEM_SIZE[spec.dtype], spec.shape.vocab // spec.tp
    sample = max(4 * columns, 8 * record_words(spec.limits.top_logprobs, BUDGET))
    return max(
        max(hidden * draft_rows(spec, bucket), sample * samples(bucket)) for bucket in spec.buckets
    )
