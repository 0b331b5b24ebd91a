"""`compile-engine`: bad input is refused in one line with the right exit code, config files, exits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.checkpoints import load, save, tiny_config, write_random
from support.compiler import ERROR_LINE, compile_engine, refused

from inkling_engine.artifacts.errors import DoesNotFitError, FailedError
from inkling_engine.compile import cli

Run = Callable[..., tuple[int, str, str]]
FREE_SPACE = "expected a usable file or folder; check the path, permissions and free space"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run the command in this process, in an empty folder; (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["compile-engine", *map(str, arguments)])
        code: int | str | None = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return int(code or 0), captured.out, captured.err

    return call


def refusal(run: Run, code: int, *arguments: object) -> tuple[str, str, str, str]:
    """Field, value, expectation and remedy of a refusal with `code`."""
    found, out, err = run(*arguments)
    assert (found, out) == (code, ""), err
    match = ERROR_LINE.fullmatch(err)
    assert match, err
    return match[1], match[2], match[3], match[4]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_random(tmp_path / "model", tiny_config(), seed=0)


def test_a_published_model_without_cuda(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    field, found, expected, remedy = refusal(run, 2, "--model", "inkling-small")
    assert field == "--device"
    assert "inkling-small" in found and torch.__version__ in found
    assert "CUDA build of torch" in expected
    assert "--dry-run" in remedy and "--device cpu" in remedy


def test_a_model_larger_than_the_memory(run: Run) -> None:
    field, _, expected, remedy = refusal(run, 5, "--model", "inkling-small", "--device", "cpu")
    assert field == "device memory"
    assert expected.startswith("at least ") and "--max-context" in remedy


def test_an_unknown_preset(run: Run) -> None:
    field, found, expected, _ = refusal(run, 2, "--model", "inkling-medium")
    assert (field, found) == ("--model", "'inkling-medium'")
    assert "inkling-small" in expected


def test_a_hub_id(run: Run) -> None:
    _, found, _, remedy = refusal(run, 2, "--model", "thinkingmachines/Inkling")
    assert found == "thinkingmachines/Inkling"
    assert "hf download thinkingmachines/Inkling --local-dir Inkling" in remedy


def test_no_model_at_all(run: Run) -> None:
    for arguments in ((), ("--model", "")):
        field, found, _, remedy = refusal(run, 2, *arguments)
        assert (field, found) == ("--model", "nothing")
        assert "--model inkling-tiny" in remedy


def test_a_folder_that_is_not_there(run: Run) -> None:
    assert "check the path" in refusal(run, 2, "--model", "/nowhere/at/all")[3]


def test_a_file_in_place_of_a_folder(run: Run, checkpoint: Path) -> None:
    remedy = refusal(run, 2, "--model", checkpoint / "model.safetensors")[3]
    assert "folder that holds this file" in remedy


def test_a_checkpoint_without_config(run: Run, checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    _, found, _, remedy = refusal(run, 2, "--model", checkpoint)
    assert "without config.json" in found
    assert "config.json" in remedy


def test_a_checkpoint_without_weights(run: Run, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "no weights" in refusal(run, 2, "--model", checkpoint)[1]
    (checkpoint / "pytorch_model.bin").write_bytes(b"x")
    assert "never opened" in refusal(run, 2, "--model", checkpoint)[3]


def test_every_wrong_tensor_in_one_line(run: Run, checkpoint: Path) -> None:
    tensors = load(checkpoint)
    del tensors["model.llm.norm.weight"]
    tensors["model.llm.embed.weight"] = torch.zeros(3, 3)
    save(checkpoint, tiny_config(), tensors)
    found = refusal(run, 4, "--model", checkpoint, "--device", "cpu")[1]
    assert "missing model.llm.norm.weight" in found
    assert "misshapen model.llm.embed.weight" in found


def test_a_damaged_weight_file(run: Run, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"not tensors")
    assert "model.safetensors" in refusal(run, 4, "--model", checkpoint)[0]


def test_an_unknown_configuration_key(run: Run, checkpoint: Path) -> None:
    config = tiny_config() | {"rotary": 1}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert refusal(run, 2, "--model", checkpoint)[0] == "config.json rotary"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--max-context", "10000000"), "--max-context"),
        (("--max-running", "0"), "--max-running"),
        (("--decode-buckets", "none"), "--decode-buckets"),
        (("--decode-buckets", ""), "--decode-buckets"),
        (("--extend-buckets", ""), "--extend-buckets"),
        (("--extend-buckets", "8x16"), "--extend-buckets"),
        (("--page-size", "48"), "--snapshot-grid"),
        (("--arch", "i386"), "--arch"),
        (("--dtype", "int4"), "--dtype"),
        (("--tp", "9"), "--tp"),
        (("--tp", "3"), "--tp"),
        (("--spec-depth", "5"), "--spec-depth"),
        (("--rank-weights", "1"), "--rank-weights"),
        (("--jobs", "-1"), "--jobs"),
        (("--device", "tpu"), "command line"),
        (("--page-size", "many"), "command line"),
        (("--speed", "11"), "command line"),
        (("folder",), "command line"),
        (("--config", "none.json"), "--config"),
    ],
)
def test_an_option_that_cannot_be_honoured(
    run: Run, arguments: tuple[str, ...], field: str
) -> None:
    base = () if "--device" in arguments else ("--device", "cpu")
    assert refusal(run, 2, "--model", "inkling-tiny", *base, *arguments)[0] == field


def test_a_refusal_of_the_process_itself() -> None:
    line = refused(compile_engine("--model", "inkling-tiny", "--device", "cpu", "--tp", 5), 2)
    assert line.startswith("error: --tp: found 5 (8 query heads of full layers do not divide by 5;")


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("{", "--config"),
        ('{"model": ' + "[" * 100_000, "recursion"),
        ("[1]", "Expected `object`"),
        ('{"model": "inkling-tiny", "speed": 1}', "speed"),
        ('{"model": "inkling-tiny", "tp": "two"}', "tp"),
        ('{"model": "inkling-tiny", "tp": 1.5}', "tp"),
        ('{"tp": 1}', "--model"),
    ],
)
def test_a_wrong_config_file(run: Run, tmp_path: Path, text: str, detail: str) -> None:
    path = tmp_path / "build.json"
    path.write_text(text)
    field, found, _, _ = refusal(run, 2, "--config", path)
    assert detail in f"{field} {found}"


def test_options_override_the_config_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "build.json"
    fields = {"model": "inkling-tiny", "device": "cpu", "page_size": 32, "max_running": 2}
    path.write_text(json.dumps(fields))
    code, out, _ = run("--config", path, "--max-running", 3, "--dry-run", "--json")
    spec = json.loads(out)["spec"]
    assert (code, spec["page_size"], spec["max_running"]) == (0, 32, 3)


def test_an_unusable_target(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    small = ("--model", checkpoint, "--device", "cpu")
    for target in ("file", "full", "file/engine"):
        assert refusal(run, 2, *small, "--out", target)[0] == "--out"
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    assert not any(path.name.startswith((".build", ".staging")) for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (FailedError("gate", "x\ny", "z", "retry"), 1, "gate: found x y; expected z; retry"),
        (DoesNotFitError("memory", 1, "2", "buy"), 5, "memory: found 1; expected 2; buy"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            OSError(28, "No space left on device", "/full"),
            1,
            f"/full: found No space left on device; {FREE_SPACE}",
        ),
    ],
)
def test_exit_codes(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    def build(*_: object) -> Path:
        raise error

    monkeypatch.setattr("inkling_engine.compile.build.build", build)
    found, out, err = run("--model", "inkling-tiny", "--device", "cpu")
    assert (found, out, err.strip()) == (code, "", f"error: {line}")


@pytest.mark.parametrize(("flag", "lines"), [("--verbose", 3), (None, 2), ("--quiet", 0)])
def test_results_on_stdout_progress_on_stderr(
    run: Run, monkeypatch: pytest.MonkeyPatch, flag: str | None, lines: int
) -> None:
    def build(plan: object, notify: Callable[[str, str, float], None]) -> Path:
        notify("item", "started", 0)
        notify("item", "done", 1.25)
        notify("build", "left", 7)
        return Path("/engines/one")

    monkeypatch.setattr("inkling_engine.compile.build.build", build)
    base = ("--model", "inkling-tiny", "--device", "cpu", *((flag,) if flag else ()))
    code, out, err = run(*base)
    assert (code, out) == (0, "/engines/one\n")
    assert len(err.splitlines()) == lines
    if lines:
        assert err.endswith("build: left about 7 s\n") and "item: done 1.2 s\n" in err
    assert json.loads(run(*base, "--json")[1])["folder"] == "/engines/one"


def test_help_lists_every_option(run: Run) -> None:
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    for parameter in cli.command.params:
        assert max(parameter.opts, key=len) in out


def test_ranks_of_a_preset_without_weights(run: Run) -> None:
    arguments = ("--model", "inkling-small", "--tp", "8", "--rank-weights", "1", "--dry-run")
    assert refusal(run, 2, *arguments)[0] == "--rank-weights"


@pytest.mark.parametrize(("longest", "counted"), [("4096", "4,096"), ("16384", "8,192")])
def test_a_bill_says_which_requests_it_counts(run: Run, longest: str, counted: str) -> None:
    arguments = ("--model", "inkling-small", "--tp", "8", "--max-context", longest, "--dry-run")
    assert f"requests of {counted} tokens that fit" in run(*arguments)[1]
