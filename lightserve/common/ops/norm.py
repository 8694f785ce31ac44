"""Norms over the last dimension, computed in float32 and returned in the dtype of ``x``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common.ops.registry import op


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight``."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


@op
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``residual += x`` in place, then the norm of the sum."""
    residual += x
    return rms_norm(residual, weight, eps)


@op
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps).to(x.dtype)


@op
def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``residual += x`` in place, then the norm of the sum."""
    residual += x
    return layer_norm(residual, weight, bias, eps)
