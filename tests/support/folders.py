"""Small engine folders for tests of the contract: a sealed toy engine without a working program."""

from __future__ import annotations

from pathlib import Path

from inkling_engine.artifacts import layout
from inkling_engine.artifacts.manifest import (
    SCHEMA_VERSION,
    BuildEnvironment,
    Manifest,
    ProgramEntry,
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
)
from inkling_engine.artifacts.store import seal, stage

SHAPE = ModelShape(
    hidden=64,
    layers=6,
    local_layers=(0, 1, 2, 3, 4),
    full=LayerKind(heads=4, kv_heads=1, head_dim=16, window=0, extent=12),
    local=LayerKind(heads=4, kv_heads=2, head_dim=16, window=8, extent=8),
    rel_dim=4,
    log_floor=16,
    log_alpha=0.1,
    dense_layers=1,
    dense_width=96,
    experts=8,
    experts_per_token=2,
    shared_experts=2,
    expert_width=24,
    route_scale=8.0,
    conv_kernel=4,
    vocab=160,
    real_vocab=151,
    mup=4.0,
    eps=1e-6,
    max_context=64,
    eos_tokens=(150,),
    drafts=DraftShape(depths=3, local_depths=(0, 1), chain_norm=True),
)
BUCKETS = (
    Bucket(kind="decode", rows=1, tokens=1),
    Bucket(kind="decode", rows=2, tokens=2),
    Bucket(kind="extend", rows=2, tokens=16),
)
SPEC = EngineSpec(
    model="toy",
    shape=SHAPE,
    tp=1,
    device="cpu",
    arch="x86-64-v3",
    dtype="float32",
    max_context=64,
    max_running=8,
    page_size=4,
    snapshot_grid=8,
    spec_depth=0,
    buckets=BUCKETS,
    pools=PoolSizes(
        slots=17,
        snapshots=8,
        full_pages=41,
        window_pages=41,
        table_width=16,
        window_ring=4,
        results=4,
    ),
)
BUILT = BuildEnvironment(
    engine="0.1.0",
    torch="2.13.0+cpu",
    cuda="none",
    machine="x86_64",
    cpu_level=4,
    glibc="2.36",
    built_with_gpu=False,
)


def manifest(*, weights: bool = True) -> Manifest:
    """A manifest of three programs as a build hands it to `seal`."""
    programs = tuple(
        ProgramEntry(
            name=layout.program_name(bucket),
            bucket=bucket,
            file=layout.program_file(bucket),
            inputs=("weights.embed", "pools.kv_full", "rows.row_slots"),
            rows=(),
            row_bytes=0,
            outputs=(),
            ops=("inkling::rmsnorm",),
            proof="twin",
        )
        for bucket in BUCKETS
    )
    return Manifest(
        schema_version=SCHEMA_VERSION,
        engine_id="toy-tp1-x86-64-v3-fp32-01234567",
        created="2026-01-01T00:00:00Z",
        spec=SPEC,
        environment=BUILT,
        op_schemas=("rmsnorm(Tensor x, Tensor weight, float eps) -> Tensor",),
        kernel_library=layout.kernel_library_file(),
        programs=programs,
        pools=(TensorEntry(name="kv_full", dtype="float32", shape=(1, 41, 2, 1, 4, 16)),),
        recipe=(),
        weights=(WeightsEntry(rank=0, file=layout.weights_file(0)),) if weights else (),
        source="toy",
    )


def contents(built: Manifest) -> dict[str, bytes]:
    """The files that a build of `built` stages, by relative path."""
    files = {program.file: program.name.encode() * 9 for program in built.programs}
    files[built.kernel_library] = b"library"
    files |= {entry.file: b"weights" * 1000 for entry in built.weights}
    files[f"{layout.TOKENIZER}/tokenizer.json"] = b"{}"
    return files


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    """Write `files` into `folder` and return it."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def build(final: Path, *, weights: bool = True) -> Manifest:
    """Stage and seal the toy engine at `final`."""
    built = manifest(weights=weights)
    return seal(fill(stage(final), contents(built)), built, final)
