"""Each field of the environment is compared by its own rule, and a refusal says what to do."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path

import msgspec
import pytest
from support.folders import BUILT, manifest

from inkling_engine.artifacts.compat import (
    Environment,
    check,
    cpu_level,
    level_of_flags,
    require,
    required_level,
)
from inkling_engine.artifacts.errors import IncompatibleError
from inkling_engine.artifacts.manifest import Manifest

pytestmark = pytest.mark.null

HERE = Environment(
    engine="0.1.0", torch="2.13.0+cpu", cuda="none", machine="x86_64", cpu_level=3, glibc="2.36"
)
V2 = "fpu sse sse2 cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


def built(**changes: str | int) -> Manifest:
    """The toy manifest with fields of its environment changed."""
    environment = msgspec.structs.replace(BUILT, **changes)
    return msgspec.structs.replace(manifest(), environment=environment)


def targeted(arch: str, device: str = "cpu", **changes: str | int) -> Manifest:
    """The toy manifest for another target."""
    spec = msgspec.structs.replace(manifest().spec, arch=arch, device=device)
    return msgspec.structs.replace(built(**changes), spec=spec)


def fields(found: Manifest, environment: Environment = HERE) -> dict[str, str]:
    """Severity by mismatching field."""
    return {mismatch.field: mismatch.severity for mismatch in check(found, environment)}


def test_an_engine_for_this_machine_has_no_mismatch() -> None:
    assert check(built(), HERE) == [] and require(built(), HERE) == []


@pytest.mark.parametrize(
    ("field", "value", "severity"),
    [
        ("torch", "2.12.0+cpu", "fatal"),
        ("torch", "2.13.0+cu130", "fatal"),
        ("torch", "none", "fatal"),
        ("machine", "aarch64", "fatal"),
        ("glibc", "2.37", "fatal"),
        ("glibc", "2.100", "fatal"),
        ("engine", "0.2.0", "warning"),
    ],
)
def test_what_differs_is_found(field: str, value: str, severity: str) -> None:
    mismatches = check(built(**{field: value}), HERE)
    assert [(m.field, m.built, m.severity) for m in mismatches] == [(field, value, severity)]
    assert mismatches[0].found == getattr(HERE, field) and mismatches[0].remedy


@pytest.mark.parametrize(
    ("field", "value"), [("glibc", "2.9"), ("glibc", "2.35"), ("cpu_level", 4)]
)
def test_the_safe_direction_makes_no_noise(field: str, value: str | int) -> None:
    assert fields(built(**{field: value})) == {}


def test_the_level_is_the_targets_not_the_build_machines() -> None:
    assert required_level(targeted("x86-64-v2", cpu_level=4)) == 2
    assert fields(targeted("x86-64-v3", cpu_level=4)) == {}
    assert fields(targeted("x86-64-v4", cpu_level=4)) == {"cpu_level": "fatal"}


def test_a_native_build_needs_its_own_level() -> None:
    assert fields(targeted("native", cpu_level=4)) == {"cpu_level": "fatal"}
    assert fields(targeted("native", cpu_level=0)) == {}


def test_cuda_matters_to_cuda_engines_only() -> None:
    assert fields(targeted("sm90", "cuda", cuda="13.0")) == {"cuda": "fatal"}
    assert fields(targeted("x86-64-v2", cuda="13.0")) == {}


def test_a_refusal_names_all_fatal_fields_and_no_warning() -> None:
    found = msgspec.structs.replace(built(torch="2.11.0+cpu", machine="riscv64", engine="9"))
    with pytest.raises(IncompatibleError) as caught:
        require(found, HERE)
    text = str(caught.value)
    assert "torch, machine: found torch 2.13.0+cpu, machine x86_64" in text
    assert "expected torch 2.11.0+cpu, machine riscv64" in text
    assert "pip install torch==2.11.0" in text and "engine 9" not in text and "\n" not in text


def test_warnings_are_handed_back() -> None:
    assert [mismatch.field for mismatch in require(built(engine="9"), HERE)] == ["engine"]


@pytest.mark.parametrize(
    ("flags", "level"),
    [("", 1), (V2, 2), (V3, 3), (V4, 4), (V3.replace("movbe", ""), 2), (V4.replace("fma", ""), 2)],
)
def test_levels_need_all_flags_of_the_levels_below(flags: str, level: int) -> None:
    assert level_of_flags(flags.split()) == level


def test_the_level_is_read_from_the_first_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    path = tmp_path / "cpuinfo"
    path.write_text(
        f"processor\t: 0\nvmx flags\t: {V4}\nflags\t\t: {V3}\n\nprocessor\t: 1\nflags\t\t: {V4}\n"
    )
    assert cpu_level(path) == 3
    assert cpu_level(tmp_path / "nothing") == 0
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cpu_level(path) == 0


@pytest.mark.parametrize(
    ("level", "arch"), [(4, "x86-64-v4"), (2, "x86-64-v2"), (1, "native"), (0, "native")]
)
def test_the_default_target(level: int, arch: str) -> None:
    assert msgspec.structs.replace(HERE, cpu_level=level).cpu_arch == arch


def test_the_current_environment_is_recorded_as_it_is() -> None:
    current = Environment.current()
    recorded = current.for_build(built_with_gpu=False)
    assert msgspec.to_builtins(recorded) == {
        **msgspec.to_builtins(current),
        "built_with_gpu": False,
    }
    assert (
        check(msgspec.structs.replace(targeted(current.cpu_arch), environment=recorded), current)
        == []
    )


@pytest.mark.parametrize(
    ("torch", "line", "cuda"),
    [
        ("2.13.0+cu130", "cuda: Optional[str] = '13.0'", "13.0"),
        ("2.13.0+cpu", "cuda = None", "none"),
    ],
)
def test_torch_is_read_from_its_version_file(
    torch: str, line: str, cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '{torch}'\n{line}\nhip = 'cuda'\n")
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    current = Environment.current()
    assert (current.torch, current.cuda) == (torch, cuda)


def test_no_torch_is_a_mismatch_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert Environment.current().torch == "none"
    assert fields(built(), Environment.current()).get("torch") == "fatal"
