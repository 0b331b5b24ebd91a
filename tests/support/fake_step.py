"""A step without a model: an exact counting machine over real pools, and its oracle.

The step follows the contract (admission, page updates, rows, commit) and keeps token ids in the KV
pages and conv windows. A row's next token is a hash of everything that it reads there, so a page,
slot or window that belongs to another request changes the output. `run_oracle` computes the same
from plain lists.

With drafting it guesses well three times of four; the keys of its drafts lie K positions behind
their tokens, are written anew as far as the contract says, and all read back.
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

Tensors = Mapping[str, Tensor]
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
        self._drafts = {program.name: program.bucket.drafts for program in manifest.programs}
        self.runs: list[str] = []

    def run(self, name: str) -> None:
        """One step: admissions, pages, rows, results; one-shot lines are cleared."""
        program, tensors = name, self.bound[name]
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
                self._row(pools, (line, row), (slot, source), tokens, flags, self._drafts[program])
            start += count

    def _admit(self, pools: Tensors, rows: Tensors) -> None:
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
        pools: Tensors,
        place: tuple[int, int],
        slots: tuple[int, int],
        tokens: list[int],
        flags: int,
        drafts: int,
    ) -> None:
        """A row of a step; `place` is its result line, `slots` are its own and its source."""
        (slot, source), state = slots, pools["request_state"][slots[0]]
        length, pages = int(state[table.LENGTH]), _Pages(pools, slot)
        goes_on = bool(flags & table.FROM_TABLE)
        if goes_on:
            assert len(tokens) == 1
            tokens = [int(state[table.LAST_TOKEN]), *self._guesses(pools, slot, drafts)]
        pages.write("", length, tokens)
        rings = pools["conv_attn"][0, :, :, 0]
        conv = [*(_at(rings[source], p) for p in range(length - 3, length)), *map(float, tokens)]
        given = 0
        for at in range(len(tokens)):  # each query reads its own window
            history, window = pages.read("", 0, length + at)
            assert window == history[-WINDOW:], "a window page was freed or overwritten"
            if not goes_on and not (flags & table.SAMPLE and at + 1 == len(tokens)):
                continue
            value = _mix(history, window, conv[at + 1 : at + 4], self._seed(pools, slot))
            token = self._emit(pools, place, given, slot, history, value)
            given += 1
            if state[table.FINISH] or tokens[at + 1 : at + 2] != [token]:
                break
        end = length + (given if goes_on else len(tokens))
        kept = self._scatter(pools, slot, length, conv, end)
        if source != slot:
            _keep(rings[slot], length, conv[:3])
        for position, token in enumerate(tokens, start=length):
            rings[slot, position % rings.shape[1]] = token
        state[table.LENGTH] = end
        header = [slot, given, int(state[table.FINISH]), end, len(tokens) - 1 if goes_on else 0]
        pools["results_int"][(*place, slice(table.RESULT_HEADER))] = state.new_tensor(header)
        if self.spec.spec_depth:
            self._draft(pools, slots, length, end, bool(given), kept)

    def _guesses(self, pools: Tensors, slot: int, drafts: int) -> list[int]:
        """The drafts that a round verifies."""
        state, ints = pools["request_state"][slot], pools["request_ints"][slot]
        left = int(ints[table.MAX_TOKENS] - state[table.GENERATED]) - 1
        count = max(min(int(state[table.DRAFTS]), left), 0) if drafts else 0
        found: list[int] = pools["draft_tokens"][slot, :count].tolist()
        return found

    def _seed(self, pools: Tensors, slot: int) -> int:
        sampled = float(pools["request_floats"][slot, 0])
        return int(pools["request_ints"][slot, table.SEED_LOW]) if sampled else 0

    def _emit(
        self,
        pools: Tensors,
        place: tuple[int, int],
        index: int,
        slot: int,
        history: list[float],
        value: int,
    ) -> int:
        """Draw a token, write it as the line's token `index`."""
        state, ints = pools["request_state"][slot], pools["request_ints"][slot].tolist()
        token = self._commit(state, ints, history, value)
        top, most = self.spec.limits.top_logprobs, 1 + self.spec.spec_depth
        line, floats = (
            pools["results_int"][place][table.RESULT_HEADER :],
            pools["results_float"][place],
        )
        line[index], floats[index] = token, logprob(value)
        for i in range(top):
            line[most + index * top + i] = (token + i) % REAL_VOCAB
            floats[most + index * top + i] = logprob(value) - i
        return token

    def _draft(
        self,
        pools: Tensors,
        slots: tuple[int, int],
        length: int,
        end: int,
        sampled: bool,
        kept: Mapping[int, int],
    ) -> None:
        """The draft phase over the last rows before `length` and the new ones; `kept` are the
        snapshot slots by boundary."""
        (slot, source), depth = slots, self.spec.spec_depth
        pages, state = _Pages(pools, slot), pools["request_state"][slot]
        stash, first = pools["draft_hidden"][:, :, 0], max(0, length - depth)
        again = [float(stash[source, p % depth]) for p in range(first, length)]
        new = pages.read("", length, end - 1)[0]
        history = pages.read("", 0, end - 1)[0]
        assert [*again, *new] == history[first:], "the stash is another request's"
        pages.write("draft_", first + depth, [*again, *new])
        behind, seen = pages.read("draft_", depth, end - 1 + depth)
        assert behind == history and seen == history[-len(seen) :], "draft keys of another request"
        for at, target in (*kept.items(), (end, slot)):
            for position in range(max(0, at - depth), at):
                stash[target, position % depth] = history[position]
        state[table.DRAFTS] = 0
        if sampled and not state[table.FINISH]:
            known = [*history, float(state[table.LAST_TOKEN])]
            for index in range(depth):
                value = _mix(known, known[-WINDOW:], known[-3:], self._seed(pools, slot))
                guess = next_token(value, ()) if value % 4 else (value + 1) % REAL_VOCAB
                pools["draft_tokens"][slot, index] = guess
                known.append(float(guess))
            limit = int(pools["request_ints"][slot, table.DRAFT_LIMIT])
            state[table.DRAFTS] = min(depth, limit)

    def _check_sources(self, rows: Tensors, pools: Tensors) -> None:
        """A row's source is its own slot or one that no row of the step writes."""
        slots = [slot for slot in rows["row_slots"].tolist() if slot]
        written = {*slots, *(n for slot in slots for n in pools["snapshot_slots"][slot].tolist())}
        sources = rows["row_sources"].tolist()[: len(slots)]
        for slot, source in zip(slots, sources, strict=True):
            assert source in (0, slot) or source not in written, "a source is written in the step"
        assert not {n for n in written if n > self.spec.max_running} & {*slots}

    def _scatter(
        self, pools: Tensors, slot: int, length: int, conv: list[float], end: int
    ) -> dict[int, int]:
        """Write the destinations of the boundaries behind `length`, take those up to `end`, which
        are returned by boundary; `conv` is the window there and the row's tokens."""
        tried, waiting = length + len(conv) - 3, pools["snapshot_slots"][slot].tolist()
        taken: dict[int, int] = {}
        boundaries = range((length // GRID + 1) * GRID, tried + 1, GRID)
        for boundary, destination in zip(boundaries, [*waiting], strict=False):
            if destination:
                window = conv[boundary - length : boundary - length + 3]
                _keep(pools["conv_attn"][0, destination, :, 0], boundary, window)
            if boundary <= end:
                waiting.pop(0)
                if destination:
                    taken[boundary] = destination
                    pools["snapshot_lengths"][destination] = boundary
        width = pools["snapshot_slots"].shape[1]
        waiting += [0] * (width - len(waiting))
        pools["snapshot_slots"][slot] = pools["snapshot_slots"].new_tensor(waiting)
        return taken

    def _commit(self, state: Tensor, ints: list[int], history: list[float], value: int) -> int:
        state[table.GENERATED] += 1
        if NON_FINITE_TOKEN in history[: ints[table.PROMPT_LENGTH]]:
            state[table.FINISH] = table.Finish.NON_FINITE
            return 0
        stops = ints[table.INT_HEADER : table.INT_HEADER + self.spec.limits.stop_ids]
        generated = int(state[table.GENERATED])
        token = next_token(value, stops if generated <= ints[table.MIN_TOKENS] else ())
        state[table.LAST_TOKEN] = token
        if token in stops:
            state[table.FINISH] = table.Finish.STOP
        elif generated >= ints[table.MAX_TOKENS]:
            state[table.FINISH] = table.Finish.LENGTH
        return token


class _Pages:
    """KV places of a slot through its page tables, of the target ("") or of the drafts ("draft_")."""

    def __init__(self, pools: Tensors, slot: int) -> None:
        self._pools = pools
        self._full, self._ring = (
            pools["full_table"][slot].tolist(),
            pools["window_table"][slot].tolist(),
        )

    def write(self, family: str, first: int, values: Sequence[float]) -> None:
        """Write one value a position from `first` on."""
        for at, value in enumerate(values, start=first):
            self._full_at(family, at).fill_(value)
            self._window_at(family, at).fill_(value)

    def read(self, family: str, first: int, last: int) -> tuple[list[float], list[float]]:
        """What full layers have at positions [first, last], and window layers see from `last`."""
        whole = [float(self._full_at(family, at)) for at in range(first, last + 1)]
        seen = range(max(first, last - WINDOW + 1), last + 1)
        return whole, [float(self._window_at(family, at)) for at in seen]

    def _full_at(self, family: str, at: int) -> Tensor:
        assert self._full[at // PAGE], "a position without a page"
        return self._pools[f"kv_{family}full"][0, self._full[at // PAGE], 0, 0, at % PAGE, 0]

    def _window_at(self, family: str, at: int) -> Tensor:
        page = self._ring[at // PAGE % len(self._ring)]
        assert page, "a position without a page"
        return self._pools[f"kv_{family}window"][0, page, 0, 0, at % PAGE, 0]


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
