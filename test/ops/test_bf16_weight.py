"""Products of inputs in float32 with weights in bfloat16, for all instructions of the C library."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.cpu_kernel._library import BACKEND
from test.ops.cases import EPS, needs_bf16, randn

pytestmark = [needs_bf16, pytest.mark.usefixtures("variant")]

# Whole tiles of 32 columns and 16 rows, parts of tiles, and widths without tiles
SHAPES = [(33, 20), (96, 40), (576, 101), (576, 32), (2080, 7), (1536, 64)]


@pytest.fixture(autouse=True)
def _native_backend(_reference_backend: None) -> None:
    ops.use_backend(BACKEND, "cpu")


def as_multiplied(x: Tensor, variant: str) -> Tensor:
    """The inputs in float64, rounded as the tiles of AMX need them."""
    return (x.bfloat16() if variant == "amx" and x.shape[1] % 32 == 0 else x).double()


@pytest.mark.parametrize(("wide_in", "wide_out"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_summed_in_float32(variant: str, wide_in: int, wide_out: int, tokens: int, has_bias: bool) -> None:
    x, bias = randn(tokens, wide_in), randn(wide_out, seed=2) if has_bias else None
    weight = (randn(wide_out, wide_in, seed=1) * wide_in**-0.5).bfloat16()

    out = ops.linear(x, weight, bias)

    expected = as_multiplied(x, variant) @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["add_rms_norm_linear", "add_rms_norm_gate_up"])
def test_a_fused_norm_is_rounded_no_earlier_than_its_product_needs(variant: str, name: str) -> None:
    x, residual, norm = randn(9, 576), randn(9, 576, seed=1), randn(576, seed=2)
    weight = (randn(96, 576, seed=3) / 24).bfloat16()

    out, summed = ops.OPS[name](x.clone(), residual.clone(), norm, EPS, weight)

    normed = ops.rms_norm(x + residual, norm, EPS)
    expected = as_multiplied(normed, variant) @ weight.double().T
    if name == "add_rms_norm_gate_up":
        gate, up = expected.chunk(2, dim=1)
        expected = gate.sigmoid() * gate * up
    assert torch.equal(summed, x + residual)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)


def test_a_weight_with_gaps_is_left_to_torch() -> None:
    x, weight = randn(3, 64), randn(20, 128, seed=1).bfloat16()[:, ::2]

    torch.testing.assert_close(ops.linear(x, weight), x @ weight.float().T)
