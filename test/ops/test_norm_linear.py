from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel.linear import linear, norm_linear
from test.ops.cases import ARGS, EPS, FLOATS, assert_close, device_of, each_op_backend_and_dtype, randn, strided, wide

OPS = ("add_rms_norm_linear", "add_rms_norm_gate_up")
NARROW = norm_linear.NARROW
CONFIGS = {"narrow": NARROW, "wide": linear.WIDE}
IN_INTERPRETER = FLOATS if torch.cuda.is_available() else (torch.float32, torch.float16)  # whose bfloat16 dot is wrong


def arguments(rows: int, wide_in: int, wide_out: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """With a bias, and a residual that is much larger than what is added to it."""
    x, residual = (randn(rows, wide_in, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    norm_weight, bias = (randn(size, dtype=dtype, device=device, seed=2) for size in (wide_in, wide_out))
    weight = randn(wide_out, wide_in, dtype=dtype, device=device, seed=3) * wide_in**-0.5
    return strided(x), strided(residual * 8), norm_weight, EPS, strided(weight), bias


def expected_of(name: str, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """By the formula, in float32, from the sum as its dtype holds it."""
    x, residual, norm_weight, eps, weight, bias = args
    summed = wide(residual + x)
    normed = summed / (summed.square().mean(-1, keepdim=True) + eps).sqrt() * wide(norm_weight)
    out = normed @ wide(weight).T + (0 if bias is None else wide(bias))
    if name == "add_rms_norm_gate_up":
        gate, up = out.chunk(2, dim=-1)
        out = gate / (1 + (-gate).exp()) * up
    return out, summed


@each_op_backend_and_dtype(*OPS)
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 33, 66), (8, 512, 48), (17, 96, 40)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_norm_and_product_are_computed_from_the_sum(
    name: str, backend: str, dtype: torch.dtype, shape: tuple[int, int, int], has_bias: bool
) -> None:
    *args, bias = arguments(*shape, dtype, device_of(backend))
    given = (*args, bias if has_bias else None)
    expected = expected_of(name, given)

    out, residual = ops.OPS[name].impls[backend](*given)

    assert_close(out, expected[0], dtype)
    assert_close(residual, expected[1], dtype)


@each_op_backend_and_dtype(*OPS)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_norms_weight_may_be_float32(name: str, backend: str, dtype: torch.dtype, rows: int) -> None:
    """As 1 + weight is."""
    x, residual, norm_weight, *rest = arguments(rows, 96, 48, dtype, device_of(backend))
    args = (x, residual, norm_weight.float() + 1, *rest)
    expected = expected_of(name, args)

    out, residual = ops.OPS[name].impls[backend](*args)

    assert_close(out, expected[0], dtype)
    assert_close(residual, expected[1], dtype)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", IN_INTERPRETER)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize(("wide_in", "wide_out"), [(100, 66), (1024, 32), (1100, 130)])
def test_the_kernel_reads_every_tile_and_writes_no_further_than_its_rows(
    name: str, dtype: torch.dtype, config: linear.Config, rows: int, wide_in: int, wide_out: int
) -> None:
    args = arguments(rows, wide_in, wide_out, dtype, device_of("triton"))
    before = [arg.clone() for arg in args if isinstance(arg, Tensor)]
    expected = expected_of(name, args)

    out, residual = norm_linear.multiply(*args, config=config, is_gated=name == "add_rms_norm_gate_up")

    assert_close(out, expected[0], dtype)
    assert_close(residual, expected[1], dtype)
    for arg, copy in zip((arg for arg in args if isinstance(arg, Tensor)), before, strict=True):
        torch.testing.assert_close(arg, copy, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rows", "out_size", "config", "gated"),
    [
        (1, 6144, NARROW, NARROW),
        (2, 6144, NARROW, None),
        (1, 28672, None, NARROW),
        (3, 6144, None, None),
    ],
)
def test_few_rows_in_bfloat16_use_the_fused_kernel(
    rows: int, out_size: int, config: linear.Config | None, gated: linear.Config | None
) -> None:
    x = torch.empty(rows, 64, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(out_size, 64, dtype=torch.bfloat16, device="meta")

    assert norm_linear.config_of(x, x, weight, norm_linear.RULES) is config
    assert norm_linear.config_of(x, x, weight, norm_linear.GATED_RULES) is gated
    for other in (torch.float16, torch.float32):
        assert norm_linear.config_of(x.to(other), x.to(other), weight.to(other), norm_linear.RULES) is None


@pytest.mark.parametrize("name", OPS)
def test_the_batch_invariant_norm_and_product_are_separate(name: str) -> None:
    op = ops.OPS[name]

    assert op.impls[ops.batch_invariant("triton")] is op.impls[ops.REFERENCE]


def test_gate_without_up_is_refused() -> None:
    *others, weight = ARGS["add_rms_norm_gate_up"](3, torch.float32, device_of("triton"))
    args = (*others, weight[:39])

    with pytest.raises(ValueError, match="39 rows are odd"):
        ops.add_rms_norm_gate_up.impls["triton"](*args)
