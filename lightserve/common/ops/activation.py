"""Activations, computed in float32 and returned in the dtype of the input.

They are composed of functions that give an element the same bits wherever it stands. torch's own sigmoid, SiLU and GELU
do not on a CPU: they compute the last few elements of a tensor by another formula, so a row would depend on those
behind it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common.ops.registry import op


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def softplus_of(x: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


@op
def silu(x: Tensor) -> Tensor:
    return _silu(x.float()).to(x.dtype)


@op
def gate(x: Tensor) -> Tensor:
    """The sigmoid: what another tensor is multiplied by."""
    return sigmoid(x.float()).to(x.dtype)


@op
def add_gated(out: Tensor, values: Tensor, gates: Tensor) -> None:
    """``out += values * sigmoid(gates)``; ``gates`` ``[rows, 1]``."""
    out += (values.float() * sigmoid(gates.float())).to(out.dtype)


@op
def relu(x: Tensor) -> Tensor:
    return F.relu(x)


@op
def relu2(x: Tensor) -> Tensor:
    """The square of ReLU."""
    return F.relu(x.float()).square().to(x.dtype)


@op
def gelu(x: Tensor) -> Tensor:
    return _gelu(x.float()).to(x.dtype)


@op
def gelu_tanh(x: Tensor) -> Tensor:
    return _gelu_tanh(x.float()).to(x.dtype)


@op
def xielu(x: Tensor, numbers: Tensor) -> Tensor:
    """A square for positive x, an exponential for the others, and a linear part.

    ``numbers`` ``[4]`` float32: the factors of the three, and the largest x of which the exponential is computed.
    """
    wide = x.float()
    square, exponential, linear, largest = numbers.unbind()
    curve = torch.where(
        wide > 0, square * wide * wide, exponential * (torch.expm1(torch.minimum(wide, largest)) - wide)
    )
    return (curve + linear * wide).to(x.dtype)


@op
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Gated SiLU of ``[tokens, 2 * width]``, gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (_silu(gate) * up).to(gate_up.dtype)


@op
def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Gated GELU of ``[tokens, 2 * width]``, gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (_gelu(gate) * up).to(gate_up.dtype)


@op
def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Gated GELU in its tanh form of ``[tokens, 2 * width]``, gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (_gelu_tanh(gate) * up).to(gate_up.dtype)


@op
def relu2_and_mul(gate_up: Tensor) -> Tensor:
    """Gated square of ReLU of ``[tokens, 2 * width]``, gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.relu(gate).square() * up).to(gate_up.dtype)


@op
def softmax(x: Tensor, dim: int, out_dtype: torch.dtype | None = None) -> Tensor:
    """Along any dimension, for programs of torch; kernels take any strides. ``out_dtype``: None: that of ``x``."""
    return x.float().softmax(dim).to(out_dtype or x.dtype)


@op
def log_softmax(x: Tensor, dim: int, out_dtype: torch.dtype | None = None) -> Tensor:
    """As ``softmax``."""
    return x.float().log_softmax(dim).to(out_dtype or x.dtype)
