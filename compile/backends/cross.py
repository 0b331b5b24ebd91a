"""CUDA programs from a machine without a GPU: what the compilers ask the device is in a table.

Inductor and Triton ask for the device's architecture and sizes, and Inductor runs a step once, on
zeros, to have its kernels compiled. Here the questions are answered from what is known of the
target, and that one run is made on tensors without memory, whose kernels are compiled and not
launched. Nothing is measured either way, so the programs are those of a build beside a GPU.

Everything is put back at the end. The process must not have touched CUDA before.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch._inductor.config
from torch import Tensor

from inkling_engine.artifacts.errors import FailedError
from inkling_engine.compile.backends.patches import attribute, item

# cudaDeviceProp of an H200 SXM: CUDA C++ Programming Guide, "Compute Capabilities" 9.0, and its
# data sheet. Nothing else is told of the device: an unknown question is an AttributeError.
DEVICES: Final[Mapping[str, Mapping[str, Any]]] = {
    "sm90": {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "warp_size": 32,
        "multi_processor_count": 132,
        "max_threads_per_block": 1024,
        "max_threads_per_multi_processor": 2048,
        "regs_per_multiprocessor": 65536,
        "shared_memory_per_block": 49152,
        "shared_memory_per_block_optin": 232448,
        "shared_memory_per_multiprocessor": 233472,
        "L2_cache_size": 60 << 20,
        "total_memory": 141 * 10**9,
    }
}
HEADERS: Final = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h", "nv/target")


def needed(device: str) -> bool:
    """Whether programs for `device` are to be built on a machine that shows no such device."""
    return device == "cuda" and not torch.cuda.is_available()


def too_few(device: str, ranks: int) -> bool:
    """Whether this machine shows fewer such devices than an engine of so many ranks runs on."""
    return device == "cuda" and torch.cuda.device_count() < ranks


@contextlib.contextmanager
def without_gpu(arch: str) -> Iterator[None]:
    """Within the block CUDA programs of `arch` can be exported and lowered without a GPU.

    Raises FailedError where the CUDA headers or a C compiler are not to be found.
    """
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for owner, name, value in _toolchain(scratch):
            stack.enter_context(item(owner, name, value))
        for owner, name, value in _answers(SimpleNamespace(**DEVICES[arch])):
            stack.enter_context(attribute(owner, name, value))
        stack.enter_context(_triton_driver(SimpleNamespace(**DEVICES[arch])))
        # a worker process would have to be told all this too
        stack.enter_context(torch._inductor.config.patch(compile_threads=1))
        from torch._dynamo.device_interface import caching_worker_device_properties as known

        stack.callback(known.pop, "cuda", None)
        yield


def _answers(device: SimpleNamespace) -> Iterator[tuple[Any, str, Any]]:
    """What stands in for a question to the device: (owner, attribute, function)."""
    import torch._inductor.fx_passes.joint_graph
    import torch._inductor.fx_passes.post_grad
    import torch._inductor.graph
    import torch._subclasses.fake_tensor
    from torch._dynamo.device_interface import CudaInterface

    by_interface: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda index: None,
        "synchronize": lambda index=None: None,
        "get_device_properties": lambda index=None: device,
        "exchange_device": lambda index: 0,
        "maybe_exchange_device": lambda index: 0,
    }
    for name, answer in by_interface.items():
        private = "_" if name.endswith("exchange_device") else ""
        yield torch.cuda, private + name, answer
        yield CudaInterface, name, staticmethod(answer)
    yield CudaInterface, "get_raw_stream", staticmethod(lambda index: 0)
    yield torch._C, "_cuda_getCurrentRawStream", lambda index: 0
    yield torch.cuda, "is_available", lambda: True
    yield torch.cuda, "get_device_capability", lambda index=None: (device.major, device.minor)
    yield torch.cuda, "get_rng_state", lambda index=None: torch.zeros(16, dtype=torch.uint8)
    yield torch.cuda, "set_rng_state", lambda state, index=None: None
    yield torch._subclasses.fake_tensor, "init_gpu_context", lambda device: None
    yield torch._inductor.graph, "defake", _memoryless
    yield torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided
    for passes in (torch._inductor.fx_passes.joint_graph, torch._inductor.fx_passes.post_grad):
        yield passes, "lazy_init", lambda device=None: None  # patterns of ops that no step has


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _memoryless(value: Any) -> Any:
    """What Inductor's one run of the step is fed in place of zeros on the device."""
    if not isinstance(value, Tensor):
        return value
    return _empty_strided(value.size(), value.stride(), value.dtype)


@contextlib.contextmanager
def _triton_driver(device: SimpleNamespace) -> Iterator[None]:
    """Triton's NVIDIA driver is one that compiles for `device`, loads nothing, launches nothing."""
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class Driver(DriverBase):  # type: ignore[misc]
        """Answers for `device`."""

        utils = SimpleNamespace(
            get_device_properties=lambda index: {
                "max_shared_mem": device.shared_memory_per_block_optin,
                "multiprocessor_count": device.multi_processor_count,
                "warpSize": device.warp_size,
            },
            load_binary=lambda *arguments: (0, 0, 0, 0, device.max_threads_per_block),
        )

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 10 * device.major + device.minor, device.warp_size)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_current_device(self) -> int:
            return 0

        def launcher_cls(self, *arguments: Any) -> Callable[..., None]:
            return lambda *arguments, **named: None

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise AssertionError("no launcher is generated")

        def get_benchmarker(self) -> Any:
            raise AssertionError("nothing is measured")

    nvidia = type(backends["nvidia"])(backends["nvidia"].compiler, Driver)
    with (
        item(backends, "nvidia", nvidia),
        attribute(driver, "_default", None),
        attribute(driver, "_active", None),
    ):
        yield


def _toolchain(scratch: Path) -> Iterator[tuple[Any, str, Any]]:
    """Host compiler settings, as (owner, key, value): CUDA's headers, and a libcuda to link."""
    import torch.utils.cpp_extension

    home = _cuda_home()
    _link_libcuda(home / "include" / "cuda.h", scratch)
    yield vars(torch.utils.cpp_extension), "CUDA_HOME", str(home)
    for name, folders in (
        ("CPATH", (home / "include", home / "include" / "cccl")),
        ("LIBRARY_PATH", (scratch,)),
    ):
        paths = [*map(str, folders), os.environ.get(name)]
        yield os.environ, name, os.pathsep.join(filter(None, paths))


def _cuda_home() -> Path:
    """Where CUDA's headers are: the packages that torch depends on, or the toolkit it finds."""
    import torch.utils.cpp_extension

    major = str(torch.version.cuda).partition(".")[0]
    beside_torch = Path(torch.__file__).parents[1] / "nvidia" / f"cu{major}"
    homes = [beside_torch, Path(torch.utils.cpp_extension.CUDA_HOME or beside_torch)]
    for home in homes:
        include = home / "include"
        if all(any((include / at / h).is_file() for at in ("", "cccl")) for h in HEADERS):
            return home
    expected = f"{', '.join(HEADERS)} beside torch, or in CUDA_HOME"
    remedy = "install nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl as torch has them"
    raise FailedError("CUDA headers", f"none in {homes[0]}, {homes[1]}", expected, remedy)


def _link_libcuda(header: Path, folder: Path) -> None:
    """Make `folder`/libcuda.so: all of the driver's symbols, so that programs depend on the real
    libcuda.so.1 however the linker treats libraries that nothing refers to."""
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header.read_text())))
    source = "\n".join(f"void {name}(void) {{}}" for name in names)
    from torch._inductor.cpp_builder import get_cpp_compiler

    command = [*shlex.split(get_cpp_compiler()), "-x", "c", "-", "-w", "-shared", "-fPIC"]
    command += ["-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so")]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError("stub of libcuda", done.stderr.strip(), "a C compiler", "install gcc")
