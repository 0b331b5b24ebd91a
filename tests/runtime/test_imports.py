"""What the runtime imports: nothing heavy before it is needed, and never an op or the compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.null

LIGHT = (
    "capacity",
    "cli",
    "deadlines",
    "errors",
    "holdings",
    "inspect",
    "metadata",
    "options",
    "plan",
    "prefix",
    "requests",
    "results",
    "sampling",
    "scheduler",
    "timing",
)


def _modules_after(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_light_modules_load_no_torch() -> None:
    names = "\n".join(f"import inkling_engine.runtime.{name}" for name in LIGHT)
    loaded = _modules_after(names)
    assert not loaded & {"torch", "numpy", "safetensors", "tokenizers", "rich"}


def test_public_names_are_lazy() -> None:
    assert "inkling_engine.runtime.engine" not in _modules_after("import inkling_engine.runtime")
    loaded = _modules_after("from inkling_engine.runtime import SamplingParams, Completion")
    assert "torch" not in loaded
    code = "import inkling_engine.runtime as r\nfor name in r.__all__: getattr(r, name)"
    assert "inkling_engine.runtime.engine" in _modules_after(code)


def test_unknown_public_names_are_no_attributes() -> None:
    from inkling_engine import runtime

    with pytest.raises(AttributeError, match="no attribute 'Server'"):
        runtime.Server  # noqa: B018


def test_a_running_engine_needs_no_ops_and_no_compiler() -> None:
    loaded = _modules_after(
        "import inkling_engine.runtime.engine, inkling_engine.runtime.binding\n"
        "import inkling_engine.runtime.graphs, inkling_engine.runtime.weights"
    )
    assert not any(name.startswith(("inkling_engine.compile", "transformers")) for name in loaded)
    assert not loaded & {"torch._inductor", "torch._dynamo"}
    loaded = _modules_after(
        f"import sys; sys.path.append({str(Path(__file__).parents[1])!r})\n"
        "from pathlib import Path\n"
        "from support.fake_spec import build_manifest, build_spec\n"
        "from support.fake_step import open_engine\n"
        "from inkling_engine.runtime.ops import load_ops\n"
        "load_ops(Path(), build_manifest(build_spec()))\n"
        "open_engine(build_spec()).generate([5])"
    )
    kernels = {name for name in loaded if name.startswith("inkling_engine.kernels")}
    allowed = ("", "._exchange", "._op", ".native", ".state", ".table")
    assert kernels <= {f"inkling_engine.kernels{name}" for name in allowed}
