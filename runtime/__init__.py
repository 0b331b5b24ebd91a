"""The run: opens an engine folder and turns requests into tokens, without model code or compiler.

Public names are imported when they are first used, so that `inspect`, the scheduler and the
request types load no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inkling_engine.runtime.batch import BatchRunner
    from inkling_engine.runtime.engine import Engine
    from inkling_engine.runtime.requests import (
        Choice,
        Completion,
        Delta,
        Request,
        TokenLogprob,
        Usage,
    )
    from inkling_engine.runtime.sampling import SamplingParams

__all__ = [
    "BatchRunner",
    "Choice",
    "Completion",
    "Delta",
    "Engine",
    "Request",
    "SamplingParams",
    "TokenLogprob",
    "Usage",
]

_MODULES = {
    "batch": ("BatchRunner",),
    "engine": ("Engine",),
    "requests": ("Choice", "Completion", "Delta", "Request", "TokenLogprob", "Usage"),
    "sampling": ("SamplingParams",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the module that a public name lives in (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
