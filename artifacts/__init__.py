"""The contract between build and run: what was asked for, what was built, where it lies.

Torch-free. Files in this folder are code; sub-folders are built engines (git-ignored). Names are
imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inkling_engine.artifacts.compat import Environment, Mismatch, check, require
    from inkling_engine.artifacts.digest import Identity, engine_digest
    from inkling_engine.artifacts.errors import UserError
    from inkling_engine.artifacts.manifest import Manifest
    from inkling_engine.artifacts.spec import Bucket, EngineSpec, ModelShape
    from inkling_engine.artifacts.store import open_manifest, seal, stage, verify_files

__all__ = [
    "Bucket",
    "EngineSpec",
    "Environment",
    "Identity",
    "Manifest",
    "Mismatch",
    "ModelShape",
    "UserError",
    "check",
    "engine_digest",
    "open_manifest",
    "require",
    "seal",
    "stage",
    "verify_files",
]

_MODULES = {
    "compat": ("Environment", "Mismatch", "check", "require"),
    "digest": ("Identity", "engine_digest"),
    "errors": ("UserError",),
    "manifest": ("Manifest",),
    "spec": ("Bucket", "EngineSpec", "ModelShape"),
    "store": ("open_manifest", "seal", "stage", "verify_files"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the module that a public name lives in (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
