"""Gated DeltaNet and Kimi Delta Attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lightserve.common.ops.activation import sigmoid, softplus_of
from lightserve.common.ops.registry import op
from lightserve.common.ops.state.batch import StateBatch
from lightserve.common.ops.state.linear_scan import LinearScan, scan_by_token


class DeltaInputs(NamedTuple):
    """Neighbouring heads share a query and a key: there are ``heads / k_heads`` of them."""

    q: Tensor  # [tokens, k_heads, k_dim]
    k: Tensor  # [tokens, k_heads, k_dim]
    v: Tensor  # [tokens, heads, v_dim]
    log_decay: Tensor  # [tokens, heads], or [tokens, heads, k_dim] for Kimi's; float32, at most 0
    beta: Tensor  # [tokens, heads] float32: how much of the error is corrected
    has_norm: bool = True  # queries and keys are divided by their length

    def scan(self) -> LinearScan:
        return LinearScan(*self[:5], scale=self.k.shape[-1] ** -0.5, has_norm=self.has_norm, corrects=True)


@op
def delta_gates(
    a: Tensor, b: Tensor, rates: Tensor, dt_bias: Tensor, min_log_decay: float | None = None
) -> tuple[Tensor, Tensor]:
    """``rates * softplus(a + dt_bias)`` and ``sigmoid(b)``: the log decays and betas of a gated delta rule, in float32.

    ``a`` and ``dt_bias`` have one or more columns for each head, ``b`` and ``rates`` have one. With ``min_log_decay``
    the log decays are that number times ``sigmoid(-rates * (a + dt_bias))``.
    """
    steps = a.float() + dt_bias.float()
    rates = rates.float().repeat_interleave(a.shape[-1] // len(rates))
    if min_log_decay is None:
        return rates * softplus_of(steps), sigmoid(b.float())
    return min_log_decay * sigmoid(-rates * steps), sigmoid(b.float())


@op
def gated_delta_rule(inputs: DeltaInputs, states: Tensor, batch: StateBatch) -> Tensor:
    """``S = S * decay; S += beta * (v - S k) k^T; out = S q / sqrt(k_dim)`` for each token and head.

    ``states`` ``[rows, heads, v_dim, k_dim]`` in float32 or bfloat16; the result is like ``v``.
    """
    return scan_by_token(inputs.scan(), states, batch)
