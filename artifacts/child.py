"""How a room runs one of the project's modules in a process of its own, and says how it failed."""

from __future__ import annotations

import signal
import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module`. `-P`: what lies in the folder that the user works in is not
    imported there, as it is not by the console scripts."""
    return [sys.executable, "-P", "-m", module, *arguments]


def how_it_ended(code: int, printed: str = "") -> str:
    """How a process that returned `code`, not 0, ended: the signal that killed it, else the last line of
    what it `printed`, else its code."""
    if code < 0:
        return f"killed by {_NAMES.get(-code, f'signal {-code}')}"
    return "".join(printed.strip().splitlines()[-1:]) or f"exit code {code}"


_NAMES = {int(known): known.name for known in signal.Signals}
