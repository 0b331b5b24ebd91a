"""Router and experts, one after the other (spec 2.7, 2.8)."""

from torch import Tensor

from inkling_engine.kernels.experts.reference import experts
from inkling_engine.kernels.router.reference import router


def moe(
    y: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    gate_scale: Tensor,
    w13: Tensor,
    w2: Tensor,
    starts: Tensor,
    top_k: int,
    shared: int,
    route_scale: float,
) -> Tensor:
    """Choose, run and mix experts; see the package docstring."""
    choice = router(y, gate_weight, gate_bias, gate_scale, starts, top_k, shared, route_scale)
    return experts(y, w13, w2, *choice, starts)
