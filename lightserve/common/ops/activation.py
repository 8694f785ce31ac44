"""Activations, computed in float32 and returned in the dtype of the input."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightserve.common.ops.registry import op


@op
def silu(x: Tensor) -> Tensor:
    return F.silu(x.float()).to(x.dtype)


@op
def relu(x: Tensor) -> Tensor:
    return F.relu(x)


@op
def relu2(x: Tensor) -> Tensor:
    """The square of ReLU."""
    return F.relu(x.float()).square().to(x.dtype)


@op
def gelu(x: Tensor) -> Tensor:
    return F.gelu(x.float()).to(x.dtype)


@op
def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x.float(), approximate="tanh").to(x.dtype)


@op
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Gated SiLU of ``[tokens, 2 * width]``, gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@op
def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Gated GELU of ``[tokens, 2 * width]``, gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.gelu(gate) * up).to(gate_up.dtype)


@op
def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Gated GELU in its tanh form of ``[tokens, 2 * width]``, gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


@op
def relu2_and_mul(gate_up: Tensor) -> Tensor:
    """Gated square of ReLU of ``[tokens, 2 * width]``, gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.relu(gate).square() * up).to(gate_up.dtype)
