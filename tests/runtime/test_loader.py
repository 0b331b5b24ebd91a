"""Opening a folder: what is refused, in which order, with which exit code; and the binding."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
import torch
from support.fake_spec import build_manifest, build_spec
from support.fake_step import FakeStep, run_oracle, seal_engine

from inkling_engine.artifacts import compat, layout
from inkling_engine.artifacts.digest import digest
from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.artifacts.store import add_files, open_manifest, stage
from inkling_engine.runtime import binding, driver, graphs, loader, probe
from inkling_engine.runtime.binding import assemble
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.errors import (
    CorruptError,
    DoesNotFitError,
    FailedError,
    IncompatibleError,
    UsageError,
    UserError,
)
from inkling_engine.runtime.sampling import SamplingParams
from inkling_engine.runtime.usage import planned
from inkling_engine.runtime.weights import random_weights, read_weights

SPEC = build_spec()
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INKLING_ENGINE_CACHE", str(tmp_path / "cache"))
    seal_engine(tmp_path / "engine", SPEC)
    return tmp_path / "engine"


def _edit(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Seal a changed manifest in place, as a sound engine of another kind."""
    manifest = change(open_manifest(folder))
    unsigned = msgspec.structs.replace(manifest, manifest_sha256="")
    signed = msgspec.structs.replace(unsigned, manifest_sha256=digest(unsigned))
    (folder / layout.MANIFEST).write_bytes(msgspec.json.encode(signed))


def test_a_loaded_folder_runs_and_tells_its_phases(folder: Path) -> None:
    with Engine.load(folder, programs=FakeStep) as engine:
        tokens = engine.generate([30, 31], GREEDY)[0].choices[0].token_ids
        assert list(tokens) == run_oracle(SPEC, [30, 31], GREEDY)[0]
        phases = ["manifest", "compat", "digests", "import", "weights", "probe", "programs"]
        assert list(engine.timings) == [*phases, "pools", "bind", "first token"]
        before = engine.timings["first token"]
        engine.generate([30, 31], GREEDY)
        assert engine.timings["first token"] == before > 0
        assert all(seconds >= 0 for seconds in engine.timings.values())
        assert torch.get_num_threads() == SPEC.threads
        assert engine.tokenizer is not None


def test_a_moved_folder_opens(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    folder.rename(moved)
    Engine.load(moved, programs=FakeStep).close()


def test_two_engines_in_one_process(folder: Path) -> None:
    with (
        Engine.load(folder, programs=FakeStep) as one,
        Engine.load(folder, programs=FakeStep) as two,
    ):
        assert one.generate([30], GREEDY)[0].choices == two.generate([30], GREEDY)[0].choices


def _refused(folder: Path, kind: type[UserError], **options: object) -> str:
    with pytest.raises(kind) as caught:
        Engine.load(folder, programs=FakeStep, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_flipped_byte_is_corrupt(folder: Path) -> None:
    path = folder / layout.weights_file(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert "rank0.safetensors" in _refused(folder, CorruptError)


def test_another_torch_is_incompatible_before_digests(folder: Path) -> None:
    (folder / layout.weights_file(0)).unlink()
    environment = open_manifest(folder).environment
    other = msgspec.structs.replace(environment, torch="1.0.0")
    _edit(folder, lambda manifest: msgspec.structs.replace(manifest, environment=other))
    message = _refused(folder, IncompatibleError)
    assert "torch 1.0.0" in message and environment.torch in message


@pytest.mark.parametrize(
    ("changes", "field"), [({"device": "cuda"}, "device: "), ({"tp": 2}, "engine target: ")]
)
def test_other_targets_are_incompatible(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], field: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = msgspec.structs.replace(SPEC, **changes)
    _edit(folder, lambda manifest: msgspec.structs.replace(manifest, spec=spec))
    assert _refused(folder, IncompatibleError).startswith(field)


def test_one_rank_of_several_opens_to_be_measured(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = msgspec.structs.replace(SPEC, tp=2)
    _edit(folder, lambda manifest: msgspec.structs.replace(manifest, spec=spec))
    assert "--alone" in _refused(folder, IncompatibleError)
    with Engine.load(folder, programs=FakeStep, random_weights=3, alone=True) as engine:
        assert "rank 0 of 2 runs alone" in caplog.text
        assert len(engine.generate([30], GREEDY)[0].choices[0].token_ids) == 5
        bias = SamplingParams(logit_bias={spec.shape.real_vocab: 1.0})
        with pytest.raises(UsageError, match=f"logit_bias.*below {spec.shape.real_vocab}"):
            engine.generate([30], bias)


def test_all_ranks_need_their_weights(folder: Path) -> None:
    spec = msgspec.structs.replace(SPEC, tp=3)
    _edit(folder, lambda manifest: msgspec.structs.replace(manifest, spec=spec))
    with pytest.raises(
        UsageError, match=r"no weights of rank 1, 2; expected those of ranks 0 to 2"
    ):
        Engine.load(folder)


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for given, indices in ((2, (2, 3)), ((1, 1), (1, 1))):
        assert loader._indices(loader.LoadOptions(device_index=given), 2) == indices
        loader._require_devices("cuda", indices)
    with pytest.raises(UsageError, match="found 4, of 2 .* expected 0 to 3, of 4 cuda"):
        loader._require_devices("cuda", (3, 4))
    with pytest.raises(UsageError, match=r"found \(1, 1\); expected .* each of 3 rank"):
        loader._indices(loader.LoadOptions(device_index=(1, 1)), 3)


def test_programs_only_engines_name_the_way_out(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    seal_engine(folder, SPEC, weights=False)
    message = _refused(folder, UsageError)
    assert "attach-weights" in message and "--random-weights" in message
    with Engine.load(folder, programs=FakeStep, random_weights=3) as engine:
        assert len(engine.generate([30], GREEDY)[0].choices[0].token_ids) == 5


def test_memory_limits(folder: Path) -> None:
    need = sum(planned(open_manifest(folder)).values())
    Engine.load(folder, programs=FakeStep, memory=need).close()
    message = _refused(folder, DoesNotFitError, memory=need - 1)
    assert f"{need:,} bytes" in message and f"{need - 1:,}" in message
    assert "memory" in _refused(folder, DoesNotFitError, memory=1e-9)


def test_what_the_plan_does_not_count_may_be_too_much(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **named: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nSearch for it")

    monkeypatch.setattr(binding, "assemble", fails)
    message = _refused(folder, DoesNotFitError)
    assert "memory: found CUDA error: out of memory; expected room on cpu" in message
    monkeypatch.setattr(loader, "_memory_errors", lambda device: nullcontext())
    with pytest.raises(RuntimeError, match="Search"):
        Engine.load(folder, programs=FakeStep)


def test_programs_are_unpacked_where_one_can_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    with pytest.raises(UsageError, match="TMPDIR: found /nowhere; expected a writable folder"):
        Engine.load(folder)
    Engine.load(folder, programs=FakeStep).close()  # nothing is unpacked
    monkeypatch.setenv("TMPDIR", "/")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="TMPDIR: found /;"):
        Engine.load(folder)


def test_the_drivers_want_of_memory_is_told_from_a_broken_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "attempt", lambda name, *arguments: arguments[0])
    driver.call("cuMemCreate", 0)
    with pytest.raises(RuntimeError, match="cuMemCreate: out of memory"):
        driver.call("cuMemCreate", 2)
    with pytest.raises(AssertionError):
        driver.call("cuMemCreate", 1)


def test_free_memory_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:  7 kB\n")
    assert loader._free_memory(meminfo) == 7 * 1024
    assert loader._free_memory(tmp_path / "none") == compat.machine_memory()
    monkeypatch.setattr(loader, "_free_memory", lambda: 1)
    assert "free memory" in _refused(folder, DoesNotFitError)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    manifest = build_manifest(SPEC)
    recipe = manifest.recipe[0]
    for changes in ({"shape": (4, 160)}, {"dtype": "bfloat16"}, {"name": "embed_norm"}):
        wrong = msgspec.structs.replace(recipe, **changes)
        inputs = (f"weights.{wrong.name}",)
        programs = (msgspec.structs.replace(manifest.programs[0], inputs=inputs),)
        changed = msgspec.structs.replace(manifest, recipe=(wrong,), programs=programs)
        with pytest.raises(CorruptError, match=f"weight {wrong.name}"):
            read_weights(folder / layout.weights_file(0), changed)


def test_weights_that_no_program_reads_stay_on_disk() -> None:
    manifest = build_manifest(SPEC)
    draft = msgspec.structs.replace(manifest.recipe[0], name="drafts.0.w13", shape=(1 << 40,))
    changed = msgspec.structs.replace(manifest, recipe=(*manifest.recipe, draft))
    assert list(random_weights(changed, 0)) == ["embed"]
    assert planned(changed) == planned(manifest)


def _rename(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda weights: {name: weights["embed"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {"embed": w["embed"].to(torch.float16)}, "float16"),
        (lambda w: {"embed": w["embed"][1:]}, "shape"),
        (lambda w: {"embed": torch.empty(4, 160).t()}, "strides"),
        (lambda w: {"embed": torch.empty(641)[1:].view(160, 4)}, "misaligned"),
        (lambda w: {"embed": w["embed"].requires_grad_()}, "gradient"),
        (lambda w: {"embed": torch.empty(160, 4, device="meta")}, "meta"),
        (_rename("head"), "weights.embed was not given"),
    ],
)
def test_every_input_is_checked_once(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], message: str
) -> None:
    manifest = build_manifest(SPEC)
    with pytest.raises(AssertionError, match=message):
        assemble(manifest, change(random_weights(manifest, 0)), FakeStep)


def test_programs_share_weights_and_pools_but_no_rows() -> None:
    manifest = build_manifest(SPEC)
    seen: dict[str, set[int]] = {}

    def record(manifest: Manifest, inputs: object) -> FakeStep:
        assert isinstance(inputs, dict)
        for program in manifest.programs:
            for name, tensor in zip(program.inputs, inputs[program.name], strict=True):
                seen.setdefault(name, set()).add(tensor.data_ptr())
        return FakeStep(manifest, inputs)

    loaded = assemble(manifest, random_weights(manifest, 0), record)
    for name, addresses in seen.items():
        assert len(addresses) == (len(manifest.programs) if name.startswith("rows.") else 1), name
        assert all(address % 64 == 0 for address in addresses)
    engine = Engine(loaded)
    before = {name: tensor.data_ptr() for name, tensor in engine.pool.tensors.items()}
    engine.generate([[30] * 40, [31]], GREEDY)
    assert before == {name: tensor.data_ptr() for name, tensor in engine.pool.tensors.items()}


def test_what_is_no_program_is_named_by_the_probe(folder: Path) -> None:
    with pytest.raises(FailedError, match="probe of"):
        Engine.load(folder)


def _probed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many probes a load of the real programs' place starts; all of them succeed."""
    idle, begun = [sys.executable, "-c", ""], []

    def start(folder: Path, device: str) -> subprocess.Popen[str]:
        begun.append(device)
        return subprocess.Popen(idle, stderr=subprocess.PIPE, text=True)

    monkeypatch.setattr(probe, "start", start)
    monkeypatch.setattr(graphs, "open_programs", lambda *_: FakeStep)
    Engine.load(folder).close()
    assert set(begun) <= {"cpu"}
    return len(begun)


def test_a_successful_probe_is_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [_probed(folder, monkeypatch) for _ in range(2)] == [1, 0]
    monkeypatch.setenv("INKLING_ENGINE_DEBUG", "1")
    assert _probed(folder, monkeypatch) == 1
    monkeypatch.delenv("INKLING_ENGINE_DEBUG")
    probe.forget(open_manifest(folder))
    probe.forget(open_manifest(folder))
    assert _probed(folder, monkeypatch) == 1


def test_other_bytes_boots_and_drivers_are_probed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    probe.remember(open_manifest(folder))
    _edit(folder, lambda manifest: msgspec.structs.replace(manifest, source="another"))
    assert not probe.remembers(open_manifest(folder))
    for name in ("_BOOT", "_DRIVER"):
        probe.remember(open_manifest(folder))
        assert probe.remembers(open_manifest(folder))
        (tmp_path / name).write_text("another")
        monkeypatch.setattr(probe, name, tmp_path / name)
        assert not probe.remembers(open_manifest(folder))


def test_a_failed_probe_and_a_cache_that_cannot_be_written_leave_no_mark(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for _ in range(2):
        with pytest.raises(FailedError, match="probe of"):
            Engine.load(folder)
    (tmp_path / "file").touch()
    monkeypatch.setenv("INKLING_ENGINE_CACHE", str(tmp_path / "file"))
    assert [_probed(folder, monkeypatch) for _ in range(2)] == [1, 1]


def test_a_device_that_is_not_there_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "expected 0 to 0, of 1 cpu device" in _refused(folder, UsageError, device_index=1)
    spec = msgspec.structs.replace(SPEC, device="cuda")
    _edit(folder, lambda manifest: msgspec.structs.replace(manifest, spec=spec))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for index in (-1, 2):
        assert "expected 0 to 1" in _refused(folder, UsageError, device_index=index)


def test_debug_mode_notices_an_input_that_moved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INKLING_ENGINE_DEBUG", "1")
    with Engine.load(folder, programs=FakeStep) as engine:
        engine.generate([30], GREEDY)
        pool = engine.pool.tensors["kv_full"]
        pool.data = pool.clone()
        with pytest.raises(AssertionError, match="moved"):
            engine.generate([30], GREEDY)


def test_a_crash_in_native_code_becomes_a_message(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import os; os.kill(os.getpid(), 4)"],
        stderr=subprocess.PIPE,
        text=True,
    )
    with pytest.raises(IncompatibleError, match="killed by SIGILL"):
        probe.finish(child, tmp_path)


def test_a_probe_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_TIMEOUT", 0.05)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = subprocess.Popen(sleep, stderr=subprocess.PIPE, text=True)
    with pytest.raises(FailedError, match="still running"):
        probe.finish(child, tmp_path)
    assert child.poll() is not None


def test_attached_weights_are_read(tmp_path: Path) -> None:
    """A programs-only folder with weights added opens as if it had been built with them."""
    folder, whole = tmp_path / "engine", tmp_path / "whole"
    seal_engine(whole, SPEC)
    manifest = seal_engine(folder, SPEC, weights=False)
    staging = stage(folder)
    path = staging / layout.weights_file(0)
    path.parent.mkdir()
    path.write_bytes((whole / layout.weights_file(0)).read_bytes())
    entries = open_manifest(whole).weights
    add_files(folder, staging, msgspec.structs.replace(manifest, weights=entries))
    Engine.load(folder, programs=FakeStep).close()
