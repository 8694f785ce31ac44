"""Norms over the last dimension, computed in float32 and returned in the dtype of ``x``."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common.ops.activation import sigmoid
from lightserve.common.ops.registry import REFERENCE, op


class GatedNorm(NamedTuple):
    """How a gate is applied to a normed row."""

    activation: Literal["silu", "sigmoid"] = "silu"  # of the gate
    gates_first: bool = False  # the norm is of the gated row


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


@op
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm: GatedNorm) -> Tensor:
    """``rms_norm(x) * activation(gate)``, or the norm of ``x * activation(gate)``.

    ``x`` and ``gate`` are ``[tokens, groups, width]``. The norm is over ``width``. ``weight`` is ``[width]``, or
    ``[groups, width]`` if groups have weights of their own.
    """
    wide = gate.float()
    factor = sigmoid(wide) if norm.activation == "sigmoid" else wide * sigmoid(wide)
    if norm.gates_first:
        return rms_norm.impls[REFERENCE](x.float() * factor, weight, eps).to(x.dtype)
    return (rms_norm.impls[REFERENCE](x.float(), weight, eps) * factor).to(x.dtype)
