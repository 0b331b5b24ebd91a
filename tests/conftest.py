"""What all tests share: a reproducible hypothesis profile, and tiers by what a test needs.

A test without a tier mark gets the one of its folder, `cpu` unless listed here. The summary counts
the tiers and names those that ran nothing, so that an untested tier is never taken for a good one.

Files are dealt out to processes (`scripts/test`), the longest first; what is built once a run, all
processes share.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from support.compiler import compile_engine
from support.once import Once

TIERS = ("null", "cpu", "gpu", "multi", "packaging")
FOLDER_TIERS = {"artifacts": "null", "packaging": "packaging"}
TESTS = Path(__file__).parent
LONGEST = (  # files of more than half a minute, in the order in which they begin
    "compile/test_build.py",
    "kernels/test_triton_interpreter.py",
    "kernels/test_triton_compile.py",
    "compile/test_build_ranks.py",
    "runtime/test_ranks_engine.py",
    "state/test_draft_rounds.py",
    "state/test_drafting_engine.py",
    "runtime/test_ranks.py",
    "state/test_planted_faults.py",
)

settings.register_profile("reproducible", derandomize=True, deadline=None, database=None)
settings.load_profile("reproducible")
# of a run in the background it may be ignored, and so it would be in the processes that tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test exactly one tier, and put the files that take longest first."""
    order = {TESTS / file: place for place, file in enumerate(LONGEST)}
    assert all(path.exists() for path in order), "LONGEST names a file that is not there"
    items.sort(key=lambda item: order.get(item.path, len(order)))
    for item in items:
        marked = [tier for tier in TIERS if item.get_closest_marker(tier)]
        assert len(marked) < 2, f"{item.nodeid} is in several tiers: {marked}"
        tier = marked[0] if marked else FOLDER_TIERS.get(item.path.parent.name, "cpu")
        if not marked:
            item.add_marker(tier)
        item.user_properties.append(("tier", tier))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests of each tier ran, and which tiers ran nothing."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    ran = Counter(dict(report.user_properties).get("tier") for report in reports)
    terminalreporter.write_line(f"tiers run: {', '.join(f'{tier} {ran[tier]}' for tier in TIERS)}")
    if idle := [tier for tier in TIERS if not ran[tier]]:
        terminalreporter.write_line(f"TIERS THAT RAN NOTHING: {', '.join(idle)}")


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Once:
    """What is made once a run, however many processes it has."""
    own = tmp_path_factory.getbasetemp()
    return Once(own.parent if hasattr(request.config, "workerinput") else own)


@pytest.fixture(scope="session")
def library_file(once: Once) -> Path:
    """The native kernels: the very file that engines built here carry, since a process runs one.
    Compiled once for each state of the sources."""
    from inkling_engine.compile import items
    from inkling_engine.compile.options import BuildOptions
    from inkling_engine.compile.plan import make_plan
    from inkling_engine.kernels.native import compile_library

    spec = make_plan(BuildOptions(model="inkling-tiny", device="cpu")).spec
    return once("kernels", lambda: compile_library(items.cache_folder() / "kernels", spec.arch))


@pytest.fixture(scope="session")
def native_library(library_file: Path) -> Path:
    """The native kernels, loaded."""
    from inkling_engine.kernels.native import load_library

    load_library(library_file)
    return library_file


@pytest.fixture(scope="session")
def built(
    once: Once, library_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """`built(name, options)`: the engine of inkling-tiny with these options, built once a run and kept
    by engine id from run to run in `$INKLING_ENGINE_TEST_ENGINES` if that names a folder."""

    def build(options: str) -> Path:
        kept = os.environ.get("INKLING_ENGINE_TEST_ENGINES")
        where = Path(kept) if kept else tmp_path_factory.mktemp("engines")
        where.mkdir(parents=True, exist_ok=True)
        command = ["--model", "inkling-tiny", "--device", "cpu", *options.split()]
        done = compile_engine(*command, "--jobs", 2, "--quiet", cwd=where)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    return lambda name, options: once(name, lambda: build(options))


@pytest.fixture(scope="session")
def tiny_engine(built: Callable[[str, str], Path]) -> Path:
    """The fp32 engine of inkling-tiny as `compile-engine` makes it."""
    return built("tiny", "--decode-buckets 1,8 --extend-buckets 64,256")


@pytest.fixture(scope="session")
def drafting_engine(built: Callable[[str, str], Path]) -> Path:
    """The same with all four draft depths."""
    return built("drafting", "--spec-depth 4 --decode-buckets 4 --extend-buckets 256x4")


@pytest.fixture(scope="session")
def four_rank_engine(built: Callable[[str, str], Path]) -> Path:
    """The same for four ranks, of which two hold the same kv head of full layers; without drafting."""
    return built("four-ranks", "--tp 4 --decode-buckets 4 --extend-buckets 64x4")
