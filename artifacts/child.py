"""How a room runs one of the project's modules in a process of its own."""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module`. `-P`: what lies in the folder that the user works in is not
    imported there, as it is not by the console scripts."""
    return [sys.executable, "-P", "-m", module, *arguments]
