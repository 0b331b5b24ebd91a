"""Prints a plan and its memory bill, for people or as JSON."""

from __future__ import annotations

import msgspec

from inkling_engine.compile.memory import typical_tokens
from inkling_engine.compile.plan import Plan, plan_json

LABELS = {
    "text_decoder": "text decoder (unpadded, convs bf16)",
    "text_decoder_padding": "  alignment of tensors",
    "text_decoder_fp32": "  convs and dense scales in fp32",
    "drafts": "draft depths",
    "drafts_padding": "  alignment of tensors",
    "drafts_fp32": "  convs and dense scales in fp32",
    "kv_full_per_token": "KV of full layers a token",
    "kv_window_per_request": "KV of window layers a request",
    "kv_window_pages_per_request": "  in whole pages",
    "conv_per_request": "conv state a request (unscattered)",
    "conv_per_request_scattered": "conv state a request (scattered)",
    "table_per_request": "request table a request",
    "draft_kv_per_token": "KV of full draft depths a token",
    "draft_state_per_request": "draft windows and local KV a request",
    "snapshots": "conv snapshots",
    "exchange": "exchange with the other ranks",
    "pools": "all pools",
    "programs": "programs (estimate)",
    "slack": "slack",
    "total": "total",
    "device_memory": "device memory",
    "fits_tokens": "tokens that fit (full layers)",
    "fits_requests": "requests of {} tokens that fit",
}


def print_plan(plan: Plan, *, as_json: bool) -> None:
    """Write the plan to stdout."""
    if as_json:
        print(msgspec.json.encode(plan_json(plan)).decode())
        return
    spec = plan.spec
    print(f"{spec.model}: tp {spec.tp}, {spec.device} {spec.arch}, {spec.dtype}")
    print(f"items: {', '.join(plan.items)}")
    print("memory of one rank, bytes:")
    for field, label in LABELS.items():
        label = label.format(f"{typical_tokens(spec):,}")
        print(f"  {label:<42}{getattr(plan.bill, field):>18,}")
    verdict = "fits" if plan.bill.fits else "does not fit"
    print(f"  the whole engine {verdict} the device memory")
