"""Build options -> EngineSpec: buckets, pools and defaults; every refusal names its option."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from support.checkpoints import tiny_config

from inkling_engine.artifacts.errors import UsageError
from inkling_engine.artifacts.spec import EngineSpec, ModelShape
from inkling_engine.compile import options as options_module
from inkling_engine.compile.models.inkling.shape import from_config, preset
from inkling_engine.compile.options import (
    EXTEND_ROWS,
    MOST_RUNNING,
    MOST_TOKENS,
    BuildOptions,
    default_device,
    make_spec,
    steady_window_pages,
)
from inkling_engine.compile.pools import destinations, pool_entries, row_entries

SHAPE: ModelShape = from_config(tiny_config(), {})


def spec_of(device: str = "cpu", **given: Any) -> EngineSpec:
    return make_spec(BuildOptions(model="toy", **given), "toy", SHAPE, device)


def refusal(device: str = "cpu", **given: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        spec_of(device, **given)
    assert "\n" not in str(caught.value)
    return caught.value


def decode_rows(spec: EngineSpec) -> list[int]:
    assert all(b.rows == b.tokens for b in spec.buckets if b.kind == "decode")
    return [bucket.rows for bucket in spec.buckets if bucket.kind == "decode"]


def extends(spec: EngineSpec) -> list[tuple[int, int]]:
    return [(bucket.tokens, bucket.rows) for bucket in spec.buckets if bucket.kind == "extend"]


def test_defaults_of_a_cpu_engine() -> None:
    spec = spec_of()
    assert (spec.device, spec.dtype, spec.tp, spec.threads) == ("cpu", "float32", 1, 1)
    assert (spec.max_context, spec.max_running) == (SHAPE.max_context, 8)
    assert (spec.page_size, spec.snapshot_grid, spec.spec_depth) == (64, 256, 0)
    assert decode_rows(spec) == [1, 2, 4, 8]
    assert extends(spec) == [(64, 8), (512, 8)]


def test_defaults_of_a_cuda_engine() -> None:
    spec = spec_of("cuda")
    assert (spec.device, spec.dtype, spec.arch) == ("cuda", "bfloat16", "sm90")
    assert decode_rows(spec) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert extends(spec) == [(64, 16), (512, 16), (2048, 16)]
    assert spec.max_running == 128


@pytest.mark.parametrize(
    ("running", "rows"), [(1, [1]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])]
)
def test_decode_rows_double_up_to_the_running_requests(running: int, rows: list[int]) -> None:
    assert decode_rows(spec_of(max_running=running)) == rows


def test_given_buckets_are_sorted_and_distinct() -> None:
    spec = spec_of(decode_buckets="4, 1,4", extend_buckets="64x2,16,64x3,64x2")
    assert decode_rows(spec) == [1, 4]
    assert extends(spec) == [(16, 4), (64, 2), (64, 3)]
    assert spec.max_running == 4


def test_rows_of_an_extend_bucket_have_a_default() -> None:
    assert extends(spec_of(max_running=64, extend_buckets="8,512")) == [(8, 8), (512, EXTEND_ROWS)]
    assert extends(spec_of(max_running=2, extend_buckets="8")) == [(8, 2)]


def test_pools_hold_every_running_request_at_full_length() -> None:
    spec = spec_of(max_running=3, max_context=1000, page_size=8, snapshot_grid=16)
    pools = spec.pools
    assert pools.table_width == 125
    assert pools.full_pages == 1 + 3 * 125
    assert (pools.slots, pools.snapshots) == (1 + 3 + 3, 3)
    assert pools.window_pages == 1 + 3 * pools.window_ring


@pytest.mark.parametrize("page", [1, 2, 4, 8])
@pytest.mark.parametrize("chunk", [1, 2, 7, 16])
def test_a_ring_holds_window_and_chunk_at_any_alignment(page: int, chunk: int) -> None:
    grid: dict[str, Any] = {"page_size": page, "snapshot_grid": 16, "extend_buckets": f"{chunk}x1"}
    ring = spec_of(**grid).pools.window_ring
    pages = {
        len({p // page for p in range(max(0, start - SHAPE.local.window + 1), start + chunk)})
        for start in range(3 * page * SHAPE.local.window)
    }
    assert ring == max(pages)
    steady = {
        len({p // page for p in range(start - SHAPE.local.window + 1, start + 1)})
        for start in range(SHAPE.local.window, 3 * page * SHAPE.local.window)
    }
    assert steady_window_pages(SHAPE, page) == max(steady)


def test_a_ring_is_never_wider_than_the_context() -> None:
    pools = spec_of(max_context=16, page_size=4, snapshot_grid=8).pools
    assert pools.window_ring == pools.table_width == 4


@pytest.mark.parametrize(
    ("tokens", "grid", "most"), [(1, 16, 1), (16, 16, 1), (17, 16, 2), (64, 16, 4)]
)
def test_destinations_cover_every_boundary_of_a_chunk(tokens: int, grid: int, most: int) -> None:
    spec = spec_of(page_size=8, snapshot_grid=grid, extend_buckets=f"{tokens}x1")
    decode, extend = spec.buckets[0], spec.buckets[-1]
    assert (destinations(spec, decode), destinations(spec, extend)) == (1, most)
    crossed = {
        sum(position % grid == 0 for position in range(start + 1, start + tokens + 1))
        for start in range(2 * grid)
    }
    assert most == max(crossed)
    shapes = {entry.name: entry.shape for entry in pool_entries(spec)}
    assert shapes["snapshot_slots"] == (1 + spec.max_running, most)


def test_row_inputs_do_not_overlap_and_are_aligned() -> None:
    spec = spec_of(page_size=8, snapshot_grid=16, extend_buckets="33x3")
    for bucket in spec.buckets:
        entries, size = row_entries(spec, bucket)
        ends = [0]
        for entry in entries:
            assert entry.offset % 64 == 0 and entry.offset >= ends[-1]
            ends.append(entry.offset + 4 * math.prod(entry.shape))
        assert ends[-1] <= size and size % 64 == 0


@pytest.mark.parametrize("dtype", ["fp32", "float32", "bf16", "bfloat16"])
def test_both_names_of_a_dtype(dtype: str) -> None:
    expected = "float32" if dtype.endswith("32") else "bfloat16"
    assert spec_of(dtype=dtype).dtype == expected


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_context", 15),
        ("max_context", SHAPE.max_context + 1),
        ("max_running", 0),
        ("max_running", MOST_RUNNING + 1),
        ("page_size", 0),
        ("page_size", 1025),
        ("snapshot_grid", 0),
        ("snapshot_grid", 10**9),
        ("spec_depth", -1),
        ("spec_depth", SHAPE.drafts.depths + 1),
        ("tp", 0),
        ("tp", 9),
        ("jobs", 0),
    ],
)
def test_a_number_out_of_range_is_refused(option: str, value: int) -> None:
    given: dict[str, Any] = {option: value}
    error = refusal(**given)
    assert error.field == "--" + option.replace("_", "-")
    assert error.found == value
    assert " to " in error.expected


@pytest.mark.parametrize("option", ["decode_buckets", "extend_buckets"])
@pytest.mark.parametrize(
    "text", ["0", "-1", "a", "1,,2", "1,", "1.5", "²", "64x0", "64x", "x4", "1e3"]
)
def test_a_malformed_bucket_list_is_refused(option: str, text: str) -> None:
    assert refusal(**{option: text}).field == "--" + option.replace("_", "-")


def test_buckets_of_absurd_size_are_refused() -> None:
    assert refusal(extend_buckets=str(MOST_TOKENS + 1)).field == "--extend-buckets"
    assert refusal(extend_buckets=f"8192x{MOST_RUNNING + 1}").field == "--extend-buckets"
    assert refusal(decode_buckets=f"1,{MOST_RUNNING + 1}").found == MOST_RUNNING + 1
    assert refusal(decode_buckets="99999999999999999999").field == "--decode-buckets"


def test_more_rows_than_tokens_are_refused() -> None:
    error = refusal(extend_buckets="8x9")
    assert (error.field, error.found) == ("--extend-buckets", "8x9")


def test_a_decode_bucket_has_rows_only() -> None:
    assert refusal(decode_buckets="4x2").found == "4x2"


def test_the_grid_must_be_whole_pages() -> None:
    error = refusal(page_size=48)
    assert error.field == "--snapshot-grid"
    assert "--page-size 48" in error.expected


def test_an_unknown_dtype_is_refused() -> None:
    error = refusal(dtype="fp8")
    assert (error.field, error.found) == ("--dtype", "fp8")
    assert "bf16" in error.expected


@pytest.mark.parametrize(("device", "arch"), [("cpu", "sm90"), ("cuda", "x86-64-v3"), ("cpu", "")])
def test_an_architecture_of_another_device_is_refused(device: str, arch: str) -> None:
    if not arch:
        assert spec_of(device, arch=arch).arch == spec_of(device).arch
        return
    error = refusal(device, arch=arch)
    assert (error.field, error.found) == ("--arch", arch)


def test_a_level_above_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "cpu_level", lambda: 3)
    assert spec_of().arch == "x86-64-v3"
    assert spec_of(arch="x86-64-v2").arch == "x86-64-v2"
    error = refusal(arch="x86-64-v4")
    assert (error.field, error.expected) == ("--arch", "at most x86-64-v3")


def test_a_machine_without_levels_builds_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "cpu_level", lambda: 0)
    assert spec_of().arch == "native"


@pytest.mark.parametrize(
    ("gpu", "weights", "device"),
    [(True, True, "cuda"), (False, True, "cpu"), (False, False, "cuda"), (True, False, "cuda")],
)
def test_the_default_device(
    gpu: bool, weights: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options_module, "gpu_visible", lambda: gpu)
    assert default_device(BuildOptions(model="toy"), has_weights=weights) == device
    assert default_device(BuildOptions(model="toy", device="cpu"), has_weights=weights) == "cpu"


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="speed"):
        msgspec.convert({"model": "toy", "speed": 11}, BuildOptions)


def test_a_published_model_fits_its_own_limits() -> None:
    shape = preset("inkling")
    assert shape is not None
    spec = make_spec(BuildOptions(model="inkling", tp=8), "inkling", shape, "cuda")
    assert spec.pools.table_width * spec.page_size == spec.max_context == 1_048_576
    assert spec.pools.window_ring * spec.page_size >= 512 + 2048 - 1
