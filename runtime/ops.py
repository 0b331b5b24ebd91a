"""The ops that an engine's programs call: schemas from its manifest, kernels from its folder.

The kernels room's op modules are not imported: a running engine needs neither their references
nor their compiler.
"""

from __future__ import annotations

from pathlib import Path

from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.kernels._op import define_schema
from inkling_engine.kernels.native import load_library
from inkling_engine.runtime.errors import IncompatibleError


def load_ops(folder: Path, manifest: Manifest) -> None:
    """Define the ops' schemas as the engine was built with and load its native kernels.

    Raises IncompatibleError if this process already runs other ones.
    """
    try:
        for schema in manifest.op_schemas:
            define_schema(schema)
        if manifest.kernel_library:
            load_library(folder / manifest.kernel_library)
    except AssertionError as error:
        remedy = "open this engine in a process of its own"
        raise IncompatibleError("ops", str(error), "those of the engine", remedy) from None
