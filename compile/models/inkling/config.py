"""Reading `config.json` key by key: every key is implemented, inert by this table, or refused.

Two dialects name the same facts differently and saved files often carry both names. All names of a
fact are read together: they must agree. Nothing is taken from a class default, since those are not
the checkpoint's values (spec 1.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from inkling_engine.artifacts.errors import UsageError

MODEL_TYPES: Final = ("inkling_mm_model", "inkling_text")

FIXED: Final[Mapping[str, Any]] = {
    "gate_activation": "sigmoid",
    "use_gate_bias": True,
    "use_global_scale": True,
    "norm_after_topk": True,
    "shared_expert_sink": True,
    "use_sconv": True,
    "use_embed_norm": True,
    "q_bias": False,
    "o_bias": False,
    "final_logit_softcapping": None,
    "hidden_act": "silu",
    "mtp_hidden_states_first": True,
    "number_of_conv_states": 4,
    "rms_norm_eps_moe_gate": 1e-6,
    "is_encoder_decoder": False,
    "quantization_config": None,
    "compression_config": None,
}
"""Keys whose one implemented value is known; another value is a different model."""

INERT: Final = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "transformers_version", "torch_dtype"),
        *("dtype", "bos_token_id", "pad_token_id", "initializer_range", "attention_dropout"),
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "id2label"),
        *("label2id", "problem_type", "chunk_size_feed_forward", "_attn_implementation"),
        *("attn_implementation", "tie_word_embeddings"),
    }
)
"""Keys that change nothing here: training, other libraries, choices that the build makes itself.
`tie_word_embeddings` is settled against the tensors (`compile/checkpoint.py`)."""

INERT_TOP: Final = frozenset(
    {
        *("vision_config", "audio_config", "image_token_id", "audio_token_id"),
        *("image_bos_token_id", "audio_bos_token_id"),
    }
)
"""Keys of the media towers, which a text engine leaves out."""


class Section:
    """One JSON object of a configuration; remembers which of its keys were read."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        """`name` is how errors call the object; `values` are its keys."""
        self.name, self.values = name, values
        self.read: set[str] = set()

    def label(self, key: str) -> str:
        """How an error names `key`."""
        return f"config.json {self.name}.{key}" if self.name else f"config.json {key}"

    def given(self, *keys: str) -> list[tuple[str, Any]]:
        """(label, value) of each of `keys` that is there and not null."""
        self.read.update(keys)
        return [(self.label(key), self.values[key]) for key in keys if self._has(key)]

    def integer(
        self, *keys: str, minimum: int = 1, maximum: float = math.inf, default: int | None = None
    ) -> int:
        """The whole number under any of `keys`; `default` None means that it is required."""
        label, value = self._one(keys, default)
        if type(value) is not int or not minimum <= value <= maximum:
            most = "" if maximum == math.inf else f" and at most {maximum}"
            raise refuse(label, value, f"a whole number of at least {minimum}{most}")
        return value

    def real(self, *keys: str) -> float:
        """The positive number under any of `keys`."""
        label, value = self._one(keys, None)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise refuse(label, value, "a positive number")
        return float(value)

    def refuse_rest(self, inert: frozenset[str]) -> None:
        """Check the fixed keys and refuse, all at once, the keys that nobody knows."""
        for key, value in FIXED.items():
            if self._has(key) and self.values[key] != value:
                raise refuse(self.label(key), self.values[key], f"{value!r} or no such key")
        if unknown := sorted(set(self.values) - self.read - set(FIXED) - inert - {"model_type"}):
            names = ", ".join(map(self.label, unknown))
            raise refuse(
                names, "unknown", "keys this version implements", "remove the keys if inert"
            )

    def _has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _one(self, keys: Iterable[str], default: Any) -> tuple[str, Any]:
        keys = tuple(keys)
        found = agreed(self.given(*keys))
        if found is None and default is None:
            raise refuse(self.label(keys[0]), "nothing", "a value")
        label = next((self.label(key) for key in keys if self._has(key)), self.label(keys[0]))
        return label, default if found is None else found


def agreed(given: list[tuple[str, Any]]) -> Any:
    """The value that all `given` (label, value) pairs state, None if there are none."""
    for label, value in given[1:]:
        if value != given[0][1]:
            raise refuse(
                f"{given[0][0]} and {label}", f"{given[0][1]} and {value}", "the same in both"
            )
    return given[0][1] if given else None


def indices(given: list[tuple[str, Any]], limit: int) -> list[tuple[str, tuple[int, ...]]]:
    """Each given list of layer numbers, sorted; refused unless distinct and below `limit`."""
    return [(label, _checked_indices(label, value, limit)) for label, value in given]


def refuse(
    label: str, found: Any, expected: str, remedy: str = "correct config.json"
) -> UsageError:
    """The error for a key that cannot be honoured."""
    return UsageError(label, found, expected, remedy)


def check_model_type(config: Mapping[str, Any], section: str = "") -> None:
    """Refuse other architectures (the second generation among them) by name."""
    found = config.get("model_type", MODEL_TYPES[0])
    if found not in MODEL_TYPES:
        label = Section(section, config).label("model_type")
        raise refuse(label, found, " or ".join(MODEL_TYPES), "use an Inkling checkpoint")


def _checked_indices(label: str, value: Any, limit: int) -> tuple[int, ...]:
    valid = isinstance(value, list) and all(type(i) is int and 0 <= i < limit for i in value)
    if not valid or len(set(value)) != len(value):
        raise refuse(label, value, f"a list of distinct numbers from 0 to {limit - 1}")
    return tuple(sorted(value))
