"""Jobs killed with SIGKILL at random moments and resumed write what an undisturbed one writes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.batch_rig import line, mixed, read_lines, write_lines
from support.compiler import INKLING_ENGINE

TESTS = Path(__file__).resolve().parents[1]
STUB = (sys.executable, "-m", "support.batch_rig")


def kill_at(command: Sequence[str], part: Path, size: int) -> int:
    """Run a job and kill it once its part file has as many bytes; how many lines it left."""
    paths = (str(TESTS), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as job:
        while not part.exists() or part.stat().st_size < size:
            assert job.poll() is None, job.stderr and job.stderr.read()
            time.sleep(0.0005)
        job.send_signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
    return part.read_bytes().count(b"\n")


def kill_and_finish(command: Sequence[str], output: Path, sizes: Sequence[int]) -> None:
    """Kill a job at each size of its part file, then let it end."""
    part, lines = Path(f"{output}.part"), 0
    for size in sizes:
        found = kill_at(command, part, size)
        assert found >= lines, "a finished line was lost"
        lines = found
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 6), done.stderr


def moments(count: int, size: int) -> list[int]:
    """Increasing random sizes of a part file that will have `size` bytes."""
    draw = random.Random(4)
    return sorted(draw.randrange(size * 9 // 10) for _ in range(count))


def test_ten_thousand_lines_killed_five_times(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", mixed(10_000))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    kill_and_finish([*STUB, str(source), str(whole)], whole, [])
    data = whole.read_bytes()
    command = [*STUB, str(source), str(killed), "0.0005"]
    kill_and_finish(command, killed, moments(5, len(data)))
    assert killed.read_bytes() == data
    assert len(read_lines(killed)) == 10_000


def test_the_tiny_engine_killed_and_resumed(tmp_path: Path, tiny_engine: Path) -> None:
    lines: list[object] = []
    for at in range(240):
        text = f"def f{at}(a, b):" * (1 + at % 11)
        kinds: tuple[dict[str, Any], ...] = (
            {},
            {"temperature": 0.8},
            {"temperature": 1.0, "seed": at, "n": 2},
        )
        lines.append(line(f"id-{at}", prompt=text, max_tokens=12 + at % 30, **kinds[at % 3]))
        if at % 20 == 7:
            lines.append(b"{broken")
    source = write_lines(tmp_path / "in", lines)
    command = [*INKLING_ENGINE, "batch", str(tiny_engine), "--input", str(source), "--output"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    kill_and_finish([*command, str(whole)], whole, [])
    kill_and_finish([*command, str(killed)], killed, moments(3, whole.stat().st_size))
    assert killed.read_bytes() == whole.read_bytes()
    answers = read_lines(killed)
    assert len(answers) == len(lines) == 252
    assert sum(one["error"] is not None for one in answers) == 12
