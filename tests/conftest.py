"""What all tests share: a reproducible hypothesis profile, and tiers by what a test needs.

A test without a tier mark gets the one of its folder, `cpu` unless listed here. The summary counts
the tiers and names those that ran nothing, so that an untested tier is never taken for a good one.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from support.compiler import compile_engine

TIERS = ("null", "cpu", "gpu", "multi", "packaging")
FOLDER_TIERS = {"artifacts": "null", "packaging": "packaging"}

settings.register_profile("reproducible", derandomize=True, deadline=None, database=None)
settings.load_profile("reproducible")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test exactly one tier."""
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
def native_library() -> Path:
    """The native kernels, loaded: the very file that engines built here carry, since a process
    runs one. Compiled once for each state of the sources."""
    from inkling_engine.compile import items
    from inkling_engine.compile.options import BuildOptions
    from inkling_engine.compile.plan import make_plan
    from inkling_engine.kernels.native import compile_library, load_library

    spec = make_plan(BuildOptions(model="inkling-tiny", device="cpu")).spec
    library = compile_library(items.cache_folder() / "kernels", spec.arch)
    load_library(library)
    return library


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fp32 engine of inkling-tiny as `compile-engine` makes it."""
    return _built("--decode-buckets 1,8 --extend-buckets 64,256", tmp_path_factory)


@pytest.fixture(scope="session")
def drafting_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with all four draft depths."""
    options = "--spec-depth 4 --decode-buckets 4 --extend-buckets 256x4"
    return _built(options, tmp_path_factory)


@pytest.fixture(scope="session")
def four_rank_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for four ranks, of which two hold the same kv head of full layers; without drafting."""
    options = "--tp 4 --decode-buckets 4 --extend-buckets 64x4"
    return _built(options, tmp_path_factory)


def _built(options: str, folders: pytest.TempPathFactory) -> Path:
    """One build of inkling-tiny a run, kept by engine id from run to run in
    `$INKLING_ENGINE_TEST_ENGINES` if that names a folder."""
    kept = os.environ.get("INKLING_ENGINE_TEST_ENGINES")
    where = Path(kept) if kept else folders.mktemp("engines")
    where.mkdir(parents=True, exist_ok=True)
    command = ["--model", "inkling-tiny", "--device", "cpu", *options.split()]
    done = compile_engine(*command, "--jobs", 2, "--quiet", cwd=where)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())
