"""`inkling-engine`: a thin shell over the runtime, the engine folder always first.

Results go to stdout, logs and errors, one line each, to stderr. Whatever is slow to import is
imported by the command that needs it: `inspect` loads no torch.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from inkling_engine.artifacts.child import module_command
from inkling_engine.artifacts.errors import misread, unusable
from inkling_engine.runtime.errors import FailedError, LinesFailedError, UsageError, UserError
from inkling_engine.runtime.options import (
    LOAD_NAMES,
    TRACE,
    load_options,
    parse_ids,
    sampling_options,
    sampling_params,
)

if TYPE_CHECKING:
    from inkling_engine.runtime.requests import Prompt

_PATH = click.Path(path_type=Path)
Folder = click.argument("folder", metavar="DIR", type=_PATH)
_COUNT, _MANY = click.IntRange(1), click.IntRange(2)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Open, check and run a compiled engine folder."""


@command.command()
@Folder
@JSON
def inspect(folder: Path, as_json: bool) -> None:
    """Print what was built, for what, from what, how big."""
    from inkling_engine.runtime.inspect import describe, render

    facts = describe(folder)
    click.echo(_encode(facts) if as_json else render(facts))


@command.command()
@Folder
@load_options
@JSON
def verify(folder: Path, as_json: bool, **load: Any) -> None:
    """Check every digest, then run the golden inputs."""
    from inkling_engine.runtime.verify import verify_engine

    outcome = verify_engine(folder, **_loading(load))
    lines = "\n".join(f"{name}: {text}" for name, text in outcome.items())
    click.echo(_encode(outcome) if as_json else lines)


@command.command()
@Folder
@click.option("--prompt", metavar="TEXT", help="Prompt text.")
@click.option("--prompt-ids", metavar="IDS", help="Prompt as token ids, such as 1,5,7.")
@sampling_options
@load_options
@TRACE
@click.option("--stream", is_flag=True, help="Print text as it comes.")
@click.option("--timings", is_flag=True, help="Tell where the time went.")
@JSON
def generate(
    folder: Path,
    prompt: str | None,
    prompt_ids: str | None,
    stream: bool,
    timings: bool,
    trace: Path | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Continue a prompt."""
    from inkling_engine.runtime.generate import run_prompt, stream_prompt

    load = {name: values.pop(name) for name in LOAD_NAMES}
    request = _prompt(prompt, prompt_ids), sampling_params(values)
    if stream:
        if as_json or request[1].n > 1:
            found = "--json" if as_json else f"--n {request[1].n}"
            raise UsageError("--stream", f"{found} beside it", "text of one choice", "drop one")
        result = stream_prompt(folder, *request, _write, trace=trace, **_loading(load))
    else:
        result = run_prompt(folder, *request, trace=trace, **_loading(load))
    seconds = result.pop("timings")
    if timings:
        result["timings"] = seconds
    _print_result(result, as_json=as_json, streamed=stream)


@command.command()
@Folder
@click.option("--batch", type=_COUNT, default=1, show_default=True, help="Prompts at a time.")
@click.option("--context", type=_COUNT, default=128, show_default=True, help="Prompt's tokens.")
@click.option("--tokens", type=_MANY, default=128, show_default=True, help="Tokens to generate.")
@click.option("--repeat", type=_COUNT, default=5, show_default=True, help="Runs of each loop.")
@click.option("--accept", type=int, help="Accept so many drafts a round, whatever they are.")
@load_options
@TRACE
@JSON
def bench(
    folder: Path,
    batch: int,
    context: int,
    tokens: int,
    repeat: int,
    accept: int | None,
    trace: Path | None,
    as_json: bool,
    **load: Any,
) -> None:
    """Measure load, prefill and decode."""
    from inkling_engine.runtime.bench import Work, measure, render

    work = Work(batch=batch, context=context, tokens=tokens, repeat=repeat, accept=accept)
    report = measure(folder, work, trace, **_loading(load))
    click.echo(_encode(report) if as_json else render(report))


@command.command()
@click.argument("trace", metavar="TRACE", type=click.Path(path_type=Path))
@click.option("--out", metavar="FILE", required=True, type=click.Path(path_type=Path), help="SVG.")
def report(trace: Path, out: Path) -> None:
    """Draw a trace: padding by bucket, and pool occupancy over the run."""
    from inkling_engine.runtime.report import chart

    chart(trace, out)
    click.echo(out)


@command.command()
@Folder
@click.option("--input", "source", required=True, type=_PATH, help="Requests, one JSON line each.")
@click.option("--output", required=True, type=_PATH, help="Answers, line for line; must be new.")
@click.option("--shard", default="0/1", show_default=True, help="Part i of n, i from 0.")
@click.option("--max-in-flight", type=_COUNT, help="Choices under way. Default 4 x max_running.")
@click.option("--deadline", metavar="SECONDS", type=float, help="Give up what is not done then.")
@click.option("--summary", type=_PATH, help="Write the summary there, as JSON.")
@load_options
@TRACE
@JSON
def batch(
    folder: Path,
    source: Path,
    output: Path,
    shard: str,
    max_in_flight: int | None,
    deadline: float | None,
    summary: Path | None,
    trace: Path | None,
    as_json: bool,
    **load: Any,
) -> None:
    """Answer a file of requests; run again to go on after an end on the way."""
    from inkling_engine.runtime.batch import StoppedError, run_batch
    from inkling_engine.runtime.batch_input import parse_shard
    from inkling_engine.runtime.batch_progress import render

    load = {"max_in_flight": max_in_flight, "trace": trace, "summary": summary, **load}
    part, load = parse_shard(shard), _loading(load)
    try:
        report = run_batch(folder, source, output, shard=part, deadline=deadline, **load)
    except StoppedError as error:
        _fail(str(error), 128 + error.signum)
    if not summary:
        click.echo(_encode(report) if as_json else render(report))
    if failed := report["requests"]["failed"]:
        found = f"{failed} of {report['requests']['total']} failed"
        remedy = f"see the `error` of those lines in {output}"
        raise LinesFailedError("batch lines", found, "an answer to each", remedy)


@command.command("attach-weights")
@Folder
@click.argument("checkpoint", metavar="CHECKPOINT", type=click.Path(path_type=Path))
def attach_weights(folder: Path, checkpoint: Path) -> None:
    """Convert a checkpoint's weights into a programs-only engine."""
    module = "inkling_engine.compile.attach"  # its own process: no compiler in the runtime
    arguments = module_command(module, str(folder), str(checkpoint))
    if code := subprocess.run(arguments, check=False).returncode:
        sys.exit(code if code > 0 else 1)


def main() -> None:
    """Entry point: exit codes 0 ok, 1 failure, 2 usage, 3 to 6 as `artifacts.errors`, 130."""
    _fill_streams()
    try:
        command.main(prog_name="inkling-engine", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        _fail(str(error), error.exit_code)
    except click.ClickException as error:
        message, program = error.format_message(), "inkling-engine"
        _fail(str(misread(message, "what --help lists", program)), 2)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except BrokenPipeError:  # nobody reads on
        sys.exit(1)
    except OSError as error:
        _fail(str(unusable(error)), 1)
    finally:
        _let_go(sys.stdout)
        _let_go(sys.stderr)


def _fill_streams() -> None:
    """Give closed standard streams a place, so that no other file gets their numbers."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:  # it takes the lowest free number
        pass
    os.close(handle)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _let_go(stream: TextIO) -> None:
    """Drop what a standard stream does not take, or the interpreter would fail on it once more at
    its end, with an exit code of its own."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(message: str, code: int) -> NoReturn:
    with suppress(OSError):  # nobody may read it, but the code is heard
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _encode(value: object) -> str:
    import msgspec

    return msgspec.json.encode(value).decode()


def _loading(values: dict[str, Any]) -> dict[str, Any]:
    """Set up logging, and keep what `Engine.load` takes."""
    level = values.pop("log_level").upper()
    logging.basicConfig(stream=sys.stderr, level=level, format="%(levelname)s: %(message)s")
    return {name: value for name, value in values.items() if value is not None}


def _write(text: str) -> None:
    click.echo(text, nl=False)


def _prompt(text: str | None, ids: str | None) -> Prompt:
    if (text is None) == (ids is None):
        found = "neither" if text is None else "both"
        remedy = "give --prompt TEXT or --prompt-ids 1,5,7"
        raise UsageError("prompt", found, "exactly one of --prompt and --prompt-ids", remedy)
    return parse_ids("--prompt-ids", ids) if ids is not None else text or ""


def _print_result(result: dict[str, Any], *, as_json: bool, streamed: bool) -> None:
    """Print the choices (unless they were streamed), and fail if one of them did."""
    if as_json:
        click.echo(_encode(result))
    elif streamed:
        click.echo()
    else:
        for choice in result["choices"]:
            click.echo(choice["text"])
    if "timings" in result and not as_json:
        for name, seconds in result["timings"].items():
            click.echo(f"{name}: {seconds:.4f} s", err=True)
    for choice in result["choices"]:
        if choice["finish_reason"] == "error":
            remedy = "check the weights, or build with --dtype fp32"
            where = f"choice {choice['index']}"
            raise FailedError(where, "non-finite logits", "finite logits", remedy)


if __name__ == "__main__":
    main()
