"""The state space model of Mamba2."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lightserve.common.ops.activation import softplus_of
from lightserve.common.ops.registry import op
from lightserve.common.ops.state.batch import StateBatch
from lightserve.common.ops.state.linear_scan import LinearScan, scan_by_token


class MambaInputs(NamedTuple):
    """Neighbouring heads share ``b`` and ``c``: there are ``heads / groups`` of them."""

    x: Tensor  # [tokens, heads, dim]
    dt: Tensor  # [tokens, heads]: the step sizes, before bias and softplus
    b: Tensor  # [tokens, groups, state_dim]
    c: Tensor  # [tokens, groups, state_dim]

    def scan(self, step: Tensor, log_decay: Tensor, skip: Tensor) -> LinearScan:
        return LinearScan(self.c, self.b, self.x, log_decay, step, skip=skip)


class MambaParams(NamedTuple):
    a: Tensor  # [heads] float32, negative: the log of the decay for a step of size 1
    dt_bias: Tensor  # [heads]
    d: Tensor  # [heads]: the factor of ``x`` in the result
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    def steps(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        """The step sizes and the logs of their decays, ``[tokens, heads]`` in float32."""
        step = softplus_of(dt.float() + self.dt_bias.float()).clamp(*self.dt_limits)
        return step, step * self.a.float()


@op
def mamba_scan(inputs: MambaInputs, params: MambaParams, states: Tensor, batch: StateBatch) -> Tensor:
    """``S = S * exp(step * a) + step * x b^T; out = S c + d * x`` for each token and head.

    ``states`` ``[rows, heads, dim, state_dim]`` in float32 or bfloat16; the result is like ``x``.
    """
    return scan_by_token(inputs.scan(*params.steps(inputs.dt), params.d), states, batch)
