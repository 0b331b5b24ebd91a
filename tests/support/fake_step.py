"""A step without a model: an exact counting machine over real pools, and its oracle.

The step follows the contract (admission, page updates, rows, commit) and keeps token ids in the KV
pages and conv windows. A row's next token is a hash of everything that it reads there, so a page,
slot or window that belongs to another request changes the output. `run_oracle` computes the same
from plain lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from safetensors.torch import save
from support.fake_spec import EOS, GRID, PAGE, REAL_VOCAB, TINY, WINDOW, build_manifest
from torch import Tensor

from inkling_engine.artifacts import layout
from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.artifacts.store import seal, stage
from inkling_engine.kernels import table
from inkling_engine.runtime.binding import assemble
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.replay import Loop
from inkling_engine.runtime.sampling import SamplingParams, choice_seed, stop_ids
from inkling_engine.runtime.tokens import Tokenizer
from inkling_engine.runtime.weights import random_weights

NON_FINITE_TOKEN = 13  # a prompt that holds it makes the fake's logits non-finite


def _mix(
    history: Sequence[float], window: Sequence[float], conv: Sequence[float], seed: int
) -> int:
    value = seed & 0xFFFF
    for part in (history, window, conv):
        assert not any(math.isnan(token) for token in part), "a poisoned place was read"
        for token in part:
            value = (value * 31 + int(token) + 7) % 1_000_003
    return value


def _at(ring: Tensor, position: int) -> float:
    """What a ring [RING] of conv inputs holds of `position`; 0 before the first."""
    return float(ring[position % len(ring)]) if position >= 0 else 0.0


def _keep(ring: Tensor, length: int, window: Sequence[float]) -> None:
    """Write the three inputs before `length` to a ring, but for those before position 0."""
    for position, value in zip(range(length - 3, length), window, strict=True):
        if position >= 0:
            ring[position % len(ring)] = value


class FakeStep:
    """Runs any bucket in plain Python over the bound inputs; counts its runs by program."""

    def __init__(self, manifest: Manifest, inputs: Mapping[str, list[Tensor]]) -> None:
        self.spec = manifest.spec
        self.bound = {
            program.name: dict(zip(program.inputs, inputs[program.name], strict=True))
            for program in manifest.programs
        }
        self.runs: list[str] = []

    def run(self, name: str) -> None:
        """One step: admissions, pages, rows, results; one-shot lines are cleared."""
        tensors = self.bound[name]
        rows = {key[5:]: tensor for key, tensor in tensors.items() if key.startswith("rows.")}
        pools = {key[6:]: tensor for key, tensor in tensors.items() if key.startswith("pools.")}
        line = len(self.runs) % self.spec.pools.results
        self.runs.append(name)
        self._admit(pools, rows)
        for kind, slot, index, page in rows["page_updates"].tolist():
            if slot:
                name = "full_table" if kind == table.FULL_TABLE else "window_table"
                assert page > 0, "page 0 is never handed out"
                pools[name][slot, index] = page
        rows["page_updates"][:, 1] = 0
        for slot, *destinations in rows["snapshot_updates"].tolist():
            if slot:
                pools["snapshot_slots"][slot] = pools["snapshot_slots"].new_tensor(destinations)
        rows["snapshot_updates"][:, 0] = 0
        self._check_sources(rows, pools)
        pools["results_int"][line] = 0
        ids, start = rows["token_ids"].tolist(), 0
        for row, slot in enumerate(rows["row_slots"].tolist()):
            count = int(rows["row_counts"][row])
            if slot and not pools["request_state"][slot, table.FINISH]:
                tokens = ids[start : start + count]
                source = int(rows["row_sources"][row]) or slot
                flags = int(rows["row_flags"][row])
                self._row(pools, line, row, slot, source, tokens, flags)
            start += count

    def _admit(self, pools: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
        for ints, floats in zip(rows["admit_ints"].tolist(), rows["admit_floats"], strict=True):
            if slot := ints[table.ADMIT_SLOT]:
                state = pools["request_state"][slot].zero_()
                state[table.LENGTH] = ints[table.ADMIT_LENGTH]
                state[table.GENERATED] = ints[table.ADMIT_GENERATED]
                line = ints[table.ADMIT_HEADER :]
                pools["request_ints"][slot] = pools["request_ints"].new_tensor(line)
                pools["request_floats"][slot] = floats
                pools["snapshot_slots"][slot] = 0
        rows["admit_ints"][:, table.ADMIT_SLOT] = 0

    def _row(
        self,
        pools: Mapping[str, Tensor],
        line: int,
        row: int,
        slot: int,
        source: int,
        tokens: list[int],
        flags: int,
    ) -> None:
        state = pools["request_state"][slot]
        length = int(state[table.LENGTH])
        if flags & table.FROM_TABLE:
            assert len(tokens) == 1
            tokens = [int(state[table.LAST_TOKEN])]
        full, ring = pools["full_table"][slot].tolist(), pools["window_table"][slot].tolist()
        kv_full, kv_window = (
            pools["kv_full"][0, :, 0, 0, :, 0],
            pools["kv_window"][0, :, 0, 0, :, 0],
        )
        window: list[float] = []
        for at, token in enumerate(tokens, start=length):
            kv_full[full[at // PAGE], at % PAGE] = token
            kv_window[ring[at // PAGE % len(ring)], at % PAGE] = token
        for at in range(length, length + len(tokens)):  # each query reads its own window
            seen = range(max(0, at - WINDOW + 1), at + 1)
            window = [float(kv_window[ring[i // PAGE % len(ring)], i % PAGE]) for i in seen]
            alike = [float(kv_full[full[i // PAGE], i % PAGE]) for i in seen]
            assert window == alike, "a window page was freed or overwritten"
        rings = pools["conv_attn"][0, :, :, 0]
        conv = [*(_at(rings[source], p) for p in range(length - 3, length)), *map(float, tokens)]
        self._scatter(pools, slot, length, conv)
        _keep(rings[slot], length + len(tokens), conv := conv[-3:])
        state[table.LENGTH] = length + len(tokens)
        token = finish = 0
        if flags & table.SAMPLE:
            history = [
                float(kv_full[full[i // PAGE], i % PAGE]) for i in range(length + len(tokens))
            ]
            ints = pools["request_ints"][slot].tolist()
            seed = ints[table.SEED_LOW] if float(pools["request_floats"][slot, 0]) else 0
            value = _mix(history, window, conv, seed)
            token, finish = self._commit(state, ints, history, value)
            for i in range(self.spec.limits.top_logprobs):
                at = table.RESULT_HEADER + 1 + i
                pools["results_int"][line, row, at] = (token + i) % REAL_VOCAB
                pools["results_float"][line, row, 1 + i] = logprob(value) - i
            pools["results_float"][line, row, 0] = logprob(value)
        result = [slot, flags & table.SAMPLE, finish, length + len(tokens), 0, token]
        pools["results_int"][line, row, : table.RESULT_HEADER + 1] = state.new_tensor(result)

    def _check_sources(self, rows: Mapping[str, Tensor], pools: Mapping[str, Tensor]) -> None:
        """A row's source is its own slot or one that no row of the step writes."""
        slots = [slot for slot in rows["row_slots"].tolist() if slot]
        written = {*slots, *(n for slot in slots for n in pools["snapshot_slots"][slot].tolist())}
        sources = rows["row_sources"].tolist()[: len(slots)]
        for slot, source in zip(slots, sources, strict=True):
            assert source in (0, slot) or source not in written, "a source is written in the step"
        assert not {n for n in written if n > self.spec.max_running} & {*slots}

    def _scatter(
        self, pools: Mapping[str, Tensor], slot: int, length: int, conv: list[float]
    ) -> None:
        """Take the destinations of the boundaries behind `length`; `conv` is the window there and
        the row's tokens."""
        end, waiting = length + len(conv) - 3, pools["snapshot_slots"][slot].tolist()
        for boundary in range((length // GRID + 1) * GRID, end + 1, GRID):
            destination = waiting.pop(0) if waiting else 0
            if destination:
                window = conv[boundary - length : boundary - length + 3]
                _keep(pools["conv_attn"][0, destination, :, 0], boundary, window)
                pools["snapshot_lengths"][destination] = boundary
        width = pools["snapshot_slots"].shape[1]
        waiting += [0] * (width - len(waiting))
        pools["snapshot_slots"][slot] = pools["snapshot_slots"].new_tensor(waiting)

    def _commit(
        self, state: Tensor, ints: list[int], history: list[float], value: int
    ) -> tuple[int, int]:
        prompt = history[: ints[table.PROMPT_LENGTH]]
        if NON_FINITE_TOKEN in prompt:
            state[table.FINISH] = table.Finish.NON_FINITE
            return 0, table.Finish.NON_FINITE
        stops = ints[table.INT_HEADER : table.INT_HEADER + self.spec.limits.stop_ids]
        generated = int(state[table.GENERATED])
        token = next_token(value, stops if generated < ints[table.MIN_TOKENS] else ())
        finish = table.Finish.NONE
        if token in stops:
            finish = table.Finish.STOP
        elif generated + 1 >= ints[table.MAX_TOKENS]:
            finish = table.Finish.LENGTH
        state[table.LAST_TOKEN], state[table.GENERATED] = token, generated + 1
        state[table.FINISH] = finish
        return token, finish


def logprob(value: int) -> float:
    """The fake's log-probability of its choice, exact in float32."""
    return -(value % 64) / 8


def next_token(value: int, masked: Sequence[int]) -> int:
    """The fake's choice: the end token once in a while, else any; masked ones are passed over."""
    token = EOS if value % 23 == 0 else value % REAL_VOCAB
    while token in masked:
        token = (token + 1) % REAL_VOCAB
    return token


def run_oracle(
    spec: EngineSpec, prompt: Sequence[int], params: SamplingParams, index: int = 0, seed: int = 0
) -> tuple[list[int], str, list[float]]:
    """Tokens, finish reason and logprobs of one choice, computed alone from lists."""
    stops, history, values = stop_ids(params, spec), list(map(float, prompt)), []
    tokens: list[int] = []
    low = choice_seed(seed if params.seed is None else params.seed, index) & 0xFFFF
    while True:
        conv = ([0.0] * 3 + history)[-3:]
        value = _mix(history, history[-WINDOW:], conv, 0 if params.is_greedy else low)
        values.append(logprob(value))
        tokens.append(next_token(value, stops if len(tokens) < params.min_tokens else ()))
        history.append(float(tokens[-1]))
        if tokens[-1] in stops:
            return tokens, "stop", values
        if len(tokens) == (params.max_tokens or spec.max_context - len(prompt)):
            return tokens, "length", values


def open_engine(
    spec: EngineSpec,
    tokenizer: Tokenizer | None = None,
    *,
    steps: int = 1,
    overlap: bool = False,
    prefix_cache: bool = True,
) -> Engine:
    """An engine over the fake step, whose decode replays take `steps` steps; `overlap` lets it
    begin the next one before it reads the last one's results."""
    manifest = build_manifest(spec)

    def overlapping(manifest: Manifest, inputs: Mapping[str, list[Tensor]]) -> Loop:
        loop = Loop(FakeStep(manifest, inputs))
        loop.overlaps = overlap
        return loop

    weights = random_weights(manifest, 0)
    loaded = assemble(manifest, weights, overlapping, tokenizer, steps=steps)
    return Engine(loaded, prefix_cache=prefix_cache)


def seal_engine(folder: Path, spec: EngineSpec, *, weights: bool = True) -> Manifest:
    """A sealed folder of the fake engine: sound in every byte, but its programs are no programs."""
    manifest = build_manifest(spec, weights=weights)
    staging = stage(folder)
    files = {program.file: b"no program" for program in manifest.programs}
    files[f"{layout.TOKENIZER}/tokenizer.json"] = TINY.read_bytes()
    files[layout.GOLDEN_FILE] = msgspec.json.encode({"cases": golden_cases(spec), "tolerance": 0.0})
    if weights:
        files[layout.weights_file(0)] = save(random_weights(manifest, 0))
    for name, data in files.items():
        (staging / name).parent.mkdir(exist_ok=True)
        (staging / name).write_bytes(data)
    return seal(staging, manifest, folder)


def golden_cases(spec: EngineSpec) -> list[dict[str, object]]:
    """What the fake engine answers to two prompts."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    cases: list[dict[str, object]] = []
    for prompt in ([30, 31], [40] * 20):
        tokens, _, logprobs = run_oracle(spec, prompt, params)
        cases.append({"prompt": prompt, "tokens": tokens, "logprobs": logprobs})
    return cases
