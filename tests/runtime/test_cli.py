"""The command line over a sealed folder of the fake engine: output, options, errors, exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from support.fake_spec import build_spec, tiny_tokenizer
from support.fake_step import FakeStep, golden_cases, run_oracle, seal_engine

from inkling_engine.artifacts import layout
from inkling_engine.artifacts.child import module_command
from inkling_engine.runtime import cli, graphs, probe

SPEC = build_spec()
OPTIONS = {
    "inspect": ["as_json", "folder"],
    "verify": [
        *["alone", "as_json", "device_index", "folder", "log_level", "memory", "prefix_cache"],
        *["random_weights", "steps_per_replay"],
    ],
    "generate": [
        *["alone", "as_json", "detokenize", "device_index", "folder", "frequency_penalty"],
        *["ignore_eos", "include_stop_str_in_output", "log_level", "logit_bias"],
        *["logprobs", "max_drafts", "max_tokens", "memory", "min_p", "min_tokens", "n"],
        *["prefix_cache", "presence_penalty", "prompt", "prompt_ids", "random_weights"],
        *["repetition_penalty", "seed", "skip_special_tokens", "steps_per_replay", "stop"],
        *["stop_token_ids", "stream", "temperature", "timings", "top_k", "top_p", "trace"],
    ],
    "bench": [
        *["accept", "alone", "as_json", "batch", "context", "device_index", "folder", "log_level"],
        *[
            "memory",
            "prefix_cache",
            "random_weights",
            "repeat",
            "steps_per_replay",
            "tokens",
            "trace",
        ],
    ],
    "report": ["out", "trace"],
    "batch": [
        *["alone", "as_json", "deadline", "device_index", "folder", "log_level", "max_in_flight"],
        *[
            "memory",
            "output",
            "prefix_cache",
            "random_weights",
            "shard",
            "source",
            "steps_per_replay",
            "summary",
        ],
        "trace",
    ],
    "attach-weights": ["checkpoint", "folder"],
}

FILES = ("--summary", "--trace")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "engine"
    seal_engine(path, SPEC)
    return path


@pytest.fixture(autouse=True)
def _fake_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder's programs are no programs: run the fake step instead."""
    monkeypatch.setenv("INKLING_ENGINE_CACHE", str(tmp_path / "cache"))
    idle = [sys.executable, "-c", ""]
    monkeypatch.setattr(
        probe, "start", lambda *_: subprocess.Popen(idle, stderr=subprocess.PIPE, text=True)
    )
    monkeypatch.setattr(graphs, "open_programs", lambda *_: FakeStep)


class Shell:
    """Runs the entry point; keeps exit code and both streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capfd = monkeypatch, capfd

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["inkling-engine", *map(str, arguments)])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
        out, err = self.capfd.readouterr()
        assert isinstance(code, int)
        return code, out, err

    def fail(self, code: int, *arguments: object) -> str:
        """Run something that must fail with `code` and one line."""
        found, out, err = self(*arguments)
        assert (found, out) == (code, "")
        assert err.startswith("error: ") and err.count("\n") == 1
        return err


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capfd)


def test_the_option_list_is_closed() -> None:
    found = {
        name: sorted(str(param.name) for param in command.params)
        for name, command in cli.command.commands.items()
    }
    assert found == OPTIONS
    assert all(
        isinstance(command.params[0], click.Argument) for command in cli.command.commands.values()
    )


def test_inspect(shell: Shell, folder: Path) -> None:
    code, out, _ = shell("inspect", folder, "--json")
    facts = json.loads(out)
    assert (code, facts["engine_id"], facts["spec"]["max_context"]) == (
        0,
        "fake-tp1-native-fp32-00000000",
        64,
    )
    assert [p["bytes"] for p in facts["programs"]] == [len("no program")] * 5
    sizes = facts["bytes"]
    on_disk = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    manifest = (folder / layout.MANIFEST).stat().st_size
    assert sizes["programs"] + sizes["weights"] + sizes["other"] == on_disk - manifest
    code, out, _ = shell("inspect", folder)
    assert code == 0 and "decode rows 1 2 4; extend tokens x rows 8x2 16x4" in out


def test_inspect_tells_of_drafting(shell: Shell, tmp_path: Path) -> None:
    seal_engine(tmp_path / "engine", build_spec(drafts=3))
    assert "verify 3 drafts, rows 1 2 4; extend tokens" in shell("inspect", tmp_path / "engine")[1]


def test_inspect_tells_that_weights_are_missing(shell: Shell, tmp_path: Path) -> None:
    seal_engine(tmp_path / "engine", SPEC, weights=False)
    assert "none (programs only)" in shell("inspect", tmp_path / "engine")[1]


def test_generate_json(shell: Shell, folder: Path) -> None:
    code, out, err = shell(
        "generate", folder, "--prompt-ids", "30,31", "--temperature", 0, "--max-tokens", 6,
        "--ignore-eos", "--logprobs", 1, "--json", "--timings",
    )  # fmt: skip
    assert (code, err) == (0, "")
    result = json.loads(out)
    (choice,) = result["choices"]
    golden = golden_cases(SPEC)[0]
    assert choice["token_ids"] == golden["tokens"]
    assert choice["text"] == tiny_tokenizer().decode(choice["token_ids"], skip_special_tokens=True)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert [item["logprob"] for item in choice["logprobs"]] == golden["logprobs"]
    assert result["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert {"manifest", "probe", "bind", "generate"} <= result["timings"].keys()


def test_generate_text_and_stream_agree(shell: Shell, folder: Path) -> None:
    arguments = ("generate", folder, "--prompt", "F9", "--temperature", 0, "--ignore-eos")
    code, plain, err = shell(*arguments)
    assert (code, err) == (0, "")
    assert shell(*arguments, "--stream") == (0, plain, "")
    code, out, err = shell(*arguments, "--timings")
    assert (code, out) == (0, plain) and "generate: " in err
    assert "timings" not in json.loads(shell(*arguments, "--json")[1])


def test_a_run_is_traced_and_drawn(shell: Shell, folder: Path, tmp_path: Path) -> None:
    trace, drawn = tmp_path / "run.json", tmp_path / "run.svg"
    arguments = ("generate", folder, "--prompt-ids", "30,31", "--temperature", 0, "--ignore-eos")
    for more in ((), ("--stream",)):
        assert shell(*arguments, *more, "--trace", trace)[0] == 0
        events = json.loads(trace.read_text())
        assert sum(event["args"].get("new_tokens", 0) for event in events) == 16
    assert shell("report", trace, "--out", drawn) == (0, f"{drawn}\n", "")
    assert drawn.read_text().startswith("<svg ")
    assert "--trace" in shell.fail(2, *arguments, "--trace", tmp_path)
    assert "TRACE" in shell.fail(2, "report", tmp_path / "none", "--out", drawn)


def test_every_sampling_option_arrives(shell: Shell, folder: Path) -> None:
    text = json.loads(
        shell(
            "generate", folder, "--prompt-ids", "30,31", "--n", 2, "--temperature", 0.5, "--top-p", 0.9,
            "--top-k", 40, "--min-p", 0.1, "--seed", 7, "--presence-penalty", 1, "--frequency-penalty", 1,
            "--repetition-penalty", 1.1, "--logit-bias", '{"42": -5}', "--max-tokens", 12,
            "--min-tokens", 1, "--stop", "~~~", "--stop", "###", "--stop-token-ids", "7,8",
            "--ignore-eos", "--include-stop-str-in-output", "--logprobs", 2, "--keep-special-tokens",
            "--detokenize", "--json",
        )[1]
    )  # fmt: skip
    assert [len(choice["token_ids"]) > 0 for choice in text["choices"]] == [True, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "exactly one of --prompt and --prompt-ids"),
        (["--prompt", "a", "--prompt-ids", "1"], "both"),
        (["--prompt", ""], "at least one token"),
        (["--prompt-ids", ""], "at least one token"),
        (["--prompt-ids", "1,x"], "--prompt-ids"),
        (["--prompt-ids", "151"], "from 0 to 150"),
        (["--prompt-ids", "1", "--max-tokens", "64"], "at most 64 (max_context)"),
        (["--prompt-ids", "1", "--temperature", "-1"], "temperature"),
        (["--prompt-ids", "1", "--temperature", "hot"], "--temperature"),
        (["--prompt-ids", "1", "--logit-bias", "{"], "--logit-bias"),
        (["--prompt-ids", "1", "--logit-bias", "[1]"], "logit_bias"),
        (["--prompt-ids", "1", "--logprobs", "4"], "logprobs"),
        (["--prompt-ids", "1", "--stop-token-ids", "1;2"], "--stop-token-ids"),
        (["--prompt-ids", "1", "--stream", "--json"], "--stream"),
        (["--prompt-ids", "1", "--stream", "--n", "2"], "--stream"),
        (["--prompt-ids", "1", "--logit-bias", "[" * 100_000], "--logit-bias"),
        (["--prompt-ids", "1", "--memory", "lots"], "--memory"),
        (["--prompt-ids", "1", "--memory", "9" * 400], "--memory"),
        (["--prompt-ids", "1", "--memory", "9" * 300], "--memory"),
        (["--prompt-ids", "1", "--random-weights", "9" * 23], "--random-weights"),
        (["--prompt-ids", "1", "--device-index", "9" * 23], "--device-index"),
        (["--prompt-ids", "1", "--log-level", "loud"], "--log-level"),
        (["--prompt-ids", "1", "--prompt-logprobs", "1"], "--prompt-logprobs"),
        (["--prompt-ids", "1", "extra"], "extra"),
    ],
)
def test_usage_errors(shell: Shell, folder: Path, options: list[str], words: str) -> None:
    assert words in shell.fail(2, "generate", folder, *options)


def test_other_usage_errors(shell: Shell, folder: Path, tmp_path: Path) -> None:
    for arguments, found in ((), "command"), (("serve",), "'serve'"), (("inspect",), "DIR"):
        error = shell.fail(2, *arguments)
        assert (
            found in error and "command line: found" in error and "inkling-engine --help" in error
        )
    for verb in ("inspect", "verify"):
        assert "compile-engine" in shell.fail(2, verb, tmp_path / "none")


def test_exit_codes(shell: Shell, folder: Path, tmp_path: Path) -> None:
    arguments = ("--prompt-ids", "1", "--memory", "1K")
    assert "1,000 (--memory)" in shell.fail(5, "generate", folder, *arguments)
    (tmp_path / layout.MANIFEST).write_text("{")
    shell.fail(4, "inspect", tmp_path)
    (tmp_path / layout.MANIFEST).write_text('{"schema_version": 99}')
    shell.fail(3, "inspect", tmp_path)
    seal_engine(tmp_path / "bare", SPEC, weights=False)
    assert "attach-weights" in shell.fail(2, "generate", tmp_path / "bare", "--prompt-ids", "1")


def test_non_finite_logits_fail_with_the_result_printed(shell: Shell, folder: Path) -> None:
    code, out, err = shell("generate", folder, "--prompt-ids", "30,13", "--json")
    assert code == 1 and json.loads(out)["choices"][0]["finish_reason"] == "error"
    assert "non-finite" in err and err.count("\n") == 1


def test_interrupts(shell: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: FakeStep, name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeStep, "run", interrupt)
    code, out, err = shell("generate", folder, "--prompt-ids", "1")
    assert (code, out, err.strip()) == (130, "", "error: interrupted")


def test_verify(shell: Shell, folder: Path) -> None:
    code, out, _ = shell("verify", folder, "--json")
    assert code == 0
    assert json.loads(out) == {"digests": "ok", "golden": "ok, 12 tokens of 2 prompts"}
    assert "golden: ok" in shell("verify", folder)[1]


def test_verify_drawn_weights(shell: Shell, tmp_path: Path) -> None:
    seal_engine(tmp_path / "engine", SPEC, weights=False)
    assert "programs only" in shell("verify", tmp_path / "engine")[1]
    code, out, _ = shell("verify", tmp_path / "engine", "--random-weights", 3)
    assert code == 0 and "the same alone and together" in out


def test_verify_names_the_first_difference(shell: Shell, tmp_path: Path, monkeypatch: Any) -> None:
    for change, words in (
        (lambda case: case["tokens"].__setitem__(3, 9), "prompt of 2 tokens, position 3"),
        (lambda case: case["logprobs"].__setitem__(0, -99.0), "position 0"),
        (lambda case: (case["tokens"].append(1), case["logprobs"].append(0.0)), "position 6"),
    ):
        cases: Any = golden_cases(SPEC)
        change(cases[0])
        path = tmp_path / words / "engine"
        path.parent.mkdir()
        monkeypatch.setattr("support.fake_step.golden_cases", lambda _, cases=cases: cases)
        seal_engine(path, SPEC)
        assert words in shell.fail(1, "verify", path)


def test_verify_drawn_weights_compares_with_alone(
    shell: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FakeStep._commit

    def neighbourly(self: FakeStep, *arguments: Any) -> int:
        token = whole(self, *arguments)
        return (token + 1) % 150 if "r0004" in self.runs[-1] else token

    monkeypatch.setattr(FakeStep, "_commit", neighbourly)
    assert "other tokens than alone" in shell.fail(1, "verify", folder, "--random-weights", 3)


def batch_lines(path: Path, *prompts: object) -> Path:
    lines = [
        {
            "custom_id": f"id-{at}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": prompt, "temperature": 0},
        }
        for at, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_batch(shell: Shell, folder: Path, tmp_path: Path) -> None:
    source = batch_lines(tmp_path / "in", [30], [31, 32], [33] * 9)
    files = ("--input", source, "--output")
    code, out, err = shell("batch", folder, *files, tmp_path / "out")
    assert (code, err) == (0, "") and "requests: 3, 3 succeeded, 0 failed, 0 from before" in out
    code, out, _ = shell("batch", folder, *files, tmp_path / "json", "--json")
    assert json.loads(out)["requests"]["total"] == 3
    report = tmp_path / "report"
    for shard in ("0/2", "1/2"):
        name = tmp_path / shard[0]
        code, out, _ = shell("batch", folder, *files, name, "--shard", shard, "--summary", report)
        assert (code, out) == (0, "") and json.loads(report.read_bytes())["shard"] == shard
    whole = (tmp_path / "out").read_bytes()
    assert len(whole.splitlines()) == 3
    assert (tmp_path / "0").read_bytes() + (tmp_path / "1").read_bytes() == whole


def test_batch_with_failed_lines(shell: Shell, folder: Path, tmp_path: Path) -> None:
    source = batch_lines(tmp_path / "in", [30], [151], 7)
    code, out, err = shell("batch", folder, "--input", source, "--output", tmp_path / "out")
    assert code == 6 and "2 failed (invalid_request 2)" in out
    assert err.startswith("error: batch lines: found 2 of 3 failed") and err.count("\n") == 1


def test_batch_usage_errors(shell: Shell, folder: Path, tmp_path: Path) -> None:
    source = batch_lines(tmp_path / "in", [30])
    files = ("--input", source, "--output", tmp_path / "out")
    assert "--input" in shell.fail(2, "batch", folder, "--output", tmp_path / "out")
    assert "--output" in shell.fail(2, "batch", folder, "--input", source)
    assert "i from 0 to n-1" in shell.fail(2, "batch", folder, *files, "--shard", "2/2")
    assert "max-in-flight" in shell.fail(2, "batch", folder, *files, "--max-in-flight", 0)
    assert "nothing at" in shell.fail(
        2, "batch", folder, "--input", tmp_path / "no", "--output", tmp_path / "out"
    )
    (tmp_path / "out").touch()
    assert "exists" in shell.fail(2, "batch", tmp_path / "no-engine", *files)


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--output", "in.part/../in", "output: found .*in exists"),
        *((option, name, "is the input too") for option in FILES for name in ("in", "link")),
        *((option, "out", "is the output too") for option in FILES),
        *((option, "out.part", "is the output's .part too") for option in FILES),
        *((option, "hard", "is the output's .part too") for option in FILES),
        *((option, "out.part.json", "is the output's .part.json too") for option in FILES),
        *((option, "no/x", f"{option}: found .*No such file") for option in FILES),
        *((option, "in.part", f"{option}: found .*Is a directory") for option in FILES),
        *((option, "x" * 256, f"{option}: found .*File name too long") for option in FILES),
        ("--trace", "report", "--trace: found .*report, which is the --summary too"),
        ("--input", "out.part", "is the input too"),
        ("--input", "nothing", "input: found nothing at "),
    ],
)
def test_batch_files_that_would_cost_each_other(
    shell: Shell, tmp_path: Path, option: str, name: str, words: str
) -> None:
    batch_lines(tmp_path / "in", [30])
    (tmp_path / "in.part").mkdir()
    (tmp_path / "out.part").write_bytes(b"a record\n")
    (tmp_path / "hard").hardlink_to(tmp_path / "out.part")
    (tmp_path / "link").symlink_to("in")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
    options = {"--input": "in", "--output": "out", "--summary": "report", option: name}
    files = [one for key, value in options.items() for one in (key, tmp_path / value)]
    assert re.search(words, shell.fail(2, "batch", tmp_path / "no-engine", *files))
    assert before == {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}


def test_batch_summaries_are_whole_or_absent(
    shell: Shell, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("--input", batch_lines(tmp_path / "in", [30]), "--output", tmp_path / "out")
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    replace = Path.replace

    def full(new: Path, target: Path) -> Path:
        if target.name == "old":
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(new, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        error = shell.fail(1, "batch", folder, *files, "--summary", tmp_path / "link")
    assert "--summary: found " in error and "No space left" in error
    names = sorted(path.name for path in tmp_path.iterdir() if path.name != "cache")
    assert names == ["in", "link", "old", "out"] and (tmp_path / "old").read_text() == "old"
    (tmp_path / "out").unlink()
    assert shell("batch", folder, *files, "--summary", tmp_path / "link")[0] == 0
    assert json.loads((tmp_path / "old").read_text())["requests"]["total"] == 1
    (tmp_path / "out").unlink()
    null = ("--summary", "/dev/null", "--trace", "/dev/null")
    assert shell("batch", folder, *files, *null)[0] == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_batch_ends_on_signals_and_goes_on(
    shell: Shell,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
    code: int,
) -> None:
    source = batch_lines(tmp_path / "in", *([30 + at] * 9 for at in range(20)))
    files = ("--input", source, "--output", tmp_path / "out", "--max-in-flight", 2)
    whole, runs, handlers = FakeStep.run, [], signal.getsignal(signum)

    def interrupted(self: FakeStep, name: str) -> None:
        runs.append(name)
        if len(runs) == 60:
            os.kill(os.getpid(), signum)
        whole(self, name)

    monkeypatch.setattr(FakeStep, "run", interrupted)
    message = shell.fail(code, "batch", folder, *files)
    written = (tmp_path / "out.part").read_bytes().count(b"\n")
    assert f"{signum.name}: {written} of 20 lines are written; run again" in message
    assert signal.getsignal(signum) is handlers and 0 < written < 20
    found, out, _ = shell("batch", folder, *files)
    assert found == 0 and f"20 succeeded, 0 failed, {written} from before" in out


def test_attach_weights_runs_the_compiler_in_its_own_process(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        return subprocess.CompletedProcess(command, 4 if len(seen) == 2 else -9 * (len(seen) == 3))

    monkeypatch.setattr(subprocess, "run", run)
    assert [shell("attach-weights", "DIR", "FROM")[0] for _ in range(3)] == [0, 4, 1]
    assert seen[0] == module_command("inkling_engine.compile.attach", "DIR", "FROM")


def test_a_real_process_prints_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inkling_engine.runtime.cli", "inspect", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: engine folder")


def test_results_are_what_the_oracle_says(shell: Shell, folder: Path) -> None:
    from inkling_engine.runtime.sampling import SamplingParams

    out = shell("generate", folder, "--prompt-ids", "30", "--seed", 5, "--json", "--n", 3)[1]
    params = SamplingParams(seed=5, n=3)
    for choice in json.loads(out)["choices"]:
        tokens, reason, _ = run_oracle(SPEC, [30], params, choice["index"])
        assert (choice["token_ids"], choice["finish_reason"]) == (tokens, reason)
    assert msgspec.json.decode(out)["usage"]["prompt_tokens"] == 1
