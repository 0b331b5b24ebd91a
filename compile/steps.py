"""One step as a pure function of (weights, pools, row inputs): metadata, layers, sampling, commit.

Every kind of step is this code. All mutation is declared by the ops' schemas: one-shot row lines,
pools and the request table; the logits are the only value returned.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.compile.models.inkling.model import Decoder
from inkling_engine.compile.pools import destinations
from inkling_engine.kernels.commit import commit
from inkling_engine.kernels.sample import sample
from inkling_engine.kernels.step_metadata import StepMeta, step_metadata

TABLE_POOLS = (
    "request_state",
    "request_ints",
    "request_floats",
    "token_counts",
    "full_table",
    "window_table",
    "snapshot_slots",
    "snapshot_lengths",
    "draft_tokens",
)
NO_DRAFTS = 0
ROW_INPUTS = (
    "row_slots",
    "row_counts",
    "row_sources",
    "row_flags",
    "token_ids",
    "admit_ints",
    "admit_floats",
    "page_updates",
    "snapshot_updates",
)


def step(
    spec: EngineSpec,
    bucket: Bucket,
    weights: Mapping[str, Tensor],
    pools: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
) -> Tensor:
    """Run one step of `bucket`; returns the logits [rows, rank vocabulary] float32."""
    meta = StepMeta(
        *step_metadata(
            *(pools[name] for name in TABLE_POOLS),
            *(rows[name] for name in ROW_INPUTS),
            spec.page_size,
            spec.snapshot_grid,
            destinations(spec, bucket),
            NO_DRAFTS,
        )
    )
    decoder = Decoder(spec.shape, weights, pools, meta, spec.tp)
    logits = decoder.logits(bucket.kind)
    _sample_and_commit(spec, pools, meta, logits)
    return logits


def _sample_and_commit(
    spec: EngineSpec, pools: Mapping[str, Tensor], meta: StepMeta, logits: Tensor
) -> None:
    limits = spec.limits
    chosen = sample(
        logits,
        pools["token_counts"],
        pools["request_state"],
        pools["request_ints"],
        pools["request_floats"],
        meta.tokens,
        meta.token_rows,
        meta.slots,
        meta.starts,
        meta.lengths,
        meta.sample_rows,
        meta.emits,
        limits.stop_ids,
        limits.bias_ids,
        limits.top_logprobs,
        NO_DRAFTS,
    )
    commit(
        pools["request_state"],
        pools["token_counts"],
        pools["results_int"],
        pools["results_float"],
        pools["step_counter"],
        pools["snapshot_slots"],
        pools["snapshot_lengths"],
        pools["request_ints"],
        *chosen,
        meta.tokens,
        meta.slots,
        meta.starts,
        meta.lengths,
        meta.emits,
        meta.destination_slots,
        meta.destination_offsets,
        limits.stop_ids,
        NO_DRAFTS,
    )
