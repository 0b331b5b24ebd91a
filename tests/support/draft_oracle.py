"""transformers' own draft depths as oracle: chained over a whole sequence without a cache, and its loop.

Its local depths lose their window in passes of several tokens, its full depths scale by a shifted
position, and it feeds raw embeddings (spec 6.1): the window is given back, the scaling is turned off
as ours is, and the embedding's norm is put back where that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from support.oracle import Oracle
from torch import Tensor
from transformers import masking_utils
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

NEVER = 1 << 40  # a floor of the log scaling that no position reaches


class Drafted(NamedTuple):
    """One drafting round of the oracle: the committed tokens and root before it, and its drafts."""

    tokens: tuple[int, ...]
    drafts: tuple[int, ...]


class DraftOracle:
    """The draft depths of the checkpoint behind `oracle`."""

    def __init__(self, oracle: Oracle, *, embed_norm: bool) -> None:
        """`embed_norm`: whether the depths see embeddings after the backbone's norm."""
        self.main, model = oracle, oracle.model
        self.depths: Any = MtpModel.from_pretrained(model).train(False)
        if embed_norm:
            self.depths.embed_tokens = model.get_input_embeddings()
        for layer in self.depths.layers:
            layer.mtp_block.self_attn.config.log_scaling_n_floor = NEVER

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [depths, real vocabulary] at the frontier of `tokens`, of which the last is the root,
        sampled and not processed; each depth reads the best token of the one before."""
        ids = torch.tensor([list(tokens)])
        with torch.no_grad(), windows():
            output = self.main.model(
                input_ids=ids[:, :-1], output_hidden_states=True, use_cache=False
            )
            _, found, _ = self.depths(
                input_ids=ids[:, 1:],
                last_hidden_states=output.hidden_states[-1],
                attention_mask=None,
                position_ids=torch.arange(1, ids.shape[1])[None],
                mtp_cache=MtpCache(config=self.main.model.config.get_mtp_config()),
            )
        logits: Tensor = found[0]
        return logits

    def loop(self, prompt: Sequence[int], count: int) -> list[Drafted]:
        """The rounds of transformers' own loop while it generates `count` tokens, raw embeddings."""
        rounds: list[Drafted] = []
        genuine = MTPCandidateGenerator.get_candidates

        def recording(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            found = genuine(self, input_ids, *args, **kwargs)
            known = input_ids.shape[1]
            if found[0].shape[1] > known:
                tokens = tuple(found[0][0].tolist())
                rounds.append(Drafted(tokens[:known], tokens[known:]))
            return found

        with pytest.MonkeyPatch.context() as patch, windows():
            patch.setattr(MTPCandidateGenerator, "get_candidates", recording)
            self.main.model.generate(
                torch.tensor([list(prompt)]), use_mtp=True, do_sample=False, max_new_tokens=count
            )
        return rounds


@contextmanager
def windows() -> Iterator[None]:
    """Within the block local depths have their window in passes of several tokens too."""
    masks = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING["hybrid_sliding"]
    sliding = masking_utils.create_sliding_window_causal_mask
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(masks, "sliding_attention", sliding)
        yield
