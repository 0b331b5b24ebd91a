"""The same small stack of layers twice, with the same weights: transformers' Inkling and our step.

The weights are random and made where transformers keeps them; ours are assembled from them by the
recipes that convert a checkpoint. Ours runs op by op, or as one captured graph on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import torch
from bench.setting import NO_DRAFTS, map_pages
from bench.timing import capture
from torch import Tensor

from inkling_engine.artifacts.manifest import Part, Recipe
from inkling_engine.artifacts.spec import Bucket, EngineSpec, ModelShape
from inkling_engine.compile.driver import Chunk, Machine
from inkling_engine.compile.export import program_inputs
from inkling_engine.compile.models.inkling.names import canonical, recipes
from inkling_engine.compile.options import BuildOptions, make_spec
from inkling_engine.kernels.state import DTYPES

SMALL_TOWERS: dict[str, Any] = {
    "vision_config": {"n_layers": 2, "patch_size": 2, "temporal_patch_size": 2, "hidden_size": 8},
    "audio_config": {"n_mel_bins": 1, "mel_vocab_size": 2},
}
OLDER_NAMES = {"model.embed_norm.weight": "model.embed_tokens.embed_norm.weight"}


def four_layers(shape: ModelShape) -> ModelShape:
    """Two dense layers, then two of experts; the last one has full attention."""
    return msgspec.structs.replace(
        shape,
        layers=4,
        local_layers=(0, 1, 2),
        dense_layers=2,
        real_vocab=shape.vocab,
        eos_tokens=(),
        drafts=NO_DRAFTS,
    )


def make_model(shape: ModelShape, dtype: torch.dtype, device: str) -> Any:
    """Transformers' model of `shape` with seeded random weights."""
    from transformers import InklingConfig, InklingForConditionalGeneration

    config = InklingConfig(text_config=text_config(shape), **SMALL_TOWERS)
    with default_dtype(dtype), torch.device(device):
        model = InklingForConditionalGeneration(config).train(False)
    precise = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, tensor in tensors(model).items():
            if any(part in name for part in precise):
                tensor.data = tensor.data.float()
            fill(name, tensor, generator)
    return model.requires_grad_(False)


def text_config(shape: ModelShape) -> dict[str, Any]:
    """`shape` as transformers' text configuration."""
    full, local = shape.full, shape.local
    sparse = shape.layers - shape.dense_layers
    return {
        "vocab_size": shape.vocab,
        "unpadded_vocab_size": shape.real_vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": full.heads,
        "num_key_value_heads": full.kv_heads,
        "head_dim": full.head_dim,
        "swa_num_attention_heads": local.heads,
        "swa_num_key_value_heads": local.kv_heads,
        "swa_head_dim": local.head_dim,
        "sliding_window_size": local.window,
        "d_rel": shape.rel_dim,
        "rel_extent": full.extent,
        "log_scaling_n_floor": shape.log_floor or None,
        "log_scaling_alpha": shape.log_alpha,
        "local_layer_ids": list(shape.local_layers),
        "mlp_layer_types": ["dense"] * shape.dense_layers + ["sparse"] * sparse,
        "intermediate_size": shape.dense_width,
        "moe_intermediate_size": shape.expert_width,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "n_shared_experts": shape.shared_experts,
        "route_scale": shape.route_scale,
        "conv_kernel_size": shape.conv_kernel,
        "logits_mup_width_multiplier": shape.mup,
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.max_context,
        "pad_token_id": None,
    }


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the block new floating tensors are of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tensors(model: Any) -> dict[str, Tensor]:
    """The decoder's parameters and buffers by the canonical names of a checkpoint."""
    named = [*model.named_parameters(), *model.named_buffers()]
    found = {canonical(name): tensor for name, tensor in named}
    return {OLDER_NAMES.get(name, name): tensor for name, tensor in found.items()}


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Random values that keep activations of order one: matrices by their depth."""
    if "norm" in name or "global_scale" in name:
        tensor.fill_(1)
        return
    small = "sconv" in name or "proj.proj" in name
    scale = 0.3 if small else 0.01 if "bias" in name else tensor.shape[-1] ** -0.5
    if tensor.is_floating_point():
        tensor.normal_(generator=generator).mul_(scale)


def engine_weights(model: Any, shape: ModelShape, dtype: torch.dtype) -> dict[str, Tensor]:
    """Our weights, from the model's by the conversion recipes."""
    source = tensors(model)
    name: Literal["float32", "bfloat16"] = "float32" if dtype == torch.float32 else "bfloat16"
    return {recipe.name: assemble(recipe, source) for recipe in recipes(shape, name, "hf")}


def assemble(recipe: Recipe, source: Mapping[str, Tensor]) -> Tensor:
    """One engine tensor from the parts that its recipe names."""
    device = next(iter(source.values())).device
    whole = torch.empty(recipe.shape, dtype=DTYPES[recipe.dtype], device=device)
    for part in recipe.parts:
        ends = zip(part.offset, part.shape, strict=True)
        whole[tuple(slice(start, start + size) for start, size in ends)] = piece(part, source)
    return whole


def piece(part: Part, source: Mapping[str, Tensor]) -> Tensor:
    """What `part` takes of its tensor, in the part's shape."""
    block = tuple(slice(start, stop, step) for start, stop, step in part.source)
    return source[part.tensor][block].reshape(part.shape)


class Transformers:
    """Greedy decoding of a batch by transformers, one step at a time."""

    def __init__(self, model: Any) -> None:
        """Start without a prompt."""
        self.model = self.call = model
        signature = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in signature else "past_key_values"
        self.keep = {"logits_to_keep": 1} if "logits_to_keep" in signature else {}
        self.cache: Any = None
        self.token = torch.empty(0)

    def prefill(self, prompts: Tensor, cache: Any = None) -> Tensor:
        """Process `prompts` [B, n] eagerly into `cache`; the last logits [B, V] fp32."""
        from transformers import DynamicCache

        self.cache = cache if cache is not None else DynamicCache(config=self.model.config)
        call, self.call = self.call, self.model
        try:
            return self._run(prompts)
        finally:
            self.call = call

    def step(self) -> Tensor:
        """One decode step; the logits [B, V] fp32."""
        return self._run(self.token)

    def _run(self, ids: Tensor) -> Tensor:
        named = {self.cache_name: self.cache, "use_cache": True, **self.keep}
        with torch.no_grad():
            logits: Tensor = self.call(input_ids=ids, **named).logits[:, -1].float()
        self.token = logits.argmax(-1, keepdim=True)
        return logits


class OurStep:
    """Our decode step over `batch` slots whose prompts are at most `context` tokens."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Mapping[str, Tensor],
        batch: int,
        context: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        """Make the pools, with room for twice the context."""
        self.decode = Bucket(kind="decode", rows=batch, tokens=batch)
        self.extend = Bucket(kind="extend", rows=1, tokens=context)
        self.spec = pair_spec(shape, self.decode, self.extend, dtype, device)
        self.machine = Machine(self.spec, weights, device)
        map_pages(self.machine, batch)
        self.logits = torch.empty(0)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Process each slot's prompt; the last logits [B, V] fp32."""
        logits = []
        for slot, prompt in enumerate(prompts, start=1):
            chunk = Chunk(slot, 0, prompt, admit=True)
            rows = self.machine.rows(program_inputs(self.spec, self.extend, ()), [chunk])
            logits.append(self.machine.native(self.extend, rows))
        self.length = len(prompts[0])
        return torch.cat(logits)

    def make_call(self) -> Callable[[], None]:
        """The decode step as a call that leaves its logits in `logits`."""
        chunks = [Chunk(slot, self.length) for slot in range(1, self.decode.rows + 1)]
        rows = self.machine.rows(program_inputs(self.spec, self.decode, ()), chunks)

        def call() -> None:
            self.logits = self.machine.native(self.decode, rows)

        return call

    def make_graph(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """(replay of the captured step, return to the state after the prompts)."""
        kept = {
            name: self.machine.pools[name].clone()
            for name, pool in self.machine.pools.items()
            if not name.startswith("kv_")
        }

        def restore() -> None:
            for name, tensor in kept.items():
                self.machine.pools[name].copy_(tensor)

        graph = capture([self.make_call()])
        restore()
        return graph.replay, restore


def pair_spec(
    shape: ModelShape, decode: Bucket, extend: Bucket, dtype: torch.dtype, device: str
) -> EngineSpec:
    """A spec of both buckets with pages for twice the extend bucket's tokens."""
    options = BuildOptions(
        model="pair",
        dtype="fp32" if dtype == torch.float32 else "bf16",
        max_context=2 * extend.tokens,
        max_running=decode.rows,
        decode_buckets=str(decode.rows),
        extend_buckets=f"{extend.tokens}x1",
    )
    return make_spec(options, options.model, shape, device)
