"""The short convolution, by the definition and by every backend."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.conformance.inputs.state import DECODES, MIXED, NO_ROW, ROWS, SNAPSHOTS, Request, conv_args, state_batch
from test.ops.cases import TOLERANCE, assert_close, device_of, each_backend_and_dtype, randn, wide

CLOSE = TOLERANCE[torch.float32]


@pytest.mark.parametrize("has_silu", [False, True])
def test_the_definition_is_pytorchs_depthwise_convolution(has_silu: bool) -> None:
    x, (weight, bias, _), states, batch = conv_args([(9, NO_ROW, 0)], 6, torch.float32, "cpu")

    out = ops.causal_conv1d(x, ops.ConvParams(weight, bias, has_silu), states, batch)

    expected = F.conv1d(F.pad(x.T, (3, 0)), weight[:, None], bias, groups=6).T
    torch.testing.assert_close(out, F.silu(expected) if has_silu else expected, **CLOSE)
    assert torch.equal(states[0], x[-3:])


@pytest.mark.parametrize("cut", [1, 2, 3, 8])
def test_a_request_may_be_cut_anywhere(cut: int) -> None:
    x, params, states, batch = conv_args([(9, NO_ROW, 0)], 6, torch.float32, "cpu")
    whole = ops.causal_conv1d(x, params, states, batch)

    first = ops.causal_conv1d(x[:cut], params, states, state_batch([(cut, NO_ROW, 1)], "cpu"))
    second = ops.causal_conv1d(x[cut:], params, states, state_batch([(9 - cut, 1, 2)], "cpu"))

    torch.testing.assert_close(torch.cat((first, second)), whole, **CLOSE)
    assert torch.equal(states[2], states[0])


@each_backend_and_dtype(ops.causal_conv1d)
@pytest.mark.parametrize("requests", [MIXED, DECODES, SNAPSHOTS], ids=["mixed", "decodes", "snapshots"])
@pytest.mark.parametrize(("channels", "width", "has_silu"), [(33, 4, True), (600, 3, False)])
def test_causal_conv1d_matches_its_definition(
    backend: str, dtype: torch.dtype, requests: list[Request], channels: int, width: int, has_silu: bool
) -> None:
    x, (weight, bias, _), states, batch = conv_args(requests, channels, dtype, device_of(backend), width)
    expected_states = wide(states)
    wide_params = ops.ConvParams(wide(weight), wide(bias) if has_silu and bias is not None else None, has_silu)
    expected = ops.causal_conv1d(wide(x), wide_params, expected_states, batch)

    params = ops.ConvParams(weight, bias if has_silu else None, has_silu)
    out = ops.causal_conv1d.impls[backend](x, params, states, batch)

    assert_close(out, expected, dtype)
    assert torch.equal(states.float().nan_to_num(7.0), expected_states.nan_to_num(7.0))


@each_backend_and_dtype(ops.causal_conv1d)
def test_a_padding_request_has_no_tokens(backend: str, dtype: torch.dtype) -> None:
    x, params, states, _ = conv_args([(2, 1, 1)], 16, dtype, device_of(backend))
    expected = ops.causal_conv1d(x, params, states.clone(), state_batch([(2, 1, 1)], device_of(backend)))
    padded = state_batch([(2, 1, 1), (0, NO_ROW, NO_ROW)], device_of(backend))

    out = ops.causal_conv1d.impls[backend](torch.cat((x, x)), params, states, padded)

    assert_close(out[:2], expected.float(), dtype)
    assert states[[row for row in range(ROWS) if row != 1]].isnan().all()


def test_triton_refuses_a_width_over_its_limit() -> None:
    x, _, states, batch = conv_args([(2, 1, 1)], 16, torch.float32, device_of("triton"))

    with pytest.raises(ValueError, match="the width 17 is over the limit 16"):
        ops.causal_conv1d.impls["triton"](x, ops.ConvParams(randn(16, 17)), states, batch)
