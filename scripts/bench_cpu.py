"""The fp32 engine of inkling-tiny beside transformers' own `generate`, in one run on one thread.

Decode time is a difference: a long generation minus a short one of the same prompts, so that the
prompt's cost and every call's set-up cancel. The sides take turns in blocks; what is stated are
medians over the blocks. First both must generate the same tokens. Without `--engine` an engine is
built into a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported

ROOT = Path(__file__).resolve().parent.parent
_AFTER = ("first token", "generate")  # phases that are no part of a load
BATCHES, PROMPT, FEW, MANY, LONG_PROMPT = (1, 8), 64, 8, 72, 1024

Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""(prompts of one length, new tokens) -> the new tokens of each."""


def main() -> int:
    """Measure and print; 1 if the two sides do not generate the same tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", type=Path, help="fp32 engine folder of inkling-tiny")
    parser.add_argument("--blocks", type=int, default=7, help="times that the sides take turns")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.engine or build(Path(scratch))
        report = measure(folder, options.blocks)
    print(json.dumps(report) if options.json else render(report))
    return 0 if report["same_tokens"] else 1


def build(where: Path) -> Path:
    """Compile the engine that the benchmark needs into `where`."""
    print("building the engine; --engine DIR takes one that is there", file=sys.stderr)
    command = [sys.executable, "-m", "inkling_engine.compile.cli", "--model", "inkling-tiny"]
    command += ["--device", "cpu", "--decode-buckets", "1,8", "--extend-buckets", "64,512"]
    command += ["--jobs", str(os.cpu_count()), "--out", str(where / "inkling-tiny")]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return where / "inkling-tiny"


def measure(folder: Path, blocks: int) -> dict[str, Any]:
    """Everything that is reported, seconds where nothing else is said."""
    import torch

    torch.set_num_threads(1)
    ours, engine_id = open_ours(folder)
    sides = {"transformers": open_theirs(), "engine": ours}
    prompts = [make_prompt(PROMPT, seed) for seed in range(max(BATCHES))]
    same = all(
        ours(prompts[:size], 24) == sides["transformers"](prompts[:size], 24) for size in BATCHES
    )
    phases = load_phases(folder)
    decode = {f"batch {size}": decode_times(sides, prompts[:size], blocks) for size in BATCHES}
    return {
        **about(),
        "engine": engine_id,
        "same_tokens": same,
        "decode_ms_per_step": decode,
        "extend_tokens_per_second": extend_rates(sides, blocks),
        "load_phases": phases,
        "load": sum(phases.values()),
        "inspect": command_time("runtime", "inspect", str(folder)),
        "dry_run": command_time(
            "compile", *["--model", "inkling-small", "--tp", "8", "--dry-run", "--json"]
        ),
    }


def open_ours(folder: Path) -> tuple[Generate, str]:
    """The engine's generation, and its id."""
    from inkling_engine.runtime import Engine, SamplingParams

    engine = Engine.load(folder)
    assert engine.spec.model == "inkling-tiny", f"{folder} is not an engine of inkling-tiny"

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        return [list(done.choices[0].token_ids) for done in engine.generate(prompts, params)]

    return generate, engine.manifest.engine_id


def open_theirs() -> Generate:
    """Greedy generation by transformers on the packaged checkpoint."""
    import torch
    from transformers import InklingForConditionalGeneration

    from inkling_engine.compile.models.inkling.shape import TINY

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = InklingForConditionalGeneration.from_pretrained(TINY, dtype=torch.float32).train(False)

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        ids = torch.tensor([list(prompt) for prompt in prompts])
        mask = torch.ones_like(ids)
        with torch.no_grad():
            output = model.generate(
                ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None
            )
        tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
        assert all(len(row) == count for row in tokens), "the end token must be ignored"
        return tokens

    return generate


def make_prompt(length: int, seed: int) -> list[int]:
    """The first `length` tokens of a source file, from the `seed`-th line on."""
    from tokenizers import Tokenizer

    from inkling_engine.compile.models.inkling.shape import TINY

    lines = Path(argparse.__file__).read_text().splitlines(keepends=True)
    text = "".join(lines[100 + 10 * seed :])[: 20 * length]
    encoder = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    ids: list[int] = encoder.encode(text, add_special_tokens=False).ids[:length]
    assert len(ids) == length
    return ids


def decode_times(
    sides: dict[str, Generate], prompts: Sequence[Sequence[int]], blocks: int
) -> dict[str, float]:
    """Milliseconds of a decode step of each side, and how many times faster the engine is."""

    def step(generate: Generate) -> float:
        few, many = (seconds(generate, prompts, count) for count in (FEW, MANY))
        return (many - few) / (MANY - FEW) * 1e3

    return by_turns(sides, step, blocks)


def extend_rates(sides: dict[str, Generate], blocks: int) -> dict[str, float]:
    """Prompt tokens a second of each side over one long prompt, and how many times faster."""
    prompt = [make_prompt(LONG_PROMPT, 0)]
    times = by_turns(sides, lambda generate: seconds(generate, prompt, 1), blocks)
    return {name: LONG_PROMPT / times[name] for name in sides} | {"ratio": times["ratio"]}


def by_turns(
    sides: dict[str, Generate], measure: Callable[[Generate], float], blocks: int
) -> dict[str, float]:
    """Medians over the blocks of each side's time and of the ratio within a block."""
    times = [{name: measure(generate) for name, generate in sides.items()} for _ in range(blocks)]
    result = {name: median(block[name] for block in times) for name in sides}
    return result | {"ratio": median(block["transformers"] / block["engine"] for block in times)}


def seconds(generate: Generate, prompts: Sequence[Sequence[int]], count: int) -> float:
    """Wall time of one generation."""
    start = time.perf_counter()
    generate(prompts, count)
    return time.perf_counter() - start


def load_phases(folder: Path, repeats: int = 3) -> dict[str, float]:
    """Median seconds of each phase of `Engine.load` in a process of its own."""
    command = [
        "generate",
        str(folder),
        *["--prompt-ids", "1", "--max-tokens", "1", "--timings", "--json"],
    ]
    runs = [json.loads(run_command("runtime", *command))["timings"] for _ in range(repeats)]
    return {name: median(run[name] for run in runs) for name in runs[0] if name not in _AFTER}


def command_time(room: str, *arguments: str, repeats: int = 5) -> float:
    """Median wall time of a command of ours, from process start to exit."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run_command(room, *arguments)
        times.append(time.perf_counter() - start)
    return median(times)


def run_command(room: str, *arguments: str) -> str:
    """What a command of ours prints."""
    command = [sys.executable, "-m", f"inkling_engine.{room}.cli", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def about() -> dict[str, Any]:
    """Where and with what this was measured."""
    import torch
    import transformers

    return {
        "device": cpu_model(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
    }


def cpu_model() -> str:
    """The processor's own name."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit checked out, marked if the tree has changes; None outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def render(report: dict[str, Any]) -> str:
    """The report as a table."""
    stated = ("device", "threads", "python", "torch", "transformers", "commit", "engine")
    lines = [f"{name:14} {report[name]}" for name in stated]
    lines.append(f"{'same tokens':14} {'yes' if report['same_tokens'] else 'NO'}")
    lines.append(f"\n{'':22} {'transformers':>12} {'engine':>10} {'ratio':>7}")
    for size, row in report["decode_ms_per_step"].items():
        lines.append(_row(f"decode {size}, ms/step", row, ">= 4"))
    lines.append(_row("extend, tokens/s", report["extend_tokens_per_second"], ""))
    lines.append(f"\n{'inspect start':22} {report['inspect']:.3f} s (goal 0.3)")
    lines.append(f"{'dry run, small, tp 8':22} {report['dry_run']:.3f} s (goal 3)")
    lines.append(f"{'load':22} {report['load']:.3f} s")
    lines += [f"  {phase:20} {value:.3f} s" for phase, value in report["load_phases"].items()]
    return "\n".join(lines)


def _row(name: str, values: dict[str, float], goal: str) -> str:
    wanted = f" (goal {goal})" if goal else ""
    numbers = f"{values['transformers']:12.3f} {values['engine']:10.3f} {values['ratio']:7.2f}"
    return f"{name:22} {numbers}{wanted}"


if __name__ == "__main__":
    sys.exit(main())
