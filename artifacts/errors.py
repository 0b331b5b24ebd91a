"""User mistakes as exceptions with exit codes; broken invariants are assertions elsewhere.

Every message is one line: the field, the value found, what was expected, what to do next.
"""

from __future__ import annotations

from typing import Any, Final

_SHOWN: Final = 120  # characters of a value that an error shows


def clip(value: object) -> str:
    """A value's text, cut off if it is long."""
    text = str(value)
    tail = f"... ({len(text)} characters)"
    return text if len(text) <= _SHOWN else text[: _SHOWN - len(tail)] + tail


def show(value: object) -> str:
    """A value found, as Python writes it; what cannot be written is named by its type."""
    try:
        return clip(repr(value))
    except (ValueError, RecursionError):  # too many digits, too deep
        return f"a huge {type(value).__name__}"


class UserError(Exception):
    """A mistake the user can mend. `exit_code` is what a command ends with."""

    exit_code = 1

    def __init__(self, field: str, found: Any, expected: str, remedy: str) -> None:
        """State `field`, the value `found`, what was `expected` and the `remedy`."""
        self.field, self.found, self.expected, self.remedy = field, found, expected, remedy
        super().__init__(f"{field}: found {found}; expected {expected}; {remedy}")


class FailedError(UserError):
    """Something that should have worked did not: a compiler, a gate, a golden comparison."""

    exit_code = 1


class UsageError(UserError):
    """A request, option or input that cannot be honoured."""

    exit_code = 2


class IncompatibleError(UserError):
    """A sound engine folder that this machine or installation cannot run."""

    exit_code = 3


class CorruptError(UserError):
    """A folder or checkpoint whose bytes are not what they claim to be."""

    exit_code = 4


class DoesNotFitError(UserError):
    """More memory is needed than there is."""

    exit_code = 5


class LinesFailedError(UserError):
    """A batch job is done, and some of its lines were answered with an error."""

    exit_code = 6


def misread(message: str, expected: str, program: str) -> UsageError:
    """A command line that `program` could not read, in the one form that errors have."""
    found = " ".join(message.split()).rstrip(".")
    return UsageError("command line", found, expected, f"see {program} --help")


def unusable(error: OSError) -> UserError:
    """A file, folder or stream that the system refused; what has no name is stdout."""
    expected, remedy = "a usable file or folder", "check the path, permissions and free space"
    name = "stdout" if error.filename is None else str(error.filename)
    return UserError(name, error.strerror or str(error), expected, remedy)
