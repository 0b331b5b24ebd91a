"""Golden inputs: recorded from the references, whole and chunked alike, and read back by `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import tiny_config
from support.oracle import TINY
from torch import Tensor

from inkling_engine.artifacts.golden import Golden
from inkling_engine.artifacts.layout import GOLDEN_FILE, weights_file
from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.artifacts.store import open_manifest
from inkling_engine.compile import golden
from inkling_engine.compile.driver import Chunk, Machine
from inkling_engine.compile.export import program_inputs
from inkling_engine.compile.golden import MARGIN, NEW_TOKENS, record
from inkling_engine.compile.models.inkling.shape import from_config
from inkling_engine.compile.options import BuildOptions, make_spec
from inkling_engine.compile.tokenizer import TEXTS
from inkling_engine.compile.weights import step_weights
from inkling_engine.kernels.state import random_weight
from inkling_engine.runtime.verify import read_golden

SHAPE = from_config(tiny_config(), {})


def spec_of(**given: Any) -> EngineSpec:
    sizes: dict[str, Any] = {"page_size": 4, "snapshot_grid": 8, "decode_buckets": "1"}
    sizes |= {"extend_buckets": "16x1"} | given
    return make_spec(BuildOptions(model="toy", **sizes), "toy", SHAPE, "cpu")


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return {entry.name: random_weight(entry, seed=3) for entry in step_weights(spec_of())}


@pytest.fixture(scope="module")
def weight_file(weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "rank0.safetensors"
    save_file(weights, path)
    return path


def recorded(spec: EngineSpec, weights: Path | None, tokenizer: Path | None = None) -> Golden:
    return msgspec.json.decode(record(spec, weights, tokenizer), type=Golden)


def test_cases_are_greedy_continuations(weights: dict[str, Tensor], weight_file: Path) -> None:
    """Each token is the best one of a whole forward over everything before it."""
    found = recorded(spec_of(), weight_file)
    assert [len(case.prompt) for case in found.cases] == [3, 40]
    assert found.cases[0].tokens
    for case in found.cases:
        assert len(case.tokens) == len(case.logprobs) <= NEW_TOKENS
        for i, (token, logprob) in enumerate(zip(case.tokens, case.logprobs, strict=True)):
            ids = [*case.prompt, *case.tokens[:i]]
            spec = spec_of(extend_buckets=f"{len(ids)}x1")
            machine, bucket = Machine(spec, weights), Bucket(kind="extend", rows=1, tokens=len(ids))
            inputs = program_inputs(spec, bucket, ())
            logits = machine.eager(bucket, machine.rows(inputs, [Chunk(1, 0, ids, admit=True)]))[0]
            assert int(logits.argmax()) == token
            assert abs(float(logits.log_softmax(0)[token]) - logprob) < 1e-4


def test_the_buckets_do_not_matter(weight_file: Path) -> None:
    """40 tokens go through a ring of window pages in chunks of 16, of 40, or one by one."""
    cases = [
        recorded(spec_of(extend_buckets=text), weight_file).cases
        for text in ("1x1", "16x1", "64x1")
    ]
    for other in cases[1:]:
        for case, same in zip(other, cases[0], strict=True):
            assert (case.prompt, case.tokens) == (same.prompt, same.tokens)
            close = torch.tensor(case.logprobs) - torch.tensor(same.logprobs)
            assert case.tokens == [] or float(close.abs().max()) < 1e-4


def test_a_close_decision_ends_a_case(weight_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = recorded(spec_of(), weight_file)
    monkeypatch.setitem(MARGIN, "float32", 1e9)
    assert [case.tokens for case in recorded(spec_of(), weight_file).cases] == [[], []]
    monkeypatch.setitem(MARGIN, "float32", 0.0)
    full = recorded(spec_of(), weight_file)
    assert all(len(case.tokens) == NEW_TOKENS for case in full.cases)
    for case, longest in zip(whole.cases, full.cases, strict=True):
        assert longest.tokens[: len(case.tokens)] == case.tokens


def test_a_short_context_has_short_cases(weight_file: Path) -> None:
    found = recorded(spec_of(max_context=16), weight_file)
    assert [len(case.prompt) for case in found.cases] == [3, 8]
    assert all(len(case.prompt) + len(case.tokens) <= 16 for case in found.cases)


def test_prompts_are_text_where_a_tokenizer_is(weight_file: Path) -> None:
    prompts = golden._prompts(spec_of(), TINY / "tokenizer.json")
    assert len(prompts) == len(TEXTS)
    assert all(prompts) and prompts != golden._prompts(spec_of(), None)
    assert golden._prompts(spec_of(), Path("/nowhere")) == golden._prompts(spec_of(), None)


def test_without_weights_there_are_no_cases() -> None:
    assert recorded(spec_of(), None).cases == []


def test_the_runtime_reads_what_the_build_wrote(engine: Path) -> None:
    spec = open_manifest(engine).spec
    written = recorded(spec, engine / weights_file(0))
    read = read_golden(engine)
    assert msgspec.to_builtins(read) == msgspec.to_builtins(written)
    assert (engine / GOLDEN_FILE).stat().st_size < 10_000
