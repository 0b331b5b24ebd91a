"""`compile-engine`: a thin shell over `BuildOptions`, `make_plan` and `build`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from inkling_engine.artifacts.errors import UsageError, UserError, misread, show, unusable
from inkling_engine.artifacts.units import read_size
from inkling_engine.compile.options import BuildOptions


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", help="Preset (inkling, inkling-small, inkling-tiny) or checkpoint folder.")
@click.option("--checkpoint", help="Folder with the weights of a preset.")
@click.option("--out", help="Engine folder; default ./artifacts/<engine-id>.")
@click.option("--tp", type=int, help="Ranks. Default 1.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Target device. Default cpu where there are weights and no GPU.",
)
@click.option("--arch", help="sm90, or x86-64-v2|v3|v4 for the CPU; default this machine's.")
@click.option("--dtype", help="fp32 or bf16; default fp32 on the CPU, bf16 on CUDA.")
@click.option("--max-context", type=int, help="Most tokens of a request; default the model's.")
@click.option(
    "--max-running", type=int, help="Most requests at once. Default 8 on a CPU, 128 on CUDA."
)
@click.option(
    "--decode-buckets",
    help="Rows of the decode programs, such as 1,2,4,8. Default powers of 2 up to --max-running.",
)
@click.option(
    "--extend-buckets",
    help="Tokens of the extend programs, such as 64,512x16. Default 64,512, on CUDA 2048 too.",
)
@click.option("--page-size", type=int, help="Tokens a KV page. Default 64.")
@click.option("--snapshot-grid", type=int, help="Tokens between prefix snapshots. Default 256.")
@click.option("--spec-depth", type=int, help="Drafts a round. Default 0.")
@click.option("--rank-weights", help="Convert only these ranks' weights, such as 0,1.")
@click.option("--jobs", type=int, help="Work items at a time. Default 1.")
@click.option(
    "--config",
    type=click.Path(dir_okay=False),
    help="JSON file with the same fields, and draft_vocab and layers.",
)
@click.option(
    "--dry-run",
    is_flag=False,
    flag_value="arch",
    metavar="[MEMORY]",
    help="Print plan and memory bill; optionally for a device memory such as 80G.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--verbose/--quiet", default=None, help="More, or no, progress on stderr.")
def command(
    config: str | None, dry_run: str | None, as_json: bool, verbose: bool | None, **given: Any
) -> None:
    """Build a sealed engine folder from a model."""
    from inkling_engine.compile.plan import make_plan, plan_json, require_buildable

    options = _options(config, given)
    plan = make_plan(options, _memory(dry_run))
    if dry_run is not None:
        from inkling_engine.compile.report import print_plan

        print_plan(plan, as_json=as_json)
        return
    require_buildable(plan)
    from inkling_engine.compile.build import build

    folder = build(plan, _progress(verbose))
    proof = _proof_to_do(folder) if plan.spec.device == "cuda" else None
    described = plan_json(plan) | {"folder": str(folder), "proof_to_do": proof}
    click.echo(msgspec.json.encode(described).decode() if as_json else folder)
    if proof:
        print(
            f"note: built without a GPU: nothing of it has run. Prove it: {proof}", file=sys.stderr
        )


def _proof_to_do(folder: Path) -> str | None:
    """The command that proves an engine where its GPU is, unless it was proved when it was built."""
    from inkling_engine.artifacts.store import open_manifest

    manifest = open_manifest(folder)
    if manifest.environment.built_with_gpu:
        return None
    alone = " --alone" if manifest.spec.tp > 1 else ""
    drawn = "" if manifest.weights else f" --random-weights 0{alone}"
    return f"inkling-engine verify {folder}{drawn}"


def main() -> None:
    """Entry point: exit codes 0 ok, 1 failure, 2 usage, 3 to 5 as `artifacts.errors`, 130."""
    try:
        command.main(standalone_mode=False)
    except UserError as error:
        _fail(str(error), error.exit_code)
    except click.ClickException as error:
        expected = "options as --help lists them"
        _fail(str(misread(error.format_message(), expected, "compile-engine")), 2)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except OSError as error:
        _fail(str(unusable(error)), 1)


def _fail(message: str, code: int) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _options(config: str | None, given: dict[str, Any]) -> BuildOptions:
    """Fields of `--config`, overridden by those given on the command line."""
    fields: dict[str, Any] = {}
    try:
        if config:
            fields = msgspec.json.decode(Path(config).read_bytes(), type=dict)
        fields |= {name: value for name, value in given.items() if value is not None}
        if not fields.get("model"):
            expected = "a preset or a checkpoint folder"
            raise UsageError("--model", "nothing", expected, "for example --model inkling-tiny")
        return msgspec.convert(fields, BuildOptions)
    except (msgspec.MsgspecError, RecursionError, OSError) as error:
        expected = "a JSON object with the long options' names as fields"
        raise UsageError("--config", f"{config}: {error}", expected, "correct the file") from None


def _memory(text: str | None) -> int | None:
    """Bytes from `80G`, `141e9` or `16GiB`; None for the architecture's default."""
    if text in (None, "arch"):
        return None
    size = int(read_size(str(text)))
    if not size:
        raise UsageError("--dry-run", show(text), "a size such as 80G or 64GiB", "correct it")
    return size


def _progress(verbose: bool | None):  # type: ignore[no-untyped-def]
    started = time.monotonic()

    def notify(item: str, state: str, value: float) -> None:
        if verbose is False or (state == "started" and not verbose):
            return
        detail = {"done": f"{value:.1f} s", "left": f"about {value:.0f} s"}.get(state, "")
        elapsed = time.monotonic() - started
        print(f"[{elapsed:6.1f} s] {item}: {state} {detail}".rstrip(), file=sys.stderr)

    return notify


if __name__ == "__main__":
    main()
