"""A worker process ends with the build that started it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.fake_spec import build_spec
from support.leftovers import gone

from inkling_engine.compile.worker import Request

WORKER = """
import time, sys
from inkling_engine.compile.worker import end_with
end_with(int(sys.argv[1]))
print("alive", flush=True)
time.sleep(60)
"""
BUILD = """
import os, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
worker.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_worker_ends_with_its_build() -> None:
    with subprocess.Popen([sys.executable, "-c", BUILD, WORKER], stdout=subprocess.PIPE) as build:
        assert build.stdout is not None
        worker = int(build.stdout.readline())
        build.send_signal(signal.SIGKILL)
    assert gone(worker)


def test_a_worker_whose_build_has_ended_does_nothing(tmp_path: Path) -> None:
    spec, asked = build_spec(), tmp_path / "request.json"
    nowhere = {"kernel_library": "", "package": "", "entry": ""}
    asked.write_bytes(
        msgspec.json.encode(Request(spec=spec, bucket=spec.buckets[0], parent=1, **nowhere))
    )
    command = [sys.executable, "-m", "inkling_engine.compile.worker", str(asked)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, b"")
