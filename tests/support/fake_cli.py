"""`inkling-engine` over a folder of the fake engine, a process: `python -m support.fake_cli`.

The folder's programs are no programs, so the fake step stands in; progress is shown at every step.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.fake_step import FakeStep

from inkling_engine.runtime import batch_progress, cli, graphs, probe


def main() -> None:
    """Run the entry point."""
    idle = [sys.executable, "-c", ""]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            probe, "start", lambda *_: subprocess.Popen(idle, stderr=subprocess.PIPE, text=True)
        )
        patch.setattr(graphs, "open_programs", lambda *_: FakeStep)
        patch.setattr(batch_progress, "_LINE_SECONDS", 0.0)
        cli.main()


if __name__ == "__main__":
    main()
