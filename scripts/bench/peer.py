"""What a folder given to `--peer` offers: another engine's kernels behind one interface.

Its peer.py defines the functions of `Peer`. Each may be captured in a CUDA graph once it has been
called eagerly. T tokens, H hidden, E routed and S shared experts of width I, K experts a token.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor


class Peer(Protocol):
    """The functions of peer.py; states are the peer's own."""

    def name(self) -> str:
        """What it is, for the report."""
        ...

    def prepare_experts(self, gate_weight: Tensor, w13: Tensor, w2: Tensor, shared: int) -> Any:
        """State of a layer from gate_weight [E + S, H], w13 [E + S, 2*I, H], w2 [E + S, H, I]."""
        ...

    def router(
        self, x: Tensor, state: Any, bias: Tensor, scale: Tensor, route_scale: float, top_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H] -> weights [T, K] f32 and ids [T, K] i32 of routed experts, shared [T, S] f32."""
        ...

    def routed(self, x: Tensor, state: Any, weights: Tensor, ids: Tensor) -> Tensor:
        """The routed experts' part [T, H] of the layer's output."""
        ...

    def block(
        self, x: Tensor, state: Any, bias: Tensor, scale: Tensor, route_scale: float, top_k: int
    ) -> tuple[Tensor, Tensor]:
        """Router, routed and shared experts; the two parts [T, H] are not added up."""
        ...

    def prepare_decode(
        self, bounds: Tensor, places: Tensor, heads: int, kv_heads: int, dim: int
    ) -> Any:
        """State of a step whose row i sees tokens places[bounds[i] : bounds[i + 1]]."""
        ...

    def decode_attention(
        self, q: Tensor, r: Tensor, rel_proj: Tensor, k: Tensor, v: Tensor, state: Any
    ) -> Tensor:
        """q [R, heads, D], r [R, heads, c] bf16, k and v [tokens, kv heads, D] -> [R, heads, D]."""
        ...


def load_peer(folder: Path) -> Peer:
    """The module peer.py of `folder`."""
    spec = importlib.util.spec_from_file_location("peer", folder / "peer.py")
    assert spec is not None and spec.loader is not None, f"no peer.py in {folder}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Peer, module)
