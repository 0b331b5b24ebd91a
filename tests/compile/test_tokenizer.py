"""The checkpoint's text files are part of an engine, and a tokenizer that does not fit is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.checkpoints import tiny_config, write_random
from support.oracle import TINY

from inkling_engine.artifacts.errors import CorruptError
from inkling_engine.compile import build as build_module
from inkling_engine.compile.build import build
from inkling_engine.compile.checkpoint import open_checkpoint
from inkling_engine.compile.options import BuildOptions
from inkling_engine.compile.plan import Plan, make_plan
from inkling_engine.compile.tokenizer import check_tokenizer, text_fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_random(tmp_path / "model", tiny_config(), seed=0)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds end where their items would begin."""

    def begin(state: build_module.Build) -> None:
        raise AssertionError("items are run")

    monkeypatch.setattr(build_module, "_run_items", begin)


def plan_of(model: Path, out: Path) -> Plan:
    return make_plan(BuildOptions(model=str(model), device="cpu", out=str(out)))


def test_text_files_are_part_of_the_identity(model: Path, tmp_path: Path) -> None:
    """Which of them there are, and what each holds."""

    def write(*texts: tuple[str, str]) -> str:
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            (model / name).unlink(missing_ok=True)
        for name, text in texts:
            (model / name).write_text(text)
        plan = plan_of(model, tmp_path / "engine")
        sources = build_module._identity(plan).sources
        assert sources["texts"] == text_fingerprint(plan.checkpoint)
        return sources["texts"]

    config, template = "tokenizer_config.json", "chat_template.jinja"
    found = [
        write(),
        write((config, "{}")),
        write((config, "{ }")),
        write((template, "{}")),
        write((config, "{}"), (template, "")),
        write((config, ""), (template, "{}")),
    ]
    assert len(set(found)) == len(found)
    assert write((config, "{}")) == found[1]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{}", "Model missing"),
        ("", "EOF"),
        ('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}', "no token"),
    ],
)
def test_what_is_no_tokenizer_is_refused_before_anything_is_built(
    model: Path, tmp_path: Path, nothing_runs: None, text: str, found: str
) -> None:
    (model / "tokenizer.json").write_text(text)
    with pytest.raises(CorruptError, match=f"tokenizer.json: found .*{found}.*; expected") as error:
        build(plan_of(model, tmp_path / "engine"), lambda *_: None)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tokenizer_of_a_larger_model_is_refused(
    model: Path, tmp_path: Path, nothing_runs: None
) -> None:
    shutil.copyfile(TINY / "tokenizer.json", model / "tokenizer.json")
    with pytest.raises(CorruptError, match="found id .* for 'def'; expected .* below the model's"):
        build(plan_of(model, tmp_path / "engine"), lambda *_: None)
    check_tokenizer(open_checkpoint(TINY))
