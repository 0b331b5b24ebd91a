"""RMSNorm of each row.

`rmsnorm(x, weight, eps) -> y`: x, y [rows, width] in the activation dtype, weight [width] in the
activation dtype. y = x * rsqrt(mean(x^2) + eps) * weight, fp32 inside, one rounding (spec 2.2).
"""

import torch
from torch import Tensor

from inkling_engine.kernels._op import define
from inkling_engine.kernels.rmsnorm import reference


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


rmsnorm = define(
    "rmsnorm", "(Tensor x, Tensor weight, float eps) -> Tensor", reference.rmsnorm, _fake
)
