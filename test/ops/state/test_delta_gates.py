from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.conformance.inputs.state import delta_gates_args
from test.ops.cases import assert_close, device_of, each_backend_and_dtype, wide


@each_backend_and_dtype(ops.delta_gates)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("heads", "width"), [(3, 1), (32, 1), (5, 24), (8, 128)])
def test_decays_and_betas_of_heads_and_of_their_channels(
    backend: str, dtype: torch.dtype, tokens: int, heads: int, width: int
) -> None:
    a, b, rates, dt_bias = delta_gates_args(tokens, heads, width, dtype, device_of(backend))

    log_decay, beta = ops.delta_gates.impls[backend](a, b, rates, dt_bias)

    wanted = rates.repeat_interleave(width) * F.softplus(wide(a) + dt_bias)
    assert_close(log_decay, wanted, torch.float32)
    assert_close(beta, wide(b).sigmoid(), torch.float32)


@each_backend_and_dtype(ops.delta_gates)
def test_decays_that_have_a_bound(backend: str, dtype: torch.dtype) -> None:
    a, b, rates, dt_bias = delta_gates_args(5, 5, 24, dtype, device_of(backend))

    log_decay, beta = ops.delta_gates.impls[backend](a, b, rates, dt_bias, -5.0)

    assert_close(log_decay, -5.0 * (-rates.repeat_interleave(24) * (wide(a) + dt_bias)).sigmoid(), torch.float32)
    assert_close(beta, wide(b).sigmoid(), torch.float32)


@each_backend_and_dtype(ops.delta_gates)
def test_large_steps_stay_finite(backend: str, dtype: torch.dtype) -> None:
    a = torch.tensor([[-30000.0, -20.0, 0.0, 20.0, 30000.0]], dtype=dtype, device=device_of(backend))
    ones = torch.ones(5, device=a.device)

    log_decay, beta = ops.delta_gates.impls[backend](a, a, -ones, 0 * ones)

    assert_close(log_decay, -F.softplus(wide(a)), torch.float32)
    assert_close(beta, wide(a).sigmoid(), torch.float32)
