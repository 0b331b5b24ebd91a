"""Sizes of the code against the project's budgets, as one table.

A broken hard cap (lines of a file, lines of a function) fails; goals (medians, test lines, the
decode step, the option count) are shown with `over` where they are missed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("artifacts", "compile", "kernels", "runtime")
CODE = (".py", ".h", ".cpp")
FILE_CAP, TEST_CAP, FUNCTION_CAP, TRITON_CAP = 400, 500, 50, 120
FILE_MEDIAN, FUNCTION_MEDIAN, OPTION_GOAL, DECODE_GOAL = 120, 8, 20, 700
DECODE_STEP = ("engine.py", "scheduler.py", "metadata.py", "graphs.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(folder: str) -> list[Path]:
    """Code files under `folder`; the sub-folders of `artifacts` are built engines, not code."""
    pattern = "*" if folder == "artifacts" else "**/*"
    return sorted(path for path in (ROOT / folder).glob(pattern) if path.suffix in CODE)


def lines(path: Path) -> int:
    """Lines of a file."""
    return path.read_text().count("\n")


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, lines and cap of each function of a Python file."""
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            triton = any("jit" in ast.dump(decorator) for decorator in node.decorator_list)
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            yield (
                f"{path.relative_to(ROOT)}:{node.lineno} {node.name}",
                size,
                (TRITON_CAP if triton else FUNCTION_CAP),
            )


def option_count() -> int:
    """Options of `compile-engine` besides --help."""
    command = import_module("inkling_engine.compile.cli").command
    return sum(parameter.param_type_name == "option" for parameter in command.params)


def broken_caps(code: list[Path], tests: list[Path]) -> list[str]:
    """One line for each file or function over its hard cap."""
    sized = [(path, lines(path), FILE_CAP) for path in code]
    sized += [(path, lines(path), TEST_CAP) for path in tests]
    broken = [f"{p.relative_to(ROOT)}: {n} lines, cap {cap}" for p, n, cap in sized if n > cap]
    for path in code + tests:
        broken += [f"{name}: {n} lines, cap {cap}" for name, n, cap in functions(path) if n > cap]
    return broken


def rows(code: list[Path], tests: list[Path]) -> Iterator[tuple[str, float, str, bool]]:
    """Each measure with its budget and whether it is kept."""
    python = [path for path in code if path.suffix == ".py" and path.name != "__init__.py"]
    file_median = median(map(lines, python))
    yield "file median, lines", file_median, f"<= {FILE_MEDIAN}", file_median <= FILE_MEDIAN
    longest = max(map(lines, code))
    yield "longest file, lines", longest, f"<= {FILE_CAP}", longest <= FILE_CAP
    measured = [(size, cap) for path in python for _, size, cap in functions(path)]
    sizes = [size for size, cap in measured if cap == FUNCTION_CAP]
    kernels = [size for size, cap in measured if cap == TRITON_CAP]
    function_median = median(sizes)
    goal = f"<= {FUNCTION_MEDIAN}"
    yield "function median, lines", function_median, goal, function_median <= FUNCTION_MEDIAN
    yield "longest function, lines", max(sizes), f"<= {FUNCTION_CAP}", max(sizes) <= FUNCTION_CAP
    longest = max(kernels, default=0)
    yield "longest Triton kernel, lines", longest, f"<= {TRITON_CAP}", longest <= TRITON_CAP
    code_lines, test_lines = sum(map(lines, code)), sum(map(lines, tests))
    yield "code lines", code_lines, "", True
    yield "test lines", test_lines, ">= code", test_lines >= code_lines
    step = [path for name in DECODE_STEP if (path := ROOT / "runtime" / name).exists()]
    total = sum(map(lines, step))
    yield "decode step, lines", total, f"<= {DECODE_GOAL}", total <= DECODE_GOAL
    options = option_count()
    yield "compile-engine options", options, f"<= {OPTION_GOAL}", options <= OPTION_GOAL


def main() -> int:
    """Print the table; 1 if a hard cap is broken."""
    code = [path for room in ROOMS for path in sources(room)]
    tests = sources("tests")
    for name, value, goal, kept in rows(code, tests):
        print(f"{name:26} {value:8g}  {goal:8} {'' if kept else 'over'}".rstrip())
    broken = broken_caps(code, tests)
    for line in broken:
        print(f"BROKEN {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
