"""What a rank takes of memory: by plan, from the manifest alone, and what its process really uses.

Reports of several ranks have both side by side for each of them. No torch until something is measured.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inkling_engine.artifacts.manifest import Manifest, Recipe, TensorEntry

if TYPE_CHECKING:
    import torch

    from inkling_engine.runtime.engine import Engine

_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "int32": 4, "int64": 8}
_SHARES: Final = ("RssAnon", "RssShmem")  # of a process, not what is mapped from files


def used_weights(manifest: Manifest) -> list[Recipe]:
    """The engine tensors that its programs read; others (later drafts) stay on disk."""
    inputs = {name for program in manifest.programs for name in program.inputs}
    return [recipe for recipe in manifest.recipe if f"weights.{recipe.name}" in inputs]


def planned(manifest: Manifest) -> dict[str, int]:
    """Bytes of one rank's weights, pools and row buffers; all ranks take as many."""
    rows = sum(program.row_bytes for program in manifest.programs)
    weights, pools = total_bytes(used_weights(manifest)), total_bytes(manifest.pools)
    return {"weights": weights, "pools": pools, "rows": rows}


def measured(device: torch.device) -> dict[str, int]:
    """Bytes that this process uses: on a CPU memory of its own and shared one, on a GPU the most that
    torch's allocator held (`allocated`, `reserved`) and what of the GPU is not free (`used`)."""
    if device.type == "cpu":
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.is_file() else []
        return {
            "used": sum(int(line.split()[1]) << 10 for line in lines if line.startswith(_SHARES))
        }
    import torch

    free, whole = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "used": whole - free,
    }


def device_name(device: torch.device) -> str:
    """What a GPU, or this machine's processor, is called."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe(manifest: Manifest, device: torch.device) -> dict[str, Any]:
    """This process's rank: its device, `planned` and `measured`."""
    found = {"device": str(device), "name": device_name(device), "planned": planned(manifest)}
    return found | {"measured": measured(device)}


def report(engine: Engine) -> dict[str, Any]:
    """`tp`, and for several ranks what each of them takes."""
    seat = engine.pool.seat
    if seat is None:
        return {"tp": engine.spec.tp}
    own = describe(engine.manifest, engine.pool.tensors["results_int"].device)
    return {"tp": engine.spec.tp, "ranks": [own, *seat.usage()]}


def render(ranks: Iterable[dict[str, Any]]) -> str:
    """One line for people."""
    return "; ".join(
        f"{rank['device']} {sum(rank['planned'].values()) / 1e9:.3f} GB planned, "
        f"{rank['measured']['used'] / 1e9:.3f} GB used"
        for rank in ranks
    )


def total_bytes(tensors: Iterable[Recipe | TensorEntry]) -> int:
    """Bytes of contiguous tensors."""
    return sum(math.prod(one.shape) * _ITEM_BYTES[one.dtype] for one in tensors)
