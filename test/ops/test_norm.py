from __future__ import annotations

from typing import Any

import pytest
import torch

from lightserve.common import ops
from test.ops.cases import (
    EPS,
    assert_close,
    device_of,
    each_backend_and_dtype,
    each_op_backend_and_dtype,
    randn,
    strided,
    wide,
)

SHAPES = [(1, 1), (3, 33), (5, 96), (2, 3, 64)]


@each_backend_and_dtype(ops.rms_norm)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_matches_its_definition(backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = randn(*shape, dtype=dtype, device=device_of(backend))
    weight = randn(shape[-1], dtype=dtype, device=device_of(backend), seed=1)

    out = ops.rms_norm.impls[backend](x, weight, EPS)

    assert_close(out, ops.rms_norm(wide(x), wide(weight), EPS), dtype)


@each_backend_and_dtype(ops.layer_norm)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_matches_its_definition(backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = randn(*shape, dtype=dtype, device=device_of(backend)) + 3
    weight, bias = (randn(shape[-1], dtype=dtype, device=device_of(backend), seed=seed) for seed in (1, 2))

    out = ops.layer_norm.impls[backend](x, weight, bias, EPS)

    assert_close(out, ops.layer_norm(wide(x), wide(weight), wide(bias), EPS), dtype)


@each_backend_and_dtype(ops.add_rms_norm)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_adds_into_the_residual_and_norms_the_sum(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, residual = (randn(*shape, dtype=dtype, device=device_of(backend), seed=seed) for seed in (0, 1))
    weight = randn(shape[-1], dtype=dtype, device=device_of(backend), seed=2)
    sum_expected = wide(residual)
    out_expected = ops.add_rms_norm(wide(x), sum_expected, wide(weight), EPS)

    out = ops.add_rms_norm.impls[backend](x, residual, weight, EPS)

    assert_close(out, out_expected, dtype)
    assert_close(residual, sum_expected, dtype)


@each_backend_and_dtype(ops.add_layer_norm)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_layer_norm_adds_into_the_residual_and_norms_the_sum(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, residual = (randn(*shape, dtype=dtype, device=device_of(backend), seed=seed) for seed in (0, 1))
    weight, bias = (randn(shape[-1], dtype=dtype, device=device_of(backend), seed=seed) for seed in (2, 3))
    sum_expected = wide(residual)
    out_expected = ops.add_layer_norm(wide(x), sum_expected, wide(weight), wide(bias), EPS)

    out = ops.add_layer_norm.impls[backend](x, residual, weight, bias, EPS)

    assert_close(out, out_expected, dtype)
    assert_close(residual, sum_expected, dtype)


@each_backend_and_dtype(ops.rms_norm)
@pytest.mark.parametrize("shape", [(4, 33), (3, 2, 20)])
def test_rms_norm_reads_a_part_of_a_wider_row(backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = strided(randn(*shape, dtype=dtype, device=device_of(backend)))
    weight = randn(shape[-1], dtype=dtype, device=device_of(backend), seed=1)

    out = ops.rms_norm.impls[backend](x, weight, EPS)

    assert_close(out, ops.rms_norm(wide(x), wide(weight), EPS), dtype)


@each_backend_and_dtype(ops.rms_norm)
def test_rms_norm_takes_every_other_number_of_a_weight(backend: str, dtype: torch.dtype) -> None:
    x = randn(3, 64, dtype=dtype, device=device_of(backend))
    weight = randn(128, dtype=dtype, device=device_of(backend), seed=1)[::2]

    out = ops.rms_norm.impls[backend](x, weight, EPS)

    assert_close(out, ops.rms_norm(wide(x), wide(weight), EPS), dtype)


@each_backend_and_dtype(ops.add_rms_norm)
def test_add_rms_norm_writes_no_further_than_the_residual(backend: str, dtype: torch.dtype) -> None:
    x, buffer = (randn(4, n, dtype=dtype, device=device_of(backend), seed=n) for n in (40, 48))
    weight = randn(33, dtype=dtype, device=device_of(backend), seed=2)
    expected = wide(buffer)
    expected[:, 5:38] += x[:, :33]

    out = ops.add_rms_norm.impls[backend](x[:, :33], buffer[:, 5:38], weight, EPS)

    assert_close(out, ops.rms_norm(expected[:, 5:38], wide(weight), EPS), dtype)
    assert_close(buffer, expected, dtype)


@each_backend_and_dtype(ops.add_rms_norm)
def test_add_rms_norm_keeps_a_float32_residual_in_float32(backend: str, dtype: torch.dtype) -> None:
    x = randn(3, 48, dtype=dtype, device=device_of(backend))
    residual = randn(3, 48, device=device_of(backend), seed=1)
    weight = randn(48, dtype=dtype, device=device_of(backend), seed=2)
    sum_expected = wide(residual)
    out_expected = ops.add_rms_norm(wide(x), sum_expected, wide(weight), EPS)

    out = ops.add_rms_norm.impls[backend](x, residual, weight, EPS)

    assert_close(out, out_expected, torch.float32)
    assert_close(residual, sum_expected, torch.float32)


@each_backend_and_dtype(ops.layer_norm)
def test_layer_norm_of_a_row_far_from_zero_keeps_its_variance(backend: str, dtype: torch.dtype) -> None:
    x = randn(2, 96, dtype=dtype, device=device_of(backend)) + 100
    weight, bias = torch.ones_like(x[0]), torch.zeros_like(x[0])

    out = ops.layer_norm.impls[backend](x, weight, bias, EPS)

    assert_close(out, ops.layer_norm(wide(x), wide(weight), wide(bias), EPS), dtype)


@each_op_backend_and_dtype("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
def test_a_float32_weight_keeps_its_digits_with_any_input(name: str, backend: str, dtype: torch.dtype) -> None:
    """1 + weight of Gemma and Nemotron: half precision would round most of the weight away."""
    device, is_layer_norm, adds = device_of(backend), "layer" in name, "add" in name
    x = randn(128, 96, dtype=dtype, device=device)
    residuals = [torch.zeros_like(x)] if adds else []
    weight = 1 + randn(96, device=device, seed=1) * 1e-3
    params = (weight, torch.zeros_like(weight)) if is_layer_norm else (weight,)
    norm: Any = ops.layer_norm if is_layer_norm else ops.rms_norm

    out = ops.OPS[name].impls[backend](x, *residuals, *params, EPS)

    expected = norm(wide(x), *params, EPS)
    assert_close(out, expected, dtype)
    ratio = (out.float() / expected).mean(0)  # over the rows, the rounding of the output averages out
    assert (ratio - 1).abs().max() < max(torch.finfo(dtype).eps / 8, 1e-6)
