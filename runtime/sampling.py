"""`SamplingParams`: how one request's tokens are drawn and where they end.

Field names are those that vLLM's users know. What this engine does not do is refused by name from
a closed list, so that no request is quietly answered with something else. A value that can be
judged alone is checked here; what depends on the engine (limits, vocabulary) in `check_params`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from inkling_engine.artifacts.errors import UsageError, show
from inkling_engine.artifacts.spec import EngineSpec

GREEDY_BELOW: Final = 1e-5  # smaller temperatures are greedy, as in vLLM
_FLOAT32_MAX: Final = 3.4028234663852886e38

_ITERATE = "run one request for each variant and compare them"
_POST = "check the text after generation"
REFUSED: Final[Mapping[str, str]] = {
    "allowed_token_ids": "use logit_bias on single ids",
    "bad_words": "use logit_bias on single ids",
    "best_of": "use n and compare cumulative_logprob",
    "early_stopping": _ITERATE,
    "extra_args": "leave it out",
    "flat_logprobs": "leave it out",
    "guided_decoding": _POST,
    "length_penalty": _ITERATE,
    "logits_processors": "use logit_bias or the penalties",
    "output_kind": "use Engine.stream for increments",
    "prompt_logprobs": "use logprobs, for the generated tokens",
    "repetition_detection": "use repetition_penalty",
    "response_format": _POST,
    "skip_reading_prefix_cache": "leave it out",
    "spaces_between_special_tokens": "use skip_special_tokens",
    "structured_outputs": _POST,
    "suffix": "put the whole context into the prompt",
    "thinking_token_budget": "use max_tokens",
    "truncate_prompt_tokens": "cut the prompt before it is submitted",
    "use_beam_search": "use n and compare cumulative_logprob",
}

_INTEGERS: Final = {
    "n": (1, 1024),
    "top_k": (-1, 2**31 - 1),
    "seed": (0, 2**64 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, 2**31 - 1),
    "max_drafts": (0, 2**31 - 1),
}
_OPTIONAL: Final = {"seed", "max_tokens", "logprobs", "max_drafts"}
_NUMBERS: Final = {
    "temperature": (0.0, _FLOAT32_MAX),
    "top_p": (math.ulp(0.0), 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 1e6),
}
_SWITCHES: Final = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "detokenize",
)


class _ClosedFields(type):
    """Refuses unknown and unsupported keywords as the user's mistake, before construction."""

    def __call__(cls, *arguments: Any, **values: Any) -> Any:
        """Construct after checking the names in `values`."""
        if unknown := values.keys() - {field.name for field in fields(cls)}:  # type: ignore[arg-type]
            raise _unknown(min(unknown), values[min(unknown)])
        return super().__call__(*arguments, **values)


@dataclass(frozen=True, kw_only=True)
class SamplingParams(metaclass=_ClosedFields):
    """One request's sampling, checked when it is made; UsageError names the field at fault.

    n: independent choices; choice 0 draws with `seed` itself, the others with seeds derived from
    it. temperature: 0 is greedy. top_k: 0 or -1 is off. seed: None draws a fresh one. max_tokens:
    None is all that the context leaves. stop: strings that end the text; stop_token_ids: ids that
    end it, beside the model's own end tokens unless `ignore_eos`. min_tokens: no stop before.
    logprobs: None for none, else how many alternatives come with each chosen token's logprob;
    both are of the model's raw distribution, before penalties, bias and temperature. max_drafts: how
    many guesses a round may verify, 0 for none; None is the engine's depth. Tokens do not depend on it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    max_drafts: int | None = None

    def __post_init__(self) -> None:
        """Check every value and bring the lists into one form."""
        for name, (least, most) in _INTEGERS.items():
            value = getattr(self, name)
            if not (value is None and name in _OPTIONAL) and not _is_integer(value, least, most):
                raise UsageError(
                    name, show(value), f"an integer from {least} to {most}", _set(name)
                )
        for name, (low, high) in _NUMBERS.items():
            if not _is_number(value := getattr(self, name), low, high):
                raise UsageError(name, show(value), _range_text(name, low, high), _set(name))
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(name, show(value), "true or false", _set(name))
        self._normalise()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"at most max_tokens ({self.max_tokens})"
            raise UsageError("min_tokens", self.min_tokens, limit, "lower it or raise max_tokens")
        if self.stop and not self.detokenize:
            remedy = "set detokenize or use stop_token_ids"
            raise UsageError("stop", show(self.stop), "none without detokenize", remedy)

    def _normalise(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise UsageError("stop", show(self.stop), "non-empty strings", _set("stop"))
        ids = _listed("stop_token_ids", self.stop_token_ids)
        if not all(_is_integer(token, 0, 2**31 - 1) for token in ids):
            raise UsageError("stop_token_ids", show(ids), "token ids", _set("stop_token_ids"))
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(ids)))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit is always taken."""
        return self.temperature < GREEDY_BELOW

    def most_drafts(self, depth: int) -> int:
        """Drafts a round in an engine that drafts `depth` tokens."""
        return depth if self.max_drafts is None else min(depth, self.max_drafts)


def check_params(params: SamplingParams, spec: EngineSpec) -> None:
    """Check `params` against an engine's vocabulary and the widths of its request table."""
    limits, vocab = spec.limits, spec.shape.real_vocab
    lists = {"stop_token_ids": params.stop_token_ids or (), "logit_bias": params.logit_bias or {}}
    for name, ids in lists.items():
        if beyond := [token for token in ids if token >= vocab]:
            raise UsageError(name, beyond[0], f"token ids below {vocab}", "use the model's ids")
    if len(stops := stop_ids(params, spec)) > limits.stop_ids:
        found = f"{len(stops)} ids, end tokens included"
        raise UsageError("stop_token_ids", found, f"at most {limits.stop_ids}", "use fewer ids")
    if len(lists["logit_bias"]) > limits.bias_ids:
        found = f"{len(lists['logit_bias'])} ids"
        raise UsageError("logit_bias", found, f"at most {limits.bias_ids}", "keep the strongest")
    if (params.logprobs or 0) > limits.top_logprobs:
        most = f"at most {limits.top_logprobs}"
        raise UsageError("logprobs", params.logprobs, most, "ask for fewer alternatives")


def stop_ids(params: SamplingParams, spec: EngineSpec) -> tuple[int, ...]:
    """The ids that end a sequence on the device: the request's, then the model's end tokens."""
    ends = () if params.ignore_eos else spec.shape.eos_tokens
    return tuple(dict.fromkeys((*(params.stop_token_ids or ()), *ends)))


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: `seed` itself for 0, else a splitmix64 step from it."""
    if index == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _unknown(name: str, value: Any) -> UsageError:
    if name in REFUSED:
        return UsageError(name, show(value), "no such field (unsupported)", REFUSED[name])
    return UsageError(name, show(value), "a sampling field", "see SamplingParams for the names")


def _set(name: str) -> str:
    return f"change {name} or leave it out"


def _range_text(name: str, low: float, high: float) -> str:
    if high == _FLOAT32_MAX:
        return f"a number of at least {low:g}"
    return (
        f"a number above 0, at most {high:g}"
        if 0 < low < 1e-9
        else f"a number from {low:g} to {high:g}"
    )


def _is_integer(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise UsageError(name, show(values), "a list", _set(name))
    return tuple(values)


def _bias(values: Any) -> dict[int, float]:
    """A bias by token id; ids may be written as strings, which JSON objects force."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise UsageError(
            "logit_bias", show(values), "an object of token id: bias", _set("logit_bias")
        )
    found: dict[int, float] = {}
    for key, value in values.items():
        token = int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,10}", key) else key
        if not _is_integer(token, 0, 2**31 - 1) or not _is_number(value, -100.0, 100.0):
            expected = "token ids with biases from -100 to 100"
            raise UsageError(
                "logit_bias", f"{show(key)}: {show(value)}", expected, _set("logit_bias")
            )
        found[token] = float(value)
    return found
