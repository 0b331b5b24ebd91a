"""Our decode step beside transformers' Inkling: four layers, the same random weights, one run.

First both must give the same logits in fp32 at one rank's widths. Then bf16 decode steps are timed
by the wall clock, sides taking turns: transformers eager, transformers under `torch.compile` with
reduce-overhead (static cache, else dynamic; what does not run is said), and our step as one
captured graph. Layers are two dense ones and two of experts, the last with full attention.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parent))

if TYPE_CHECKING:
    from torch import Tensor

    from inkling_engine.artifacts.spec import ModelShape

CHECK_PROMPT, CHECK_STEPS, CHECK_TOLERANCE = 96, 3, 1e-3
WARM_STEPS, OUR_STEPS = 4, 64


@dataclass
class Side:
    """A way to decode: `step` is repeated `count` times after `reset`."""

    step: Callable[[], Any]
    count: int
    reset: Callable[[], None] = lambda: None


def main() -> int:
    """Check, measure, print; 1 if the two sides compute different logits."""
    options = parse()
    from inkling_engine.kernels import _op

    _op.target_cuda()
    import torch
    import transformers
    from bench.timing import about
    from bench.work import Target

    logging.getLogger("transformers").setLevel(logging.ERROR)
    target = Target(options.model, options.tp, "cuda")
    shapes = {"rank": target.shape, "whole": target.whole}
    report: dict[str, Any] = {**about(), "transformers": transformers.__version__, "cases": []}
    if not options.no_check:
        report["fp32_difference"] = check(shapes["rank"])
        print(f"fp32 logits differ by {report['fp32_difference']:.2e} of the largest", flush=True)
    for width in options.widths:
        for batch in options.batches if width == "whole" else (1,):
            torch.manual_seed(0)
            record = measure(shapes[width], batch, options)
            report["cases"].append({"widths": width, "batch": batch, **record})
            print(f"{width} widths, batch {batch}: {render(record)}", flush=True)
            torch.compiler.reset()
            torch.cuda.empty_cache()
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report.get("fp32_difference", 0.0) > CHECK_TOLERANCE else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="inkling-small", help="a preset")
    parser.add_argument("--tp", type=int, default=8, help="ranks; widths `rank` are one rank's")
    parser.add_argument("--widths", type=lambda text: text.split(","), default=["rank", "whole"])
    parser.add_argument("--batches", type=numbers, default=(1, 8, 32), help="of whole widths")
    parser.add_argument("--context", type=int, default=1024, help="tokens before the first step")
    parser.add_argument("--blocks", type=int, default=5, help="times that the sides take turns")
    parser.add_argument("--steps", type=int, default=10, help="of transformers in a block")
    parser.add_argument("--compile-limit", type=int, default=120, help="seconds for one attempt")
    parser.add_argument("--no-compile", action="store_true", help="transformers eager only")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison in fp32")
    parser.add_argument("--json", help="file for all numbers")
    return parser.parse_args()


def numbers(text: str) -> tuple[int, ...]:
    """A list of whole numbers."""
    return tuple(map(int, text.split(",")))


def check(whole: ModelShape, device: str = "cuda") -> float:
    """Largest difference of fp32 logits over the largest logit, in a prompt and some steps."""
    import torch
    from bench.pair import OurStep, Transformers, engine_weights, four_layers, make_model

    torch.backends.cudnn.allow_tf32 = False  # its convolutions
    shape, dtype = four_layers(whole), torch.float32
    model = make_model(shape, dtype, device)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no fp32 on a GPU
    theirs = Transformers(model)
    weights = engine_weights(model, shape, dtype)
    ours = OurStep(shape, weights, 1, CHECK_PROMPT, dtype, device)
    prompt = random_prompts(shape, 1, CHECK_PROMPT, device)
    differences = [difference(ours.prefill(prompt.tolist()), theirs.prefill(prompt))]
    call = ours.make_call()
    for _ in range(CHECK_STEPS):
        call()
        differences.append(difference(ours.logits, theirs.step()))
    torch.backends.cudnn.allow_tf32 = True
    return max(differences)


def difference(found: Tensor, wanted: Tensor) -> float:
    """Largest difference of logits over the largest logit."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def random_prompts(shape: ModelShape, batch: int, length: int, device: str) -> Tensor:
    """Token ids [batch, length]."""
    import torch

    generator = torch.Generator().manual_seed(batch)
    return torch.randint(shape.vocab, (batch, length), generator=generator).to(device)


def measure(whole: ModelShape, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a decode step of every side, and how many times faster ours is."""
    import torch
    from bench.pair import OurStep, Transformers, engine_weights, four_layers, make_model

    shape, dtype = four_layers(whole), torch.bfloat16
    model = make_model(shape, dtype, "cuda")
    prompts = random_prompts(shape, batch, options.context, "cuda")
    weights = engine_weights(model, shape, dtype)
    ours = OurStep(shape, weights, batch, options.context, dtype, "cuda")
    eager = Transformers(model)
    record: dict[str, Any] = {
        "bf16_difference": difference(ours.prefill(prompts.tolist()), eager.prefill(prompts))
    }
    replay, restore = ours.make_graph()
    replay()
    first = ours.logits.clone()
    sides = {"ours": Side(replay, OUR_STEPS, restore), "eager": Side(eager.step, options.steps)}
    if not options.no_compile:
        compiled, tried = compiled_side(model, prompts, options)
        record["compile"] = tried
        if compiled is not None:
            sides["compiled"] = compiled
    record["ms"] = by_turns(sides, options.blocks)
    restore()
    replay()
    assert torch.equal(ours.logits, first), "our step no longer gives what it gave at first"
    ms = record["ms"]
    record["ratio"] = {name: ms[name] / ms["ours"] for name in ms if name != "ours"}
    return record


def compiled_side(
    model: Any, prompts: Tensor, options: argparse.Namespace
) -> tuple[Side | None, dict[str, str]]:
    """Transformers under torch.compile with the first kind of cache that runs, and what was tried."""
    import torch
    from bench.pair import Transformers
    from transformers import DynamicCache, StaticCache

    config = model.config.get_text_config()
    steps = WARM_STEPS + (options.blocks + 1) * options.steps
    caches: dict[str, Callable[[], Any]] = {
        "static": lambda: StaticCache(config=config, max_cache_len=options.context + steps + 16),
        "dynamic": lambda: DynamicCache(config=model.config),
    }
    tried: dict[str, str] = {}
    for kind, make_cache in caches.items():
        side = Transformers(model)
        try:
            with time_limit(options.compile_limit):
                side.call = torch.compile(model, mode="reduce-overhead")
                side.prefill(prompts, make_cache())

                def step(side: Transformers = side) -> None:
                    torch.compiler.cudagraph_mark_step_begin()
                    side.step()

                for _ in range(WARM_STEPS):
                    step()
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  (whatever does not run is part of the result)
            tried[kind] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            torch.compiler.reset()
            continue
        tried[kind] = "runs"
        return Side(step, options.steps), tried
    return None, tried


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def by_turns(sides: dict[str, Side], blocks: int) -> dict[str, float]:
    """Median milliseconds of a step of each side; the first block only warms up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(blocks + 1):
        for name, side in sides.items():
            times[name].append(step_ms(side))
    return {name: median(found[1:]) for name, found in times.items()}


def step_ms(side: Side) -> float:
    """Wall milliseconds of one of the side's steps, the device idle before and after."""
    import torch

    side.reset()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(side.count):
        side.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / side.count * 1e3


def render(record: dict[str, Any]) -> str:
    """A record in one line."""
    times = ", ".join(f"{name} {value:.3f} ms" for name, value in record["ms"].items())
    ratios = ", ".join(f"{value:.1f}x of {name}" for name, value in record["ratio"].items())
    tried = "; ".join(f"{kind} cache: {what}" for kind, what in record.get("compile", {}).items())
    return f"{times}; ours is {ratios}; bf16 logits {record['bf16_difference']:.2e}; {tried}"


if __name__ == "__main__":
    sys.exit(main())
