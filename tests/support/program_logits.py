"""An engine whose programs' logits are kept: what the compiled step returned for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inkling_engine.artifacts.manifest import Manifest
from inkling_engine.compile.backends.aoti import open_program
from inkling_engine.runtime.engine import Engine
from inkling_engine.runtime.ops import load_ops
from inkling_engine.runtime.requests import Choice
from inkling_engine.runtime.sampling import SamplingParams


@dataclass(frozen=True)
class Generated:
    """A prompt's choice, and the program's logits [tokens, vocab] that each token came from."""

    prompt: list[int]
    choice: Choice
    logits: Tensor


class Recorder:
    """Runs an engine folder's programs and keeps the last step's logits [rows, vocab]."""

    def __init__(self, folder: Path) -> None:
        """Programs are opened when the engine binds their inputs."""
        self.folder, self.logits = folder, torch.empty(0)

    def bind(self, manifest: Manifest, inputs: Mapping[str, list[Tensor]]) -> Recorder:
        """The runner factory of `Engine.load`."""
        load_ops(self.folder, manifest)
        self.inputs = inputs
        self.programs = {
            p.name: open_program(self.folder / p.file, "cpu") for p in manifest.programs
        }
        return self

    def run(self, name: str) -> None:
        """One step."""
        (logits,) = self.programs[name](self.inputs[name])
        self.logits = logits.clone()


class LogitsEngine:
    """Generates from an engine folder with the logits of every step."""

    def __init__(self, folder: Path) -> None:
        """Load the folder."""
        self.recorder = Recorder(folder)
        self.engine = Engine.load(folder, programs=self.recorder.bind)

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Generated]:
        """Run `prompts` together to their ends."""
        requests = [self.engine.submit(prompt, params) for prompt in prompts]
        sequences = [request.sequences[0] for request in requests]
        rows: list[list[Tensor]] = [[] for _ in prompts]
        while not all(request.finished for request in requests):
            before = [(len(sequence.tokens), sequence.slot) for sequence in sequences]
            self.engine.step()
            slots = self._row_slots()
            for (count, slot), sequence, kept in zip(before, sequences, rows, strict=True):
                if len(sequence.tokens) > count:
                    kept.append(self.recorder.logits[slots.index(slot or sequence.slot)])
        choices = [request.completion().choices[0] for request in requests]
        taken = zip(prompts, choices, map(torch.stack, rows), strict=True)
        return [Generated(*result) for result in taken]

    def _row_slots(self) -> list[int]:
        """The slot of each row of the last step, from the line that it committed."""
        line = (self.engine.steps - 1) % self.engine.spec.pools.results
        slots: list[int] = self.engine.pool.tensors["results_int"][line, :, 0].tolist()
        return slots
