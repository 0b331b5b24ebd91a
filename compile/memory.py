"""The memory bill of one rank: what an engine needs, and what fits a given device.

Pure arithmetic over the spec; weights come from the conversion recipes, everything else from the
pool layout. All values are bytes.
"""

from __future__ import annotations

import msgspec

from inkling_engine.artifacts.compat import machine_memory
from inkling_engine.artifacts.errors import DoesNotFitError
from inkling_engine.artifacts.spec import EngineSpec, LayerKind
from inkling_engine.compile.models.inkling.sizes import weight_bill
from inkling_engine.compile.options import steady_window_pages
from inkling_engine.compile.pools import ITEM_SIZE, entry_bytes, pool_entries, rank_kv_heads

DEVICE_MEMORY = {"sm90": 141 * 10**9}
PROGRAM_BYTES = 3 << 20
SLACK = {"cuda": 2 << 30, "cpu": 256 << 20}


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a rank, line by line; `fits_*` say what a device of `device_memory` can hold.

    Draft lines are of the depths that a round runs, without drafting of all that the model has.
    """

    text_decoder: int
    text_decoder_padding: int
    text_decoder_fp32: int
    drafts: int
    drafts_padding: int
    drafts_fp32: int
    kv_full_per_token: int
    kv_window_per_request: int
    kv_window_pages_per_request: int
    conv_per_request: int
    conv_per_request_scattered: int
    table_per_request: int
    draft_kv_per_token: int
    draft_state_per_request: int
    snapshots: int
    exchange: int
    pools: int
    programs: int
    slack: int
    total: int
    device_memory: int
    fits: bool
    fits_tokens: int
    fits_requests: int


def memory_bill(spec: EngineSpec, device_memory: int | None = None) -> Bill:
    """The bill of one rank of `spec`; `device_memory` defaults to the architecture's,
    for a CPU to this machine's."""
    memory = device_memory or DEVICE_MEMORY.get(spec.arch) or machine_memory()
    weights = weight_bill(spec.shape, spec.dtype, spec.tp)
    weight_bytes = weights.total
    sizes = {entry.name: entry_bytes(entry) for entry in pool_entries(spec)}
    pools = sum(sizes.values())
    programs, slack = PROGRAM_BYTES * len(spec.buckets), SLACK[spec.device]
    conv, scattered = _conv(spec, scattered=False), _conv(spec, scattered=True)
    per_token, per_page_token = _kv_per_token(spec, local=False), _kv_per_token(spec, local=True)
    window_pages = steady_window_pages(spec.shape, spec.page_size) * spec.page_size
    draft_token, draft_page_token, draft_saved = _draft_state(spec)
    draft_request = draft_saved + draft_page_token * window_pages
    drafting = bool(spec.spec_depth)
    per_request = conv + per_page_token * window_pages + _table(spec) + draft_request * drafting
    free = max(0, memory - weight_bytes - programs - slack)
    token = per_token + draft_token * drafting
    return Bill(
        text_decoder=weights.text_decoder,
        text_decoder_padding=weights.text_decoder_padding,
        text_decoder_fp32=weights.text_decoder_fp32,
        drafts=weights.drafts,
        drafts_padding=weights.drafts_padding,
        drafts_fp32=weights.drafts_fp32,
        kv_full_per_token=per_token,
        kv_window_per_request=per_page_token * spec.shape.local.window,
        kv_window_pages_per_request=per_page_token * window_pages,
        conv_per_request=conv,
        conv_per_request_scattered=scattered,
        table_per_request=_table(spec),
        draft_kv_per_token=draft_token,
        draft_state_per_request=draft_request,
        snapshots=spec.pools.snapshots * (conv + draft_saved * drafting),
        exchange=sizes["exchange"],
        pools=pools,
        programs=programs,
        slack=slack,
        total=weight_bytes + pools + programs + slack,
        device_memory=memory,
        fits=weight_bytes + pools + programs + slack <= memory,
        fits_tokens=max(0, free - per_request * spec.max_running) // max(1, token),
        fits_requests=free // (per_request + token * typical_tokens(spec)),
    )


def typical_tokens(spec: EngineSpec) -> int:
    """Of the requests that a bill counts."""
    return min(spec.max_context, 8192)


def fit_pools(spec: EngineSpec, device_memory: int | None = None) -> EngineSpec:
    """The spec with its full-layer pages reduced to what `device_memory` holds.

    Pages for one request of the longest context remain in any case: whether that fits is for the
    bill to say.
    """
    bill = memory_bill(spec, device_memory)
    excess = max(0, bill.total - bill.device_memory)
    token = bill.kv_full_per_token + bill.draft_kv_per_token * bool(spec.spec_depth)
    page = max(1, token * spec.page_size)
    pages = max(1 + spec.pools.table_width, spec.pools.full_pages - -(-excess // page))
    return msgspec.structs.replace(
        spec, pools=msgspec.structs.replace(spec.pools, full_pages=pages)
    )


def require_fit(spec: EngineSpec, bill: Bill) -> None:
    """Raise DoesNotFitError when one rank needs more than the device's memory."""
    if not bill.fits:
        raise DoesNotFitError(
            "device memory",
            f"{bill.device_memory} bytes",
            f"at least {bill.total} bytes for one request of {spec.max_context} tokens",
            "lower --max-context or --max-running, or raise --tp",
        )


def _kv_per_token(spec: EngineSpec, *, local: bool) -> int:
    kind = spec.shape.local if local else spec.shape.full
    return _kv_channels(spec, kind) * ITEM_SIZE[spec.dtype] * spec.shape.count(local=local)


def _kv_channels(spec: EngineSpec, kind: LayerKind) -> int:
    return 2 * rank_kv_heads(kind, spec.tp) * kind.head_dim


def _conv(spec: EngineSpec, *, scattered: bool) -> int:
    """Bytes of one request's windows: k and v by head, attn and mlp whole or by channel shard."""
    shape = spec.shape
    hidden = shape.hidden // spec.tp if scattered else shape.hidden
    channels = 2 * shape.layers * hidden
    for local in (True, False):
        kind = shape.local if local else shape.full
        channels += _kv_channels(spec, kind) * shape.count(local=local)
    return spec.conv_ring * channels * ITEM_SIZE[spec.dtype]


def _table(spec: EngineSpec) -> int:
    lines = 1 + spec.max_running
    tables = [e for e in pool_entries(spec) if e.shape[0] == lines and e.name != "snapshot_lengths"]
    return sum(entry_bytes(entry) for entry in tables if len(entry.shape) == 2) // lines


def _draft_state(spec: EngineSpec) -> tuple[int, int, int]:
    """Bytes of the draft depths' state: KV of full depths a token, of local depths a token, and what
    a request has and a snapshot keeps of it: windows, and what rows are computed again from."""
    shape, item = spec.shape, ITEM_SIZE[spec.dtype]
    full = local = windows = 0
    depths = spec.spec_depth or shape.drafts.depths
    for depth in range(depths):
        kind = shape.draft_kind(depth)
        channels = _kv_channels(spec, kind)
        windows += channels + 2 * shape.hidden
        if kind.window:
            local += channels * item
        else:
            full += channels * item
    again = depths * (shape.hidden * item + ITEM_SIZE["int32"])
    return full, local, spec.conv_ring * windows * item + again
