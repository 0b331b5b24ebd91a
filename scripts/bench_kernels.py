"""Every op at the shapes of one tensor-parallel rank of a model: time, floor, fraction, peers.

Each case is checked against the op's reference first, on random inputs. Sides of a case (ours, a
peer where one exists) are captured graphs that take turns; what is stated are medians of one
call. The floor is the time of the bytes that must move, or of the operations if that is longer,
at the copy bandwidth and product rate measured in the same run. `--jobs` compiles all kernels in
parallel processes first. `--peer` names a folder whose peer.py offers other kernels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parent))

if TYPE_CHECKING:
    from bench.timing import Ceilings
    from bench.work import Case, Target

ROWS = (1, 8, 32, 64, 128, 512, 2048, 4096)


def main() -> int:
    """Run the cases asked for; 1 if one of them fails."""
    options = parse()
    from inkling_engine.kernels import _op

    _op.target_cuda()
    import torch
    from bench.peer import load_peer
    from bench.timing import Ceilings, about, limit_copies, measured_ceilings
    from bench.work import Target

    peer = load_peer(options.peer) if options.peer else None
    target = Target(options.model, options.tp, "cuda", peer, options.own_only)
    cases = [case for case in all_cases(target, options.rows) if wanted(case, options)]
    if options.share:
        part, parts = options.share
        limit_copies(1)
        return compile_cases(cases[part::parts])
    if options.jobs > 1:
        compile_in_parallel(options.jobs)
    torch.manual_seed(0)
    ceilings = Ceilings() if options.stated_ceilings else measured_ceilings()
    print(
        f"copy {ceilings.bandwidth / 1e12:.2f} TB/s, product {ceilings.arithmetic / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    report = {**about(), "model": options.model, "tp": options.tp, "ceilings": asdict(ceilings)}
    records = [run(case, ceilings, options.blocks) for case in cases]
    if peer is not None:
        report["peer"] = peer.name()
        print(f"peer: {report['peer']}")
    if options.json:
        text = json.dumps({**report, "cases": records}, indent=1)
        Path(options.json).write_text(text + "\n")
    failed = [record for record in records if "error" in record]
    print(f"{len(records)} cases, {len(failed)} failed")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=names, default=(), help="ops, as op or op:case; default all")
    parser.add_argument("--rows", type=numbers, default=ROWS, help="rows or tokens of a step")
    parser.add_argument("--contexts", type=numbers, default=(), help="contexts of attention")
    parser.add_argument("--model", default="inkling-small", help="a preset")
    parser.add_argument("--tp", type=int, default=8, help="ranks that share the model")
    parser.add_argument("--peer", type=Path, help="folder with a peer.py")
    parser.add_argument("--own-only", action="store_true", help="no peer that torch has")
    parser.add_argument("--stated-ceilings", action="store_true", help="4.3 TB/s, 790 TFLOP/s")
    parser.add_argument("--blocks", type=int, default=9, help="times that the sides take turns")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile first")
    parser.add_argument("--json", help="file for all numbers")
    parser.add_argument("--share", type=numbers, default=(), help=argparse.SUPPRESS)
    return parser.parse_args()


def names(text: str) -> tuple[str, ...]:
    """A list of names."""
    return tuple(text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """A list of whole numbers."""
    return tuple(map(int, text.split(",")))


def all_cases(target: Target, rows: Sequence[int]) -> Iterator[Case]:
    """Every case at every number of rows, op by op."""
    from bench import attention_ops, draft_ops, expert_ops, rank_ops, token_ops

    for module in (expert_ops, attention_ops, token_ops, rank_ops, draft_ops):
        listed = [case for count in rows for case in module.cases(target, count)]
        yield from sorted(listed, key=lambda case: (case.op, case.name))


def wanted(case: Case, options: argparse.Namespace) -> bool:
    """Whether the options ask for `case`."""
    named = not options.ops or {case.op, f"{case.op}:{case.name}"} & set(options.ops)
    return bool(named) and (not options.contexts or case.context in (0, *options.contexts))


def compile_in_parallel(jobs: int) -> None:
    """Run this command in `jobs` processes that call every case once: kernels are cached then."""
    arguments = [sys.executable, __file__, *sys.argv[1:], "--jobs", "1", "--share"]
    started = [subprocess.Popen([*arguments, f"{part},{jobs}"]) for part in range(jobs)]
    for process in started:
        process.wait()


def compile_cases(cases: Sequence[Case]) -> int:
    """Call the first of each case's calls once; what fails is reported by the run that times it."""
    import torch

    for case in cases:
        try:
            work = case.make()
            with torch.no_grad():
                for calls in work.sides.values():
                    calls[0]()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  (one broken case may not hide the others)
            print(f"{label(case)}: {one_line(error)}", file=sys.stderr)
    return 0


def run(case: Case, ceilings: Ceilings, blocks: int) -> dict[str, Any]:
    """Check and time one case, print its line, and return its record."""
    import torch
    from bench.timing import measure

    record: dict[str, Any] = {
        "op": case.op,
        "case": case.name,
        "rows": case.rows,
        "context": case.context,
    }
    torch.cuda.empty_cache()
    try:
        work = case.make()
        with torch.no_grad():
            work.check()
        times = measure(work.sides, blocks)
    except Exception as error:  # noqa: BLE001  (one broken case may not hide the others)
        traceback.print_exc(limit=-3)
        print(f"{label(case)} FAILED: {one_line(error)}", flush=True)
        return {**record, "error": one_line(error)}
    floor = ceilings.floor_us(work.moved, work.flops)
    record |= {"bytes": work.moved, "flops": work.flops, "floor_us": floor, **work.notes}
    record["us"] = {name: asdict(timing) for name, timing in times.items()}
    shown = ", ".join(
        f"{name} {timing.median:.1f} us ({floor / timing.median:.2f})"
        for name, timing in times.items()
    )
    notes = "".join(f", {name} {value:g}" for name, value in work.notes.items())
    print(f"{label(case)} floor {floor:7.2f}: {shown}{notes}", flush=True)
    return record


def label(case: Case) -> str:
    """The case in a few words."""
    context = f" context {case.context}" if case.context else ""
    return f"{f'{case.op} {case.name}'.strip() + context:38} rows {case.rows:4}"


def one_line(error: Exception) -> str:
    """An error's kind and text."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    sys.exit(main())
