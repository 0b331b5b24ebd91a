"""One step as a pure function of (weights, pools, row inputs): metadata, layers, sampling, commit,
and in an engine with drafting the next drafts.

Every kind of step is this code. All mutation is declared by the ops' schemas: one-shot row lines,
pools and the request table; the logits are the only value returned.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from inkling_engine.artifacts.spec import Bucket, EngineSpec
from inkling_engine.compile.models.inkling.block import exchange
from inkling_engine.compile.models.inkling.calls import Calls
from inkling_engine.compile.models.inkling.drafts import DraftDecoder
from inkling_engine.compile.models.inkling.model import Decoder
from inkling_engine.compile.pools import destinations
from inkling_engine.kernels._candidates import BUDGET
from inkling_engine.kernels.candidates import candidates
from inkling_engine.kernels.commit import commit
from inkling_engine.kernels.draft_candidates import draft_candidates
from inkling_engine.kernels.draft_commit import draft_commit
from inkling_engine.kernels.draft_gather import draft_gather
from inkling_engine.kernels.draft_metadata import DraftMeta, draft_metadata
from inkling_engine.kernels.draft_sample import draft_sample
from inkling_engine.kernels.gather_logits import gather_logits
from inkling_engine.kernels.resample import resample
from inkling_engine.kernels.sample import sample
from inkling_engine.kernels.step_metadata import StepMeta, step_metadata

Tensors = Mapping[str, Tensor]

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
GUESSED_FROM = "token_counts", "request_state", "request_ints", "request_floats", "draft_tokens"
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
    spec: EngineSpec, bucket: Bucket, weights: Tensors, pools: Tensors, rows: Tensors
) -> Tensor:
    """Run one step of `bucket`; returns this rank's columns of the logits [samples, C] float32 (a
    sample a row, in a verify step one a token)."""
    calls = Calls(spec)
    meta, hidden, logits = target_phase(spec, bucket, weights, pools, rows, calls)
    if spec.spec_depth:
        draft_phase(spec, bucket, weights, pools, meta, hidden, calls)
    assert calls.made == calls.total, "a number left out would let ranks overwrite what others read"
    return logits


def target_phase(
    spec: EngineSpec,
    bucket: Bucket,
    weights: Tensors,
    pools: Tensors,
    rows: Tensors,
    calls: Calls,
) -> tuple[StepMeta, Tensor, Tensor]:
    """Metadata, layers, sampling, commit; returns the metadata, hidden rows [T, H] and logits."""
    meta = StepMeta(
        *step_metadata(
            *(pools[name] for name in TABLE_POOLS),
            *(rows[name] for name in ROW_INPUTS),
            spec.page_size,
            spec.snapshot_grid,
            destinations(spec, bucket),
            bucket.drafts,
        )
    )
    decoder = Decoder(spec.shape, weights, pools, meta, spec.tp, calls)
    hidden = decoder.hidden(bucket)
    logits = decoder.logits(hidden)
    chosen = _sample(spec, bucket, pools, meta, logits, calls)
    _commit(spec, bucket, pools, meta, chosen)
    calls.commit()
    return meta, hidden, logits


def _sample(
    spec: EngineSpec, bucket: Bucket, pools: Tensors, meta: StepMeta, logits: Tensor, calls: Calls
) -> tuple[Tensor, ...]:
    """Tokens, logprobs and the top ones, the same on all ranks. Several choose from candidates; what
    these do not prove is drawn from the whole logits, for which no rank else needs the others'."""
    limits, ranks = spec.limits, exchange(pools)
    step = (
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
    )
    sizes = limits.stop_ids, limits.bias_ids, limits.top_logprobs, bucket.drafts
    numbers, vocab = (*calls.take(), spec.tp), spec.shape.real_vocab
    if spec.tp == 1:
        alone: tuple[Tensor, ...] = sample(logits, *step, meta.emits, *sizes)
        return alone
    *chosen, unsure = candidates(logits, *step, meta.emits, *sizes, *ranks, BUDGET, *numbers, vocab)
    whole = gather_logits(logits, unsure, *ranks, *calls.take(), spec.tp, vocab)
    resample(whole, *step, unsure, *sizes, *chosen)
    return tuple(chosen)


def _commit(
    spec: EngineSpec,
    bucket: Bucket,
    pools: Tensors,
    meta: StepMeta,
    chosen: tuple[Tensor, ...],
) -> None:
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
        spec.limits.stop_ids,
        bucket.drafts,
    )


def draft_phase(
    spec: EngineSpec,
    bucket: Bucket,
    weights: Tensors,
    pools: Tensors,
    step_meta: StepMeta,
    hidden: Tensor,
    calls: Calls,
) -> None:
    """Bring the draft depths up to the frontier and choose the next round's drafts."""
    most = 1 + bucket.drafts if bucket.drafts else 0
    meta = _draft_meta(spec, most, pools, step_meta)
    rows = (meta.slots, meta.starts, meta.lengths)
    first = draft_gather(
        hidden, pools["draft_hidden"], meta.token_rows, meta.hidden_rows, meta.sources, meta.starts
    )
    decoder = DraftDecoder(spec, weights, pools, meta, most, calls)
    for depth, logits in enumerate(decoder.logits(first)):
        guess = (
            logits,
            *(pools[name] for name in GUESSED_FROM),
            meta.ids,
            *rows,
            meta.emits,
            depth,
            spec.spec_depth,
            spec.limits.stop_ids,
            spec.limits.bias_ids,
        )
        numbers = (*calls.take(), spec.tp, spec.draft_vocab)
        if spec.tp == 1:
            draft_sample(*guess)
        else:
            draft_candidates(*guess, *exchange(pools), *numbers)
    draft_commit(
        pools["request_state"],
        pools["draft_hidden"],
        pools["recent_tokens"],
        pools["request_ints"],
        first,
        meta.ids,
        *rows,
        meta.destination_slots,
        meta.destination_offsets,
        meta.emits,
        spec.spec_depth,
    )


def _draft_meta(spec: EngineSpec, most: int, pools: Tensors, step_meta: StepMeta) -> DraftMeta:
    """Metadata of the draft phase after the step of `step_meta`, of at most `most` tokens a row, is
    committed."""
    return DraftMeta(
        *draft_metadata(
            pools["request_state"],
            pools["full_table"],
            pools["window_table"],
            pools["recent_tokens"],
            step_meta.tokens,
            step_meta.slots,
            step_meta.sources,
            step_meta.starts,
            step_meta.lengths,
            step_meta.destination_slots,
            step_meta.destination_offsets,
            step_meta.emits,
            spec.page_size,
            spec.spec_depth,
            most,
        )
    )
