from __future__ import annotations

import pytest
import torch

from lightserve.common import ops
from test.ops.cases import assert_close, device_of, each_backend_and_dtype, randn, strided, wide


@each_backend_and_dtype(ops.linear)
@pytest.mark.parametrize(("tokens", "wide_in", "wide_out"), [(1, 1, 1), (3, 33, 65), (17, 96, 40)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_matches_its_definition(
    backend: str, dtype: torch.dtype, tokens: int, wide_in: int, wide_out: int, has_bias: bool
) -> None:
    x = strided(randn(tokens, wide_in, dtype=dtype, device=device_of(backend)))
    weight = randn(wide_out, wide_in, dtype=dtype, device=device_of(backend), seed=1) * wide_in**-0.5
    bias = randn(wide_out, dtype=dtype, device=device_of(backend), seed=2) if has_bias else None

    out = ops.linear.impls[backend](x, weight, bias)

    assert_close(out, ops.linear(wide(x), wide(weight), None if bias is None else wide(bias)), dtype)
