"""The spec and manifest of a small engine without a model, for tests that need no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as NativeTokenizer

from inkling_engine.artifacts.compat import Environment
from inkling_engine.artifacts.layout import program_file, program_name, weights_file
from inkling_engine.artifacts.manifest import (
    SCHEMA_VERSION,
    Manifest,
    ProgramEntry,
    Recipe,
    RowEntry,
    TensorEntry,
    WeightsEntry,
)
from inkling_engine.artifacts.spec import (
    Bucket,
    DraftShape,
    EngineSpec,
    LayerKind,
    ModelShape,
    PoolSizes,
    SamplingLimits,
    StepKind,
)
from inkling_engine.compile.models import inkling
from inkling_engine.kernels import table
from inkling_engine.kernels._exchange import exchange_words
from inkling_engine.runtime.tokens import Tokenizer

TINY = Path(inkling.__path__[0]) / "tiny" / "tokenizer.json"
PAGE, GRID, WINDOW, RING, VOCAB, REAL_VOCAB, EOS = 4, 8, 8, 5, 160, 151, 2


def _shape() -> ModelShape:
    kind = LayerKind(heads=2, kv_heads=1, head_dim=2, window=0, extent=12)
    return ModelShape(
        hidden=4,
        layers=2,
        local_layers=(0,),
        full=kind,
        local=msgspec.structs.replace(kind, window=WINDOW),
        rel_dim=2,
        log_floor=0,
        log_alpha=0.0,
        dense_layers=2,
        dense_width=4,
        experts=2,
        experts_per_token=1,
        shared_experts=1,
        expert_width=4,
        route_scale=1.0,
        conv_kernel=4,
        vocab=VOCAB,
        real_vocab=REAL_VOCAB,
        mup=1.0,
        eps=1e-6,
        max_context=64,
        eos_tokens=(EOS,),
        drafts=DraftShape(depths=0, local_depths=(), chain_norm=False),
    )


def build_spec(
    *,
    running: int = 4,
    full_pages: int = 40,
    window_pages: int = 24,
    ring: int = RING,
    decodes: Sequence[int] = (1, 2, 4),
    extends: Sequence[tuple[int, int]] = ((8, 2), (16, 4)),
    results: int = 2,
    snapshots: int = 0,
    drafts: int = 0,
    tp: int = 1,
) -> EngineSpec:
    """A spec of `running` slots and `tp` ranks with decode buckets of these rows (verify ones with `drafts`), extend
    ones of (tokens, rows)."""
    kind: StepKind = "verify" if drafts else "decode"
    width = 1 + drafts
    buckets = [Bucket(kind=kind, rows=n, tokens=n * width, drafts=drafts) for n in decodes]
    buckets += [Bucket(kind="extend", rows=rows, tokens=tokens) for tokens, rows in extends]
    return EngineSpec(
        model="fake",
        shape=_shape(),
        tp=tp,
        device="cpu",
        arch="native",
        dtype="float32",
        max_context=64,
        max_running=running,
        page_size=PAGE,
        snapshot_grid=GRID,
        spec_depth=drafts,
        buckets=tuple(buckets),
        pools=PoolSizes(
            slots=1 + running + snapshots,
            snapshots=snapshots,
            full_pages=full_pages,
            window_pages=window_pages,
            table_width=-(-(64 + drafts) // PAGE),
            window_ring=ring,
            results=results,
        ),
        limits=SamplingLimits(stop_ids=4, bias_ids=3, top_logprobs=3),
    )


def _destinations(spec: EngineSpec) -> int:
    return (max(bucket.tokens for bucket in spec.buckets) - 1) // GRID + 1


def _pools(spec: EngineSpec) -> tuple[TensorEntry, ...]:
    sizes, limits, lines = spec.pools, spec.limits, 1 + spec.max_running
    rows = max(bucket.rows for bucket in spec.buckets)
    bias, places = limits.bias_ids, (1 + spec.spec_depth) * (1 + limits.top_logprobs)
    ints = {
        "request_state": (lines, table.STATE_WIDTH),
        "request_ints": (lines, table.INT_HEADER + limits.stop_ids + bias),
        "token_counts": (lines, REAL_VOCAB),
        "full_table": (lines, sizes.table_width),
        "window_table": (lines, sizes.window_ring),
        "snapshot_slots": (lines, _destinations(spec)),
        "snapshot_lengths": (sizes.slots,),
        "draft_tokens": (lines, max(spec.spec_depth, 1)),
        "results_int": (sizes.results, rows, table.RESULT_HEADER + places),
    }
    floats = {
        "kv_full": (1, sizes.full_pages, 2, 1, PAGE, 2),
        "kv_window": (1, sizes.window_pages, 2, 1, PAGE, 2),
        "conv_attn": (2, sizes.slots, 3 + spec.spec_depth, 4),
        "request_floats": (lines, table.FLOAT_HEADER + bias),
        "results_float": (sizes.results, rows, places),
    }
    if spec.spec_depth:
        floats |= {
            "kv_draft_full": floats["kv_full"],
            "kv_draft_window": floats["kv_window"],
            "draft_hidden": (sizes.slots, spec.spec_depth, 1),
        }
    longs = {"peers": (8,), "exchange": (exchange_words(0),)} if spec.tp > 1 else {}
    if spec.tp > 1:
        ints["rank"] = (4,)
    return (
        *(TensorEntry(name=name, dtype="int32", shape=shape) for name, shape in ints.items()),
        *(TensorEntry(name=name, dtype="float32", shape=shape) for name, shape in floats.items()),
        *(TensorEntry(name=name, dtype="int64", shape=shape) for name, shape in longs.items()),
    )


def _program(spec: EngineSpec, bucket: Bucket) -> ProgramEntry:
    rows, tokens, limits = bucket.rows, bucket.tokens, spec.limits
    shapes = {
        "row_slots": (rows,),
        "row_counts": (rows,),
        "row_sources": (rows,),
        "row_flags": (rows,),
        "token_ids": (tokens,),
        "admit_ints": (
            rows,
            table.ADMIT_HEADER + table.INT_HEADER + limits.stop_ids + limits.bias_ids,
        ),
        "admit_floats": (rows, table.FLOAT_HEADER + limits.bias_ids),
        "page_updates": (2 * ((tokens + rows * spec.spec_depth) // PAGE + 2 * rows), 4),
        "snapshot_updates": (rows, 1 + _destinations(spec)),
    }
    entries, offset = [], 0
    for name, shape in shapes.items():
        dtype = "float32" if name == "admit_floats" else "int32"
        entries.append(RowEntry(name=name, dtype=dtype, shape=shape, offset=offset))  # type: ignore[arg-type]
        offset += -(-math.prod(shape) * 4 // 64) * 64
    return ProgramEntry(
        name=program_name(bucket),
        bucket=bucket,
        file=program_file(bucket),
        inputs=(
            "weights.embed",
            *(f"pools.{entry.name}" for entry in _pools(spec)),
            *(f"rows.{entry.name}" for entry in entries),
        ),
        rows=tuple(entries),
        row_bytes=offset,
        outputs=(),
        ops=(),
        proof="fake",
    )


def build_manifest(spec: EngineSpec, *, weights: bool = True) -> Manifest:
    """A manifest of `spec` with every bucket's program, built where it runs."""
    return Manifest(
        schema_version=SCHEMA_VERSION,
        engine_id="fake-tp1-native-fp32-00000000",
        created="2026-01-01T00:00:00+00:00",
        spec=spec,
        environment=Environment.current().for_build(built_with_gpu=False),
        op_schemas=(),
        kernel_library="",
        programs=tuple(_program(spec, bucket) for bucket in spec.buckets),
        pools=_pools(spec),
        recipe=(Recipe(name="embed", dtype="float32", shape=(VOCAB, 4), parts=()),),
        weights=(WeightsEntry(rank=0, file=weights_file(0)),) if weights else (),
        source="nothing",
    )


def tiny_tokenizer() -> Tokenizer:
    """The tokenizer of the package's default model."""
    return Tokenizer(NativeTokenizer.from_file(str(TINY)))
