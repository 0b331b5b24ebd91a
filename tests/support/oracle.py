"""transformers' own Inkling as oracle: an implementation of the model that nobody here wrote.

It runs in float32 on one sequence at a time: left padding is not trustworthy in a model with
convolution state. `logits` is one forward over whole sequences, so a continuation is checked by
teacher forcing: if at every position the token that was taken is the oracle's best one, the
continuation is the oracle's greedy one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, InklingConfig, InklingForConditionalGeneration

from inkling_engine.compile.models.inkling import shape

TINY = shape.TINY
SMALL_TOWERS: dict[str, Any] = {
    "vision_config": {"n_layers": 2, "patch_size": 2, "temporal_patch_size": 2, "hidden_size": 8},
    "audio_config": {"n_mel_bins": 1, "mel_vocab_size": 2},
}


@dataclass(frozen=True)
class Continuation:
    """A greedy continuation: `tokens`, and `logits` [tokens, vocab] that each was the best of."""

    tokens: tuple[int, ...]
    logits: Tensor

    @property
    def gaps(self) -> Tensor:
        """Best minus second best logit at each token."""
        return gaps(self.logits)


class Oracle:
    """One checkpoint in transformers; media towers that it lacks are made small."""

    def __init__(self, folder: Path) -> None:
        """Load the original-layout checkpoint in `folder` as float32."""
        logging.getLogger("transformers").setLevel(logging.ERROR)
        stated = json.loads((folder / "config.json").read_text())
        towers = {name: sizes for name, sizes in SMALL_TOWERS.items() if name not in stated}
        config = InklingConfig.from_pretrained(folder, **towers)
        model = InklingForConditionalGeneration.from_pretrained(
            folder, config=config, dtype=torch.float32
        )
        self.model = model.train(False)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [len(ids), real vocabulary] float32 after each id of one sequence."""
        return self.chunked([ids])

    def chunked(self, chunks: Iterable[Sequence[int]]) -> Tensor:
        """Logits after each id of one sequence that is fed chunk by chunk through a cache."""
        cache = DynamicCache(config=self.model.config)
        return torch.cat([self._forward(chunk, cache) for chunk in chunks])

    def greedy(self, prompt: Sequence[int], count: int) -> Continuation:
        """The `count` tokens that follow `prompt`, the best one at each position."""
        cache = DynamicCache(config=self.model.config)
        rows = [self._forward(prompt, cache)[-1]]
        tokens = [int(rows[0].argmax())]
        while len(tokens) < count:
            rows.append(self._forward(tokens[-1:], cache)[-1])
            tokens.append(int(rows[-1].argmax()))
        return Continuation(tuple(tokens), torch.stack(rows))

    def _forward(self, ids: Sequence[int], cache: DynamicCache) -> Tensor:
        with torch.no_grad():
            output = self.model(input_ids=torch.tensor([list(ids)]), cache=cache, use_cache=True)
        logits: Tensor = output.logits[0]
        return logits


def gaps(logits: Tensor) -> Tensor:
    """Best minus second best logit of each row of `logits` [rows, vocab]."""
    best = logits.topk(2).values
    return best[:, 0] - best[:, 1]
