"""Dry runs: the published byte counts, what fits, and that neither torch nor a GPU is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.checkpoints import load, save, tiny_config, write_random
from support.compiler import compile_engine, refused

from inkling_engine.artifacts.errors import CorruptError, DoesNotFitError, UsageError
from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.compile.memory import Bill, memory_bill, require_fit
from inkling_engine.compile.models.inkling.shape import TINY, preset
from inkling_engine.compile.options import BuildOptions
from inkling_engine.compile.plan import Plan, fingerprint, make_plan, plan_json, require_buildable
from inkling_engine.compile.pools import entry_bytes, pool_entries
from inkling_engine.compile.report import LABELS
from inkling_engine.kernels._exchange import HEADER

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
sys.argv = ["compile-engine", *sys.argv[1:]]
from inkling_engine.compile.cli import main
main()
heavy = {"torch", "numpy", "safetensors", "tokenizers", "triton"}
assert not heavy & {name for name, module in sys.modules.items() if module}
"""


def dry_run(*arguments: str) -> dict[str, Any]:
    """The JSON of a dry run in a process in which torch cannot be imported."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def plan_of(model: str = "inkling-small", memory: int | None = None, **given: Any) -> Plan:
    return make_plan(BuildOptions(model=model, **given), memory)


def test_the_small_model_on_eight_ranks() -> None:
    plan = dry_run("--model", "inkling-small", "--tp", "8", "--dry-run")
    memory = plan["memory"]
    assert memory["text_decoder"] == 65_991_558_308
    assert memory["drafts"] == 1_028_575_248
    assert memory["kv_full_per_token"] == 3_584
    assert memory["kv_window_per_request"] == 9_175_040
    assert memory["conv_per_request"] == 2_128_896
    assert memory["conv_per_request_scattered"] == 322_560
    # Convolution taps of 42 layers: k and v of one head, attn and mlp whole; and 2 dense scales.
    assert memory["text_decoder_fp32"] == 2 * (42 * 4 * (2 * 128 + 2 * 4096) + 2)
    assert memory["drafts_fp32"] == 2 * (8 * 4 * (2 * 128 + 2 * 4096) + 8)
    assert 0 < memory["text_decoder_padding"] < 256 * 42 * 14
    assert 0 < memory["drafts_padding"] < 256 * 8 * 16
    assert memory["fits"] is True
    assert (plan["device"], plan["arch"], plan["dtype"]) == ("cuda", "sm90", "bfloat16")
    assert plan["weights"] is None


def test_the_large_model_on_eight_ranks() -> None:
    memory = dry_run("--model", "inkling", "--tp", "8", "--dry-run")["memory"]
    assert memory["kv_full_per_token"] == 2 * 2 * 128 * 11
    assert memory["conv_per_request"] == 3 * 2 * (66 * 2 * 6144 + 55 * 4 * 128 + 11 * 2 * 128)
    assert memory["text_decoder"] > 200 * 10**9
    assert memory["fits"] is False
    assert (memory["fits_tokens"], memory["fits_requests"]) == (0, 0)


def test_the_bill_is_the_sum_of_its_lines() -> None:
    for spec in (plan_of(tp=8).spec, plan_of("inkling-tiny", device="cpu").spec):
        bill = memory_bill(spec)
        weights = bill.text_decoder + bill.text_decoder_padding + bill.text_decoder_fp32
        weights += bill.drafts + bill.drafts_padding + bill.drafts_fp32
        assert bill.pools == sum(entry_bytes(entry) for entry in pool_entries(spec))
        assert bill.total == weights + bill.pools + bill.programs + bill.slack
        assert bill.fits == (bill.total <= bill.device_memory)


def test_what_fits_really_fits() -> None:
    """One more request's state or one more token than stated is more than the memory holds."""
    bill = plan_of(tp=8, memory=80 * 10**9).bill
    fixed = bill.text_decoder + bill.text_decoder_padding + bill.text_decoder_fp32
    fixed += bill.drafts + bill.drafts_padding + bill.drafts_fp32 + bill.programs + bill.slack
    request = bill.conv_per_request + bill.kv_window_pages_per_request + bill.table_per_request
    free = 80 * 10**9 - fixed
    eight_k = request + 8192 * bill.kv_full_per_token
    assert bill.fits_requests == free // eight_k > 0
    assert bill.fits_tokens == (free - 128 * request) // bill.kv_full_per_token > 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("80G", 80 * 10**9), ("141e9", 141 * 10**9), ("64GiB", 64 << 30), ("1.5tb", 1500 * 10**9)],
)
def test_the_dry_run_takes_a_device_memory(text: str, size: int) -> None:
    done = compile_engine("--model", "inkling-small", "--tp", 8, "--json", f"--dry-run={text}")
    assert json.loads(done.stdout)["memory"]["device_memory"] == size


def test_pages_are_reduced_to_what_the_memory_holds() -> None:
    large, small = (plan_of(tp=8, memory=size) for size in (141 * 10**9, 80 * 10**9))
    assert small.bill.fits and large.bill.fits
    assert small.spec.pools.full_pages < large.spec.pools.full_pages
    page = small.bill.kv_full_per_token * small.spec.page_size
    assert 0 <= small.bill.device_memory - small.bill.total < page
    pools = small.spec.pools
    tiny = plan_of("inkling-tiny", device="cpu").spec.pools
    assert pools.window_pages == large.spec.pools.window_pages
    assert tiny.full_pages == 1 + 8 * tiny.table_width


def test_what_does_not_fit_is_said_and_refused_at_the_build() -> None:
    plan = plan_of("inkling-tiny", device="cpu", memory=10**6)
    assert not plan.bill.fits
    assert plan.spec.pools.full_pages == 1 + plan.spec.pools.table_width
    with pytest.raises(DoesNotFitError, match="device memory: found 1000000 bytes"):
        require_buildable(plan)
    require_fit(plan.spec, memory_bill(plan.spec))


def test_the_printed_plan_has_every_line_of_the_bill() -> None:
    assert set(Bill.__struct_fields__) == set(LABELS) | {"fits"}
    done = compile_engine("--model", "inkling-small", "--tp", 8, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "inkling-small: tp 8, cuda sm90, bfloat16"
    assert any(
        line.startswith("  text decoder") and line.endswith("65,991,558,308") for line in lines
    )
    assert lines[-1] == "  the whole engine fits the device memory"


def test_items_of_a_plan() -> None:
    tiny = plan_of("inkling-tiny", device="cpu", decode_buckets="1", extend_buckets="64x8")
    programs = ("decode-r0001", "extend-t00064-r0008")
    assert tiny.items == ("kernels", *programs, "weights-rank0", "golden")
    assert tiny.checkpoint is not None and tiny.checkpoint.folder == TINY
    bare = plan_of(tp=8)
    assert "kernels" not in bare.items and not any(
        item.startswith("weights") for item in bare.items
    )
    assert plan_json(bare)["items"] == list(bare.items)


def test_ranks_whose_weights_are_converted() -> None:
    plan = plan_of("inkling-tiny", device="cpu", tp=2, rank_weights="1,0,1")
    assert plan.ranks == (0, 1)
    assert plan_of("inkling-tiny", device="cpu", tp=2).ranks == (0, 1)
    assert plan_of("inkling-tiny", device="cpu", tp=2, rank_weights="1").ranks == (1,)
    for text in ("2", "-1", "a", "0,"):
        with pytest.raises(UsageError, match="--rank-weights"):
            plan_of("inkling-tiny", device="cpu", tp=2, rank_weights=text)


def test_first_layers_of_a_preset() -> None:
    """Six of the small model: five window layers, two dense ones; never with weights."""
    plan = plan_of("inkling-small", tp=2, layers=6)
    shape, whole = plan.spec.shape, preset("inkling-small")
    assert whole is not None and plan.spec.model == "inkling-small-6-layers"
    assert (shape.layers, shape.local_layers, shape.dense_layers) == (6, (0, 1, 2, 3, 4), 2)
    assert shape.drafts == whole.drafts and shape.vocab == whole.vocab
    for model, layers in (("inkling-small", 0), ("inkling-small", 43), ("inkling-tiny", 2)):
        with pytest.raises(UsageError, match=r"^layers: "):
            plan_of(model, layers=layers)


def test_a_model_that_cannot_be_split_so_is_refused() -> None:
    with pytest.raises(UsageError, match="--tp: found 3 .*8 kv heads.* use --tp 1 or 2 or 4 or 8"):
        plan_of(tp=3)


def test_a_checkpoint_folder_names_its_engine(tmp_path: Path) -> None:
    folder = write_random(tmp_path / "my-model", tiny_config(), seed=0)
    plan = plan_of(str(folder), device="cpu")
    assert plan.spec.model == "my-model"
    assert plan.folder("0123456789") == Path("artifacts") / (
        f"my-model-tp1-{plan.spec.arch}-fp32-01234567"
    )
    assert plan_of(str(folder), device="cpu", out="x").folder("0") == Path("x")


def test_a_checkpoint_of_a_preset(tmp_path: Path) -> None:
    assert plan_of("inkling-tiny", checkpoint=str(TINY), device="cpu").spec.model == "inkling-tiny"
    other = write_random(tmp_path / "other", tiny_config(), seed=0)
    with pytest.raises(UsageError, match="hidden"):
        plan_of("inkling-tiny", checkpoint=str(other))
    with pytest.raises(UsageError, match="--checkpoint.*drop --checkpoint"):
        plan_of(str(other), checkpoint=str(TINY))


def test_damaged_weights_are_corrupt_not_misused(tmp_path: Path) -> None:
    folder = write_random(tmp_path / "m", tiny_config(), seed=0)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CorruptError):
        plan_of(str(folder))


def test_the_fingerprint_is_of_contents(tmp_path: Path) -> None:
    first, same = (write_random(tmp_path / name, tiny_config(), seed=0) for name in ("a", "b"))
    prints = {
        fingerprint(plan_of(str(folder), device="cpu").checkpoint) for folder in (first, same)
    }
    tensors = load(same)
    next(iter(tensors.values())).view(-1)[0] += 1
    save(same, tiny_config(), tensors)
    prints.add(fingerprint(plan_of(str(same), device="cpu").checkpoint))
    assert len(prints) == 2
    assert fingerprint(None) not in prints


def test_large_files_are_sampled_over_their_whole_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inkling_engine.compile.plan.WHOLE_FILE", 1000)
    monkeypatch.setattr("inkling_engine.compile.plan.SAMPLE_BYTES", 100)
    folder = write_random(tmp_path / "m", tiny_config(), seed=0)
    checkpoint = plan_of(str(folder), device="cpu").checkpoint
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    found = {fingerprint(checkpoint)}
    for place in (0, len(data) - 1):
        changed = data.copy()
        changed[place] ^= 1
        weights.write_bytes(changed)
        found.add(fingerprint(checkpoint))
    assert len(found) == 3


def test_several_ranks_are_built_for_a_cpu_with_all_or_some_weights() -> None:
    for ranks, whole in ((None, True), ("all", True), ("0,1", True), ("1", False)):
        plan = plan_of("inkling-tiny", device="cpu", tp=2, rank_weights=ranks)
        require_buildable(plan)
        assert plan.whole == whole
    assert not plan_of(tp=2).whole
    assert plan_of("inkling-tiny", device="cpu").whole


def test_the_exchange_holds_the_largest_part_of_a_rank() -> None:
    """Twice: rows of the widest step or draft phase, or a rank's logits of a sample a token."""
    given: dict[str, Any] = {"decode_buckets": "8", "extend_buckets": "64x4"}
    tiny, hidden, columns = partial(plan_of, "inkling-tiny", device="cpu", **given), 192, 2048 // 4
    assert plan_of("inkling-tiny", device="cpu").bill.exchange == 8 * HEADER
    halves: dict[tuple[tuple[str, Any], ...], int] = {
        (("tp", 4),): 64 * hidden * 4,
        (("tp", 4), ("dtype", "bf16")): 64 * hidden * 2,
        (("tp", 4), ("spec_depth", 3)): max((64 + 4 * 3) * hidden, 8 * 4 * columns) * 4,
    }
    for options, half in halves.items():
        bill = tiny(**dict(options)).bill
        assert 0 <= bill.exchange - 8 * HEADER - 2 * half < 2 * 256


@pytest.mark.parametrize(("tokens", "slot"), [(64, 64 * 4096 * 2), (2048, 2 << 20)])
def test_the_exchange_of_gpus_has_slots(tokens: int, slot: int) -> None:
    """Two a rank, for parts of up to 2 MiB."""
    given: dict[str, Any] = {"decode_buckets": "1", "extend_buckets": f"{tokens}x4", "tp": 8}
    bill = plan_of("inkling-small", device="cuda", **given).bill
    half = tokens * 4096 * 2
    assert bill.exchange == 8 * HEADER + 2 * half + 2 * 8 * slot


def test_a_rank_of_many_needs_less() -> None:
    """What is split is less, what every rank has is not."""
    one, two, four = (plan_of("inkling-tiny", device="cpu", tp=tp).bill for tp in (1, 2, 4))
    for bill, tp in ((two, 2), (four, 4)):
        assert one.text_decoder / tp < bill.text_decoder < one.text_decoder
        assert bill.table_per_request == one.table_per_request
        assert bill.exchange > one.exchange
    assert two.kv_full_per_token == four.kv_full_per_token == one.kv_full_per_token // 2
    assert four.kv_window_per_request * 4 == two.kv_window_per_request * 2


def test_specs_of_plans_are_stable_values() -> None:
    spec = plan_of(tp=8).spec
    again = msgspec.json.decode(msgspec.json.encode(spec), type=EngineSpec)
    assert again == spec == plan_of(tp=8).spec


def test_a_refused_size_is_one_line() -> None:
    for text in ("0", "1e999", "80X", "much", "1e-3"):
        done = compile_engine("--model", "inkling-small", f"--dry-run={text}")
        assert "--dry-run" in refused(done, 2)
