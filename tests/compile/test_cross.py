"""Building for CUDA without a GPU: what is answered, that it is all put back, what is recorded."""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch._C
import torch._inductor.config
import torch._inductor.fx_passes.joint_graph
import torch._inductor.fx_passes.post_grad
import torch._inductor.graph
import torch._subclasses.fake_tensor
import torch.utils.cpp_extension
from click.testing import CliRunner
from support import folders
from torch._dynamo import device_interface

from inkling_engine.artifacts.errors import FailedError, UsageError
from inkling_engine.artifacts.manifest import ProgramEntry
from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.artifacts.store import open_manifest, seal, stage
from inkling_engine.compile import build, cli, items, program
from inkling_engine.compile.backends import cross
from inkling_engine.compile.options import BuildOptions
from inkling_engine.compile.plan import make_plan, require_buildable
from inkling_engine.compile.worker import Request

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")

HEADER = "CUresult CUDAAPI cuModuleLoad(CUmodule *module); /* see cuLaunchKernel */"


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CUDA installation with one header, which is the one that is found."""
    for name in cross.HEADERS:
        header = tmp_path / "include" / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.touch()
    (tmp_path / "include" / "cuda.h").write_text(HEADER)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    return tmp_path


def everything() -> list[dict[str, Any]]:
    """All that could be left changed."""
    from triton.backends import backends
    from triton.runtime import driver

    owners = [
        torch.cuda,
        torch._C,
        torch._C._dynamo.guards,
        torch._inductor.graph,
        torch._inductor.fx_passes.joint_graph,
        torch._inductor.fx_passes.post_grad,
        torch._subclasses.fake_tensor,
        torch.utils.cpp_extension,
        device_interface.CudaInterface,
        driver,
    ]
    settings = {"threads": torch._inductor.config.compile_threads}
    known = device_interface.caching_worker_device_properties
    return [dict(vars(o)) for o in owners] + [
        dict(os.environ),
        dict(backends),
        settings,
        dict(known),
    ]


def test_the_target_is_described_and_everything_put_back(headers: Path) -> None:
    from triton.runtime import driver

    before = everything()
    with cross.without_gpu("sm90"):
        assert torch.cuda.is_available() and not cross.needed("cuda")
        interface = device_interface.get_interface_for_device("cuda")
        assert interface.get_compute_capability() == 90
        assert interface.Worker.get_device_properties(0).multi_processor_count == 132
        target = driver.active.get_current_target()
        assert (target.backend, target.arch, target.warp_size) == ("cuda", 90, 32)
        with pytest.raises(AssertionError, match="measured"):
            driver.active.get_benchmarker()
        assert str(headers / "include") in os.environ["CPATH"]
        assert [left for left, now in zip(before, everything(), strict=True) if left != now]
    assert everything() == before


def test_a_build_that_fails_puts_everything_back_too(headers: Path) -> None:
    before = everything()
    with pytest.raises(RuntimeError, match="lowering"), cross.without_gpu("sm90"):
        raise RuntimeError("lowering")
    assert everything() == before


def test_a_step_runs_on_tensors_without_memory(headers: Path) -> None:
    from torch._inductor import graph

    with cross.without_gpu("sm90"):
        real = vars(graph)["defake"]
        huge = real(torch.empty(1 << 40, 2, device="meta").t())
        assert (huge.device.type, huge.stride()) == ("meta", (1, 2))
        assert real(3) == 3


def test_programs_depend_on_the_real_libcuda(headers: Path, tmp_path: Path) -> None:
    """Whatever the linker drops, the stub defines what a program refers to."""
    with cross.without_gpu("sm90"):
        folder = os.environ["LIBRARY_PATH"].split(os.pathsep)[0]
        stub = ctypes.CDLL(f"{folder}/libcuda.so")
        assert hasattr(stub, "cuModuleLoad") and hasattr(stub, "cuLaunchKernel")
        source = "int cuModuleLoad(void); int f(void) { return cuModuleLoad(); }"
        command = ["g++", "-shared", "-fPIC", "-Wl,--as-needed", "-x", "c", "-", "-lcuda"]
        target = str(tmp_path / "program.so")
        subprocess.run([*command, "-o", target], input=source, text=True, check=True)
    listed = subprocess.run(["readelf", "-d", target], capture_output=True, text=True, check=True)
    assert "libcuda.so.1" in listed.stdout


def test_missing_headers_are_named(headers: Path) -> None:
    (headers / "include" / "nv" / "target").unlink()
    before = everything()
    wanted = pytest.raises(FailedError, match=r"CUDA headers: .*nvidia-cuda-runtime")
    with wanted, cross.without_gpu("sm90"):
        pass
    assert everything() == before


def test_it_is_for_cuda_without_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cross.needed("cuda") and not cross.needed("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not cross.needed("cuda")


def test_a_program_built_so_says_that_nothing_proved_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inside: list[str] = []
    entry = folders.manifest().programs[0]

    @contextlib.contextmanager
    def without_gpu(arch: str) -> Iterator[None]:
        inside.append(arch)
        yield
        inside.clear()

    def lower(spec: EngineSpec, bucket: Bucket, package: Path) -> ProgramEntry:
        assert inside == ["sm90"], "lowered outside"
        return entry

    monkeypatch.setattr(cross, "without_gpu", without_gpu)
    monkeypatch.setattr(program, "_lower", lower)
    spec = msgspec.structs.replace(folders.SPEC, device="cuda", arch="sm90")
    found = program.compile_bucket(spec, spec.buckets[0], tmp_path / "x.pt2")
    assert found.proof == "none: built without a GPU" and not inside


def test_the_manifest_tells_where_it_was_built_and_the_command_how_to_prove_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert items.build_environment().built_with_gpu is False
    spec = msgspec.structs.replace(folders.SPEC, device="cuda", arch="sm90")
    drawn = " --random-weights 0"
    for weights, tp, expected in (
        (True, 1, ""),
        (False, 2, f"{drawn} --alone"),
        (False, 1, drawn),
    ):
        folder = tmp_path / f"{weights}-{tp}"
        built, spec = folders.manifest(weights=weights), msgspec.structs.replace(spec, tp=tp)
        on_cuda = msgspec.structs.replace(built, spec=spec, environment=items.build_environment())
        seal(folders.fill(stage(folder), folders.contents(on_cuda)), on_cuda, folder)
        assert cli._proof_to_do(folder) == f"inkling-engine verify {folder}{expected}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    there = msgspec.structs.replace(on_cuda, environment=items.build_environment())
    seal(folders.fill(stage(tmp_path / "gpu"), folders.contents(there)), there, tmp_path / "gpu")
    assert open_manifest(tmp_path / "gpu").environment.built_with_gpu
    assert cli._proof_to_do(tmp_path / "gpu") is None


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_the_command_ends_with_what_is_left_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: tuple[str, ...]
) -> None:
    folders.build(tmp_path / "engine")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build, "build", lambda *_: tmp_path / "engine")
    for device, lines in (("cuda", 1), ("cpu", 0)):
        arguments = ["--model", "inkling-tiny", "--device", device, *quiet]
        done = CliRunner().invoke(cli.command, arguments, catch_exceptions=False)
        assert done.stdout == f"{tmp_path / 'engine'}\n"
        assert len(done.stderr.splitlines()) == lines
        assert ("inkling-engine verify" in done.stderr) == bool(lines)


def test_a_build_without_a_gpu_runs_no_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def seal_nothing(state: build.Build, *_: object) -> None:
        state.sealed.mkdir()

    monkeypatch.setattr(build, "_run_items", lambda state: {})
    monkeypatch.setattr(build, "_seal", seal_nothing)
    monkeypatch.setattr(build, "_verify", lambda state: ran.append(state.plan.spec.device))
    for device in ("cuda", "cpu"):
        options = BuildOptions(model="inkling-tiny", device=device, out=str(tmp_path / device))
        build.build(make_plan(options), lambda *_: None)
    assert ran == ["cpu"]


def test_cuda_needs_a_cuda_build_of_torch_but_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(BuildOptions(model="inkling-tiny", device="cuda"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    require_buildable(plan)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UsageError, match="CUDA build of torch"):
        require_buildable(plan)


@pytest.mark.parametrize(("model", "ranks"), [("inkling-small", 8), ("inkling-tiny", 2)])
def test_engines_of_several_ranks_are_built(
    monkeypatch: pytest.MonkeyPatch, model: str, ranks: int
) -> None:
    """Programs alone, and with weights."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    require_buildable(make_plan(BuildOptions(model=model, device="cuda", tp=ranks)))


def test_a_large_engine_is_lowered_where_no_gpu_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside a GPU its weights and pools, as zeros, might not fit; only its twin is made there."""
    spec = msgspec.structs.replace(folders.SPEC, device="cuda", arch="sm90")
    bucket, lowered = spec.buckets[0], folders.manifest().programs[0]
    seen: dict[str, Any] = {}

    def child(command: list[str], *, env: dict[str, str], **_: object) -> Any:
        seen["devices"] = env["CUDA_VISIBLE_DEVICES"]
        request = msgspec.json.decode(Path(command[-1]).read_bytes(), type=Request)
        seen["spec"] = request.spec
        Path(request.entry).write_bytes(msgspec.json.encode(lowered))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(cross, "needed", lambda _: False)
    monkeypatch.setattr(program, "is_small", lambda *_: False)
    monkeypatch.setattr(subprocess, "run", child)
    monkeypatch.setattr(program, "_lower", lambda spec, *_: seen.update(lowered=spec))
    monkeypatch.setattr(program, "_prove", lambda spec, *_: seen.update(proved=spec))
    entry = program.compile_bucket(spec, bucket, tmp_path / "step.pt2")
    assert seen["devices"] == "" and seen["spec"] == spec
    assert seen["lowered"] == seen["proved"] != spec
    assert entry.proof == "twin of reduced widths equal to eager"
