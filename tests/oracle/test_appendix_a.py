"""The specification's deterministic model: every golden value of Appendix A, through whole steps.

Each test runs the step twice, with the ops' references and with the native kernels. The prompt is
fed with padded tokens and inert rows around it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.checkpoints import write_appendix_a
from support.oracle import Oracle
from support.stepper import SLOT, Call, Stepper, convert, recorded
from torch import Tensor

from inkling_engine.compile.driver import Machine
from inkling_engine.kernels._conv import window as last_inputs

TOLERANCE = 1e-5
IDS = [(7 * i * i + 3 * i + 1) % 150 for i in range(40)]
LAST = len(IDS) - 1
GREEDY = [113, 56, 143, 34, 20, 26, 33, 118, 127, 135, 86, 124]
HIDDEN = (
    (-1.340303, -1.343752, -1.133808, -2.048414),
    (-1.296997, -1.473685, -1.512530, -1.836153),
    (-1.114418, -1.642804, -1.602904, -1.716740),
    (-1.977960, -1.901898, -1.063864, -1.532886),
    (-2.068626, -1.906025, -1.590700, -1.876607),
    (-2.161761, -1.096441, -1.939859, -2.121975),
)
NORMS = (8.028479, 8.238990, 8.742960, 10.087185, 11.148074, 11.199573)
FIRST_SPARSE, SHARED = 2, (8, 9)
ROUTED = {
    (2, LAST): {2: 1.797410, 6: 1.838825, 8: 1.042467, 9: 1.321298},
    (5, LAST): {3: 2.513856, 4: 2.037331, 8: 2.182835, 9: 2.265978},
    (5, 0): {5: 2.393429, 4: 1.925168, 8: 2.288165, 9: 2.393238},
}
WINDOWS = {
    (0, "k"): (-0.941095, -0.698992, -0.291025),
    (0, "v"): (0.662604, -1.087218, -0.204141),
    (0, "attn"): (0.211620, 0.166113, 0.290123),
    (0, "mlp"): (-0.092687, -0.038863, -0.020969),
    (5, "k"): (0.212411, -0.112982, 1.148523),
    (5, "v"): (0.914715, 0.237189, -0.215612),
    (5, "attn"): (0.254596, 0.236554, 0.300803),
    (5, "mlp"): (0.149109, 0.392190, -0.045344),
}
CHUNKINGS = {
    "whole": [40],
    "ones": [1] * 40,
    "short": [1, 2, 1, 4, 1, 31],
    "window": [8, 8, 8, 8, 8],
    "pages": [7, 1, 9, 15, 8],
    "late": [37, 3],
}


class Run(NamedTuple):
    """One run over the 40 tokens: logits [40, 150], the boundary and router calls, and the state."""

    logits: Tensor
    boundaries: list[Call]
    routers: list[Call]
    stepper: Stepper


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The deterministic checkpoint."""
    return write_appendix_a(tmp_path_factory.mktemp("appendix") / "appendix-a")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    """The same checkpoint in transformers."""
    return Oracle(folder)


@pytest.fixture(scope="module")
def converted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """The converted weights, under a machine that no test steps."""
    return convert(folder, tmp_path_factory.mktemp("converted"))


@pytest.fixture(scope="module", params=["references", "native"])
def native(request: pytest.FixtureRequest, native_library: Path) -> bool:
    """Whether the native kernels run, or the references."""
    return bool(request.param == "native")


@pytest.fixture
def stepper(converted: Machine, native: bool) -> Stepper:
    """A fresh sequence."""
    return Stepper(Machine(converted.spec, converted.weights), native=native)


@pytest.fixture(scope="module")
def run(converted: Machine, native: bool) -> Run:
    """The 40 tokens in one chunk; tests only read it."""
    stepper = Stepper(Machine(converted.spec, converted.weights), native=native)
    with recorded("boundary", "router", "head") as calls:
        stepper.feed(IDS)
    hidden = calls["head"][0].arguments[0][: len(IDS)]
    return Run(stepper.logits(hidden), calls["boundary"], calls["router"], stepper)


def near(found: Tensor, expected: tuple[float, ...] | float, tolerance: float = TOLERANCE) -> bool:
    """Whether the leading elements of `found` are `expected`."""
    wanted = torch.tensor(expected)
    part = found if wanted.dim() == 0 else found[: len(wanted)]
    return torch.allclose(part, wanted, rtol=0, atol=tolerance)


def test_logits_are_the_golden_ones(run: Run) -> None:
    assert near(run.logits[0], (0.006093, 0.013012, -0.017927, 0.031222, -0.019614))
    assert near(run.logits[LAST], (-0.088625, -0.048743, -0.018526, -0.008571, 0.057838, -0.044918))
    best = run.logits[LAST].topk(3)
    assert best.indices.tolist() == [113, 124, 27]
    assert near(best.values, (0.113734, 0.093472, 0.089699))
    assert near(run.logits.double().abs().sum().float(), 173.538485, 1e-4)


def test_the_step_samples_after_the_last_row(run: Run) -> None:
    ints, floats = run.stepper.machine.results(3)
    assert ints[0, :6].tolist() == [SLOT, 1, 0, len(IDS), 0, GREEDY[0]]
    assert not ints[1:].any(), "inert rows are written as zeros"
    expected = run.logits[LAST].log_softmax(-1)[GREEDY[0]]
    assert near(floats[0, 0], float(expected))


def test_hidden_states_are_the_golden_ones(run: Run) -> None:
    first = run.boundaries[0]
    assert near(first.arguments[1][LAST], (-1.724706, -1.363074, -0.981014, -1.807290))
    assert near(first.arguments[0][LAST], (0.290123, 0.062267, -0.030722))
    assert near(first.result[0][LAST], (-1.301447, -1.273036, -0.991354))
    assert near(run.boundaries[1].arguments[0][LAST], (-0.020969, -0.055212, -0.103314))
    assert near(run.boundaries[1].result[0][0], (-0.924081, 0.117402, -0.881932))
    for layer, (expected, norm) in enumerate(zip(HIDDEN, NORMS, strict=True)):
        hidden = run.boundaries[2 * layer + 1].result[0][LAST]
        assert near(hidden, expected), f"layer {layer}"
        assert near(hidden.norm(), norm), f"layer {layer}"
    final = run.boundaries[-1].result[1][LAST]
    assert near(final, (-1.471791, -0.868865, -1.255760, -1.492071))


@pytest.mark.parametrize("place", ROUTED, ids=str)
def test_router_weights_are_the_golden_ones(run: Run, place: tuple[int, int]) -> None:
    layer, token = place
    experts, weights, _ = run.routers[layer - FIRST_SPARSE].result
    assert tuple(experts[token, 2:].tolist()) == SHARED
    found = dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True))
    assert found == pytest.approx(ROUTED[place], rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("stream", WINDOWS, ids=str)
def test_conv_windows_are_the_golden_ones(run: Run, stream: tuple[int, str]) -> None:
    assert near(window(run.stepper.machine, *stream), WINDOWS[stream])


def test_greedy_continuation_is_the_golden_one(stepper: Stepper) -> None:
    stepper.feed(IDS)
    tokens = [stepper.sampled]
    while len(tokens) < len(GREEDY):
        stepper.feed()
        tokens.append(stepper.sampled)
    assert tokens == GREEDY


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_any_chunking_agrees_with_transformers(
    stepper: Stepper, oracle: Oracle, chunking: str
) -> None:
    expected, done = oracle.logits(IDS), 0
    for count in CHUNKINGS[chunking]:
        logits = stepper.feed(IDS[done : done + count])
        done += count
        assert torch.allclose(logits, expected[done - 1], rtol=0, atol=1e-6), f"after {done}"
    for stream, golden in WINDOWS.items():
        assert near(window(stepper.machine, *stream), golden), f"{stream}"


def test_transformers_itself_is_the_appendix(oracle: Oracle) -> None:
    continuation = oracle.greedy(IDS, len(GREEDY))
    assert list(continuation.tokens) == GREEDY
    assert near(continuation.gaps.min(), 3e-4, 5e-5)


def window(machine: Machine, layer: int, stream: str) -> Tensor:
    """Channel 0 of one stream's three-input window [3] of the sequence, oldest first."""
    shape, pools = machine.spec.shape, machine.pools
    if stream in ("attn", "mlp"):
        return last_inputs(pools[f"conv_{stream}"][layer, SLOT], len(IDS))[:, 0]
    kind = "window" if shape.is_local(layer) else "full"
    width = shape.kind(layer).kv_heads * shape.kind(layer).head_dim
    channel = 0 if stream == "k" else width
    ring = pools[f"conv_kv_{kind}"][shape.index_in_kind(layer), SLOT]
    return last_inputs(ring, len(IDS))[:, channel]
