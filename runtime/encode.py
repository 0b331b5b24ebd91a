"""A sequence's lines of the request table, as its admission carries them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from inkling_engine.artifacts.spec import EngineSpec
from inkling_engine.kernels import table
from inkling_engine.runtime.requests import Sequence
from inkling_engine.runtime.sampling import stop_ids


def encode_params(sequence: Sequence, spec: EngineSpec) -> None:
    """Write a sequence's lines of `request_ints` and `request_floats` (`kernels.table`)."""
    params, limits = sequence.params, spec.limits
    ints = [0] * table.INT_HEADER
    ints[table.PROMPT_LENGTH] = len(sequence.prompt)
    ints[table.MAX_TOKENS] = sequence.max_tokens
    ints[table.MIN_TOKENS] = params.min_tokens
    ints[table.TOP_K] = max(params.top_k, 0)
    ints[table.TOP_LOGPROBS] = params.logprobs or 0
    ints[table.DRAFT_LIMIT] = sequence.drafts
    ints[table.SEED_LOW] = _signed(sequence.seed & 0xFFFFFFFF)
    ints[table.SEED_HIGH] = _signed(sequence.seed >> 32)
    floats = [0.0] * table.FLOAT_HEADER
    floats[table.TEMPERATURE] = 0.0 if params.is_greedy else params.temperature
    floats[table.TOP_P], floats[table.MIN_P] = params.top_p, params.min_p
    floats[table.PRESENCE] = params.presence_penalty
    floats[table.FREQUENCY] = params.frequency_penalty
    floats[table.REPETITION] = params.repetition_penalty
    bias: Mapping[int, float] = params.logit_bias or {}
    stops = stop_ids(params, spec)
    stops += (table.INERT_TOKEN,) * (limits.stop_ids - len(stops))
    unused = limits.bias_ids - len(bias)
    sequence.admit_ints = array("i", (*ints, *stops, *bias, *[0] * unused))
    sequence.admit_floats = array("f", (*floats, *bias.values(), *[0.0] * unused))


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word
