"""Build options as one value, and how they become an `EngineSpec`.

The command line and a `--config` file fill the same fields; what is left out is decided here from
the model and the target. A mistake is a `UsageError` that names the option.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from inkling_engine.artifacts.compat import cpu_level
from inkling_engine.artifacts.errors import UsageError, show
from inkling_engine.artifacts.spec import Bucket, EngineSpec, ModelShape, PoolSizes, StepKind

DType = Literal["float32", "bfloat16"]
DTYPES: dict[str, DType] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "float32": "float32",
    "bfloat16": "bfloat16",
}
DECODE_KIND: dict[bool, StepKind] = {False: "decode", True: "verify"}  # by whether it drafts
CUDA_ARCHS = ("sm90",)
CPU_ARCHS = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "native")
DEFAULT_RUNNING = {"cpu": 8, "cuda": 128}
DEFAULT_EXTEND = {"cpu": "64,512", "cuda": "64,512,2048"}
EXTEND_ROWS = 16
RESULT_LINES = 64
MOST_TOKENS = (1 << 16) - 1  # a launch has as many programs along y or z at most
MOST_RUNNING = 4096
BUCKET = re.compile(r"([1-9][0-9]{0,8})(?:x([1-9][0-9]{0,8}))?")


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `compile-engine` was asked for; None means decided from model and target.

    Fields of `--config` alone: `draft_vocab` has drafts chosen among that many first ids: ids are
    roughly by frequency, and fewer rows of the head are cheaper to read. `layers` keeps the first
    layers of a preset without weights, to measure where the whole model does not fit.
    """

    model: str
    checkpoint: str | None = None
    out: str | None = None
    tp: int = 1
    device: Literal["cpu", "cuda"] | None = None
    arch: str | None = None
    dtype: str | None = None
    max_context: int | None = None
    max_running: int | None = None
    decode_buckets: str | None = None
    extend_buckets: str | None = None
    page_size: int = 64
    snapshot_grid: int = 256
    spec_depth: int = 0
    draft_vocab: int | None = None
    layers: int | None = None
    rank_weights: str | None = None
    jobs: int = 1


def make_spec(options: BuildOptions, name: str, shape: ModelShape, device: str) -> EngineSpec:
    """Resolve `options` for the model `shape` called `name` on `device`.

    Raises UsageError for a value that cannot be honoured.
    """
    _check_numbers(options, shape)
    default = "fp32" if device == "cpu" else "bf16"
    context = options.max_context or shape.max_context
    decode = _decode_rows(options, device)
    running = options.max_running or max(decode)
    buckets = (*_decode_buckets(decode, options), *_extend_buckets(options, device, running))
    return EngineSpec(
        model=name,
        shape=shape,
        tp=options.tp,
        device="cpu" if device == "cpu" else "cuda",
        arch=_arch(options.arch, device),
        dtype=_choice("--dtype", options.dtype or default, DTYPES),
        max_context=context,
        max_running=running,
        page_size=options.page_size,
        snapshot_grid=options.snapshot_grid,
        spec_depth=options.spec_depth,
        buckets=buckets,
        pools=_pool_sizes(options, shape, context, running, buckets),
        draft_vocab=_draft_vocab(options, shape),
    )


def default_device(options: BuildOptions, *, has_weights: bool) -> str:
    """The device asked for; else CUDA where a GPU is visible or the model is a bare preset."""
    if options.device:
        return options.device
    return "cuda" if gpu_visible() or not has_weights else "cpu"


def gpu_visible() -> bool:
    """Whether this machine shows an NVIDIA GPU, asked without torch."""
    return Path("/dev/nvidia0").exists()


def steady_window_pages(shape: ModelShape, page_size: int) -> int:
    """Pages that hold a full window at any alignment while decoding."""
    return (shape.local.window + page_size - 2) // page_size + 1


def _pool_sizes(
    options: BuildOptions,
    shape: ModelShape,
    context: int,
    running: int,
    buckets: tuple[Bucket, ...],
) -> PoolSizes:
    page, ahead = options.page_size, options.spec_depth  # draft KV lies that many tokens ahead
    width = -(-(context + ahead) // page)
    chunk = max(bucket.tokens for bucket in buckets if bucket.kind == "extend")
    written = max(chunk, 1 + ahead) + ahead
    ring = min(width, (shape.local.window + written + page - 3) // page + 1)
    return PoolSizes(
        slots=1 + 2 * running,
        snapshots=running,
        full_pages=1 + running * width,
        window_pages=1 + running * ring,
        table_width=width,
        window_ring=ring,
        results=RESULT_LINES,
    )


def _decode_rows(options: BuildOptions, device: str) -> tuple[int, ...]:
    if options.decode_buckets is not None:
        pairs = _numbers("--decode-buckets", options.decode_buckets)
        if wrong := [f"{count}x{rows}" for count, rows in pairs if rows]:
            raise UsageError("--decode-buckets", wrong[0], "rows such as 1,2,4", "drop the x")
        if (most := max(count for count, _ in pairs)) > MOST_RUNNING:
            raise UsageError("--decode-buckets", most, f"at most {MOST_RUNNING} rows", "lower it")
        return tuple(count for count, _ in pairs)
    rows, limit = [1], options.max_running or DEFAULT_RUNNING[device]
    while rows[-1] < limit:
        rows.append(min(2 * rows[-1], limit))
    return tuple(rows)


def _decode_buckets(rows: tuple[int, ...], options: BuildOptions) -> list[Bucket]:
    """One token a row, or with drafting a row's last token and its drafts."""
    drafts, kind = options.spec_depth, DECODE_KIND[options.spec_depth > 0]
    return [
        Bucket(kind=kind, rows=r, tokens=r * (1 + drafts), drafts=drafts) for r in sorted(set(rows))
    ]


def _extend_buckets(options: BuildOptions, device: str, running: int) -> list[Bucket]:
    option, text = "--extend-buckets", options.extend_buckets
    text = DEFAULT_EXTEND[device] if text is None else text
    sizes = {(n, rows or min(running, EXTEND_ROWS, n)) for n, rows in _numbers(option, text)}
    for tokens, rows in sizes:
        if rows > min(tokens, MOST_RUNNING):
            expected = f"rows <= tokens, and at most {MOST_RUNNING}"
            raise UsageError(option, f"{tokens}x{rows}", expected, "lower rows")
    return [Bucket(kind="extend", rows=rows, tokens=tokens) for tokens, rows in sorted(sizes)]


def _numbers(option: str, text: str) -> list[tuple[int, int]]:
    """Parse `64,512x16` into (64, 0), (512, 16)."""
    pairs = []
    for item in text.split(","):
        match = BUCKET.fullmatch(item.strip())
        if match is None or int(match[1]) > MOST_TOKENS:
            expected = f"1 to {MOST_TOKENS}, such as 1,2,4 (for extend also TOKENSxROWS)"
            raise UsageError(option, show(item), expected, "correct the list")
        pairs.append((int(match[1]), int(match[2] or 0)))
    return pairs


def _check_numbers(options: BuildOptions, shape: ModelShape) -> None:
    for field, least, most in (
        ("max_context", 16, shape.max_context),
        ("max_running", 1, MOST_RUNNING),
        ("page_size", 1, 1024),
        ("snapshot_grid", 1, shape.max_context),
        ("tp", 1, 8),
        ("jobs", 1, 256),
    ):
        value = getattr(options, field)
        if value is not None and not least <= value <= most:
            option = "--" + field.replace("_", "-")
            raise UsageError(option, value, f"{least} to {most}", "choose a value in that range")
    _check_drafting(options, shape)
    if options.snapshot_grid % options.page_size:
        expected = f"a multiple of --page-size {options.page_size}"
        raise UsageError("--snapshot-grid", options.snapshot_grid, expected, "change one of them")


def _check_drafting(options: BuildOptions, shape: ModelShape) -> None:
    """Refuse more drafts than the checkpoint can make, or than a round may cross the grid with."""
    option, depth, depths = "--spec-depth", options.spec_depth, shape.drafts.depths
    if not 0 <= depth <= depths:
        remedy = "choose a value in that range" if depths else "the model has no draft depths"
        raise UsageError(option, depth, f"0 to {depths}", remedy)
    if depth >= options.snapshot_grid:
        expected = f"less than --snapshot-grid {options.snapshot_grid}"
        raise UsageError(option, depth, expected, "change one of them")
    if options.draft_vocab is not None and not depth:
        found = f"{options.draft_vocab} without drafting"
        raise UsageError("draft_vocab", found, "--spec-depth above 0", "add it or drop draft_vocab")
    if options.draft_vocab is not None and not 1 <= options.draft_vocab <= shape.real_vocab:
        expected = f"1 to {shape.real_vocab}"
        raise UsageError("draft_vocab", options.draft_vocab, expected, "choose a value in it")


def _draft_vocab(options: BuildOptions, shape: ModelShape) -> int:
    """How many first ids are drafted among; 0 without drafting."""
    return (options.draft_vocab or shape.real_vocab) if options.spec_depth else 0


def _arch(given: str | None, device: str) -> str:
    known = CPU_ARCHS if device == "cpu" else CUDA_ARCHS
    level = cpu_level()
    default = "sm90" if device == "cuda" else f"x86-64-v{level}" if level else "native"
    chosen = given or default
    if chosen not in known:
        raise UsageError("--arch", chosen, " | ".join(known), f"choose one for --device {device}")
    if chosen.startswith("x86-64-v") and int(chosen[-1]) > level:
        remedy = "choose a level this machine has; the programs are proved where they are built"
        raise UsageError("--arch", chosen, f"at most x86-64-v{level}", remedy)
    return chosen


def _choice(option: str, value: str, known: dict[str, Any]) -> Any:
    if value not in known:
        raise UsageError(option, value, " | ".join(known), "choose one of them")
    return known[value]
