"""Whether an engine runs here: what was built against what is found, field by field.

Nothing is imported to find out: versions are read from files, so that the answer comes before any
native code is opened and costs milliseconds. A fatal mismatch means wrong results or a crash; a
warning means that nobody has tried the pair.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

from inkling_engine.artifacts.errors import IncompatibleError
from inkling_engine.artifacts.manifest import BuildEnvironment, Manifest
from inkling_engine.artifacts.spec import Frozen

ENGINE_VERSION: Final = "0.1.0"
NONE: Final = "none"

# The x86-64 psABI's micro-architecture levels in the kernel's names; each adds to the one before.
_LEVEL_FLAGS: Final = {
    2: "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    3: "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    4: "avx512f avx512bw avx512cd avx512dq avx512vl",
}


class Mismatch(Frozen):
    """One field on which the build and this machine disagree."""

    field: str
    built: str
    found: str
    severity: Literal["fatal", "warning"]
    remedy: str


class Environment(Frozen):
    """This machine and installation. `cuda` and `torch` may be `none`, `glibc` empty elsewhere."""

    engine: str
    torch: str
    cuda: str
    machine: str
    cpu_level: int
    glibc: str

    @classmethod
    def current(cls) -> Environment:
        """Describe the running process without importing torch."""
        torch, cuda = _torch_build()
        return cls(
            engine=ENGINE_VERSION,
            torch=torch,
            cuda=cuda,
            machine=platform.machine(),
            cpu_level=cpu_level(),
            glibc=_glibc(),
        )

    @property
    def cpu_arch(self) -> str:
        """The highest `arch` of a CPU build that this machine runs."""
        return f"x86-64-v{self.cpu_level}" if self.cpu_level >= 2 else "native"

    def for_build(self, *, built_with_gpu: bool) -> BuildEnvironment:
        """The same facts as a manifest records them."""
        return BuildEnvironment(
            engine=self.engine,
            torch=self.torch,
            cuda=self.cuda,
            machine=self.machine,
            cpu_level=self.cpu_level,
            glibc=self.glibc,
            built_with_gpu=built_with_gpu,
        )


def cpu_level(cpuinfo: Path = Path("/proc/cpuinfo")) -> int:
    """The x86-64 micro-architecture level, 1 to 4, or 0 on another machine."""
    if platform.machine() != "x86_64" or not cpuinfo.is_file():
        return 0
    match = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return level_of_flags(match[1].split() if match else ())


def level_of_flags(flags: Iterable[str]) -> int:
    """The level that these CPU flags reach."""
    have, level = set(flags), 1
    for candidate, needed in _LEVEL_FLAGS.items():
        if not have.issuperset(needed.split()):
            break
        level = candidate
    return level


def required_level(manifest: Manifest) -> int:
    """The CPU level that the programs use: `arch`'s own, or the build machine's for `native`."""
    if manifest.spec.arch == "native":
        return manifest.environment.cpu_level
    match = re.fullmatch(r"x86-64-v([234])", manifest.spec.arch)
    return int(match[1]) if match else 0


def machine_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check(manifest: Manifest, environment: Environment) -> list[Mismatch]:
    """Every mismatch between a sealed engine and `environment`, the fatal ones first."""
    built, need = manifest.environment, required_level(manifest)
    torch = f"pip install torch=={built.torch.split('+')[0]}"
    rebuild = "build the engine again on this machine"
    lower = f"use a machine with {manifest.spec.arch} or rebuild with --arch {environment.cpu_arch}"
    rows = [
        ("torch", built.torch, environment.torch, True, f"{torch} ({built.torch}), or {rebuild}"),
        ("cuda", built.cuda, environment.cuda, True, f"install torch {built.torch}, or {rebuild}"),
        ("machine", built.machine, environment.machine, True, rebuild),
        ("cpu_level", str(need), str(environment.cpu_level), True, lower),
        ("glibc", built.glibc, environment.glibc, True, f"use a newer system, or {rebuild}"),
        ("engine", built.engine, environment.engine, False, "run `inkling-engine verify` on it"),
    ]
    if manifest.spec.device == "cpu":
        rows = [row for row in rows if row[0] != "cuda"]
    return [
        Mismatch(field=f, built=b, found=n, severity="fatal" if fatal else "warning", remedy=r)
        for f, b, n, fatal, r in rows
        if not _compatible(f, b, n)
    ]


def require(manifest: Manifest, environment: Environment) -> list[Mismatch]:
    """Raise one IncompatibleError that names every fatal mismatch; return the warnings."""
    mismatches = check(manifest, environment)
    fatal = [mismatch for mismatch in mismatches if mismatch.severity == "fatal"]
    if fatal:
        raise IncompatibleError(
            f"engine {manifest.engine_id}: {', '.join(m.field for m in fatal)}",
            ", ".join(f"{m.field} {m.found}" for m in fatal),
            ", ".join(f"{m.field} {m.built}" for m in fatal),
            "; ".join(dict.fromkeys(m.remedy for m in fatal)),
        )
    return [mismatch for mismatch in mismatches if mismatch.severity == "warning"]


def _compatible(field: str, built: str, found: str) -> bool:
    """Levels and glibc may be higher than built; everything else must be the same."""
    if field in ("cpu_level", "glibc"):
        return _numbers(found) >= _numbers(built)
    return found == built


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _torch_build() -> tuple[str, str]:
    """The installed torch's version with its local tag, and its CUDA version; `none` if absent."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return NONE, NONE
    text = (Path(spec.origin).parent / "version.py").read_text()
    facts = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= *'([^'\n]*)'", text, re.MULTILINE))
    return facts.get("__version__", NONE), facts.get("cuda", NONE)


def _glibc() -> str:
    """The C library's version such as `2.36`, or nothing where it is not glibc."""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, OSError, ValueError):
        return ""
    return name.removeprefix("glibc ")
