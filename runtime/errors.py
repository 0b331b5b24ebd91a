"""The runtime's exceptions: those of the contract, under the name that callers import."""

from inkling_engine.artifacts.errors import (
    CorruptError,
    DoesNotFitError,
    FailedError,
    IncompatibleError,
    LinesFailedError,
    UsageError,
    UserError,
)

__all__ = [
    "CorruptError",
    "DoesNotFitError",
    "FailedError",
    "IncompatibleError",
    "LinesFailedError",
    "UsageError",
    "UserError",
]
