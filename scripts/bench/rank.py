"""One rank of a tensor-parallel model as a model of its own: its step, on random weights and state.

The shapes are those that one of `tp` ranks holds (heads, MLP widths and vocabulary divided); the
reduction over ranks is left out. Random gates would not route as real traffic does, so a chosen
expert stream drives them: the first CODE hidden channels carry a random code of the token through
all layers (no layer writes them), and the gates read nothing else. Each layer then routes each
token to experts of its own, uniformly, or skewed by the choice bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from bench.work import one_rank
from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, EngineSpec, ModelShape
from inkling_engine.compile.export import Inputs, program_inputs
from inkling_engine.compile.models.inkling import block
from inkling_engine.compile.models.inkling.shape import first_layers
from inkling_engine.compile.options import BuildOptions, make_spec
from inkling_engine.compile.pools import pool_entries
from inkling_engine.compile.steps import step
from inkling_engine.compile.weights import step_weights
from inkling_engine.kernels import table
from inkling_engine.kernels.state import allocate, allocate_rows, random_weight

Stream = Literal["uniform", "skewed"]
CODE = 64  # hidden channels that carry a token's code
SKEW = 0.6  # added to the choice score of the most wanted expert; scores are sigmoids
SPARE = 1024  # tokens a request may grow beyond its context


def rank_spec(
    name: str, tp: int, rows: int, context: int, chunk: int, layers: int | None, drafts: int = 0
) -> EngineSpec:
    """The spec of one of `tp` ranks of the preset `name`, for `rows` requests of `context`."""
    shape = one_rank(name, tp)
    if layers is not None:
        shape = first_layers(shape, layers)
    options = BuildOptions(
        model=name,
        decode_buckets=str(rows),
        extend_buckets=f"{chunk}x1",
        max_context=min(shape.max_context, context + SPARE),
        spec_depth=drafts,
    )
    return make_spec(options, name, shape, "cuda")


def rank_weights(spec: EngineSpec, stream: Stream, seed: int = 0) -> dict[str, Tensor]:
    """Seeded random weights on the GPU whose gates follow `stream`."""
    weights = {}
    for entry in step_weights(spec):
        tensor = random_weight(entry, seed, "cuda")
        leaf = entry.name.rsplit(".", 1)[-1]
        if leaf in ("o", "w2"):
            tensor[:CODE] = 0
        elif leaf == "experts_w2":
            tensor[:, :CODE] = 0
        elif leaf == "gate_weight":
            tensor[:, CODE:] = 0
            tensor[:, :CODE].normal_().mul_(CODE**-0.5)
        elif leaf == "gate_bias":
            tensor.copy_(_bias(stream, len(tensor)))
        weights[entry.name] = tensor
    return weights


def _bias(stream: Stream, experts: int) -> Tensor:
    """Choice bias: none, or falling with the rank of a random order of the experts."""
    if stream == "uniform":
        return torch.zeros(experts)
    return SKEW / (1 + torch.randperm(experts).float()) ** 0.5


@dataclass
class RankStep:
    """A step of one bucket, its state and its inputs, ready to run on the current GPU."""

    spec: EngineSpec
    weights: dict[str, Tensor]
    pools: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Allocate the pools; keys, values and conv inputs are random."""
        for entry in pool_entries(self.spec):
            tensor = self.pools[entry.name] = allocate(entry, "cuda")
            if entry.name.startswith(("kv", "conv", "draft_hidden")):
                for layer in tensor:
                    layer.normal_()
        self._map_pages()

    def _map_pages(self) -> None:
        """Give every slot all its pages, in random order."""
        for name, pages in (
            ("full_table", self.spec.pools.full_pages),
            ("window_table", self.spec.pools.window_pages),
        ):
            entries = self.pools[name]
            order = 1 + torch.randperm(pages - 1, device="cuda").int()
            entries[1:] = order[: entries[1:].numel()].view_as(entries[1:])

    def inputs(self, bucket: Bucket) -> Inputs:
        """The inputs of the program of `bucket`."""
        return program_inputs(self.spec, bucket, step_weights(self.spec))

    def rows(self, bucket: Bucket, seed: int = 0) -> dict[str, Tensor]:
        """Row inputs: every row live; decoding rows go on, one extend row has the whole chunk."""
        inputs = self.inputs(bucket)
        _, rows = allocate_rows(inputs.rows, inputs.row_bytes, "cuda")
        decode = bucket.kind != "extend"
        rows["row_slots"][:] = torch.arange(1, bucket.rows + 1)
        rows["row_counts"][:] = 1 if decode else bucket.tokens // bucket.rows
        rows["row_flags"][:] = table.SAMPLE | (table.FROM_TABLE if decode else 0)
        generator = torch.Generator("cuda").manual_seed(seed)
        rows["token_ids"].random_(0, self.spec.shape.real_vocab, generator=generator)
        return rows

    def reset(self, rows: int, length: int, seed: int = 0) -> None:
        """Let `rows` requests have `length` tokens behind them and sample at temperature 1."""
        state, ints = self.pools["request_state"], self.pools["request_ints"]
        floats = self.pools["request_floats"]
        generator = torch.Generator("cuda").manual_seed(seed)
        live = slice(1, rows + 1)
        state.zero_()
        state[live, table.LENGTH] = length
        state[live, table.LAST_TOKEN].random_(0, self.spec.shape.real_vocab, generator=generator)
        ints[live, table.MAX_TOKENS] = 1 << 30
        ints[live, table.PROMPT_LENGTH] = 1 << 30
        ints[live, table.SEED_LOW] = torch.arange(rows, dtype=torch.int32, device="cuda")
        stops = ints[live, table.INT_HEADER : table.INT_HEADER + self.spec.limits.stop_ids]
        stops.fill_(table.INERT_TOKEN)
        if drafts := self.spec.spec_depth:
            state[live, table.DRAFTS] = ints[live, table.DRAFT_LIMIT] = drafts
            ints[live, table.FORCE_ACCEPT] = 1 + min(3, drafts) + 16 * min(4, drafts)  # by turns
            self.pools["draft_tokens"].random_(0, self.spec.draft_vocab, generator=generator)
        floats[live, table.TEMPERATURE] = floats[live, table.TOP_P] = 1
        floats[live, table.REPETITION] = 1

    def eager(self, bucket: Bucket, rows: dict[str, Tensor]) -> Callable[[], object]:
        """The ops called one by one."""
        return lambda: step(self.spec, bucket, self.weights, self.pools, rows)

    def arguments(self, bucket: Bucket, rows: dict[str, Tensor]) -> list[Tensor]:
        """The inputs of a compiled program of `bucket` in call order."""
        inputs = self.inputs(bucket)
        named = {"weights": self.weights, "pools": self.pools, "rows": rows}
        return [named[group][name] for group, name in (n.split(".", 1) for n in inputs.names)]

    def experts_hit(self, bucket: Bucket, rows: dict[str, Tensor]) -> float:
        """Mean over the MoE layers of the distinct routed experts of one step."""
        hit: list[int] = []
        router, moe = block.__dict__["router"], block.__dict__["moe"]

        def watch(*arguments: Tensor) -> tuple[Tensor, ...]:
            result: tuple[Tensor, ...] = router(*arguments)
            chosen = result[0][:, : self.spec.shape.experts_per_token]
            hit.append(len(chosen.unique()))
            return result

        def watch_moe(*arguments: Tensor) -> Tensor:
            watch(*arguments[:4], *arguments[6:])
            result: Tensor = moe(*arguments)
            return result

        block.__dict__.update(router=watch, moe=watch_moe)
        try:
            self.eager(bucket, rows)()
        finally:
            block.__dict__.update(router=router, moe=moe)
        return sum(hit) / max(1, len(hit))


def step_floor(
    shape: ModelShape, bucket: Bucket, context: int, hit: float, item: int = 2
) -> tuple[float, float]:
    """(bytes, floating-point operations) that a step cannot do without.

    Every weight that is used is read once, the experts `hit` a layer only; keys and values of
    `context` tokens a row (of the window in window layers) once a row; products count 2 a weight
    and token, attention 4 a head channel, query and key.
    """
    tokens, rows = bucket.tokens, bucket.rows
    moe = shape.layers - shape.dense_layers
    expert = 3 * shape.hidden * shape.expert_width
    head = shape.hidden * shape.real_vocab
    read: float = head + shape.hidden * tokens
    work = 2.0 * head * rows
    for local in (False, True):
        kind, count = (shape.local if local else shape.full), shape.count(local=local)
        width = (kind.heads + 2 * kind.kv_heads) * kind.head_dim + kind.heads * shape.rel_dim
        matrix = shape.hidden * (width + kind.heads * kind.head_dim)
        chunk = tokens // rows
        whole = context + chunk
        keys = min(whole, kind.window + chunk - 1) if kind.window else whole
        pairs = sum(min(context + i + 1, kind.window or context + i + 1) for i in range(chunk))
        read += count * (matrix + rows * keys * 2 * kind.kv_heads * kind.head_dim)
        work += count * (2.0 * tokens * matrix + 4.0 * rows * pairs * kind.heads * kind.head_dim)
    dense = shape.dense_layers * 3 * shape.hidden * shape.dense_width
    gate = shape.hidden * (shape.experts + shape.shared_experts)
    read += dense + moe * (gate + (hit + shape.shared_experts) * expert)
    used = shape.experts_per_token + shape.shared_experts
    work += 2.0 * tokens * (dense + moe * (gate + used * expert))
    return float(item * read), work
