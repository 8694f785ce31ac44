"""Rows in 8 bits, and products of them with weights in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops import InputQuant, QuantizedRows, RowQuant
from lightserve.common.triton_kernel.linear import (
    _eight_bit_linear,
    _scaled_products,
    _weight_only_linear,
    quantized_linear,
)
from test.ops.cases import EPS, assert_close, device_of, each_backend_and_dtype, eight_bit_weight, randn, strided, wide

FP8, INT8 = torch.float8_e4m3fn, torch.int8
CODES = pytest.mark.parametrize("code", [FP8, INT8], ids=["fp8", "int8"])
GROUPS = pytest.mark.parametrize("group", [None, 32, "static"])


def quant_of(code: torch.dtype, group: Any, device: str) -> RowQuant:
    if group == "static":
        return RowQuant(code, scale=torch.tensor(0.01, device=device))
    return RowQuant(code, group)


def rows_of(x: Tensor, quant: RowQuant) -> QuantizedRows:
    """The definition of ``quantize_rows``."""
    return ops.quantize_rows.impls[ops.REFERENCE](x, quant)


def assert_same_rows(found: QuantizedRows, expected: QuantizedRows) -> None:
    """A code may be the next one, where a quotient lies in the middle between two."""
    torch.testing.assert_close(found.scales, expected.scales, rtol=1e-6, atol=0)
    is_same = found.codes.float() == expected.codes.float()
    assert is_same.float().mean() > 0.99
    torch.testing.assert_close(found.dequantize(), expected.dequantize(), rtol=0.13, atol=1e-2)


@CODES
def test_rows_are_rounded_to_the_nearest_code(code: torch.dtype) -> None:
    x = randn(5, 64)
    x[2] = 0

    rows = rows_of(x, RowQuant(code, 16))

    error = (rows.dequantize() - x).abs().view(5, 4, 16)
    step = {FP8: 2**-4, INT8: 0.5 / 127}[code]  # of the largest number of a group
    assert (error <= 1.001 * step * x.view(5, 4, 16).abs().amax(-1, keepdim=True)).all()
    assert rows.scales.shape == (5, 4)
    assert (rows.dequantize()[2] == 0).all()


@CODES
def test_a_static_scale_clamps_larger_numbers(code: torch.dtype) -> None:
    rows = rows_of(torch.tensor([[100.0, -100.0, 0.1, 0.0]]), RowQuant(code, scale=torch.tensor(0.1)))

    most = {FP8: 448.0, INT8: 127.0}[code]
    assert rows.codes.float().tolist() == [[most, -most, 1.0, 0.0]]


@each_backend_and_dtype(ops.quantize_rows)
@CODES
@GROUPS
@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (3, 544)])
def test_rows_match_their_definition(
    backend: str, dtype: torch.dtype, code: torch.dtype, group: Any, shape: tuple[int, int]
) -> None:
    x, quant = strided(randn(*shape, dtype=dtype, device=device_of(backend))), quant_of(code, group, device_of(backend))

    assert_same_rows(ops.quantize_rows.impls[backend](x, quant), rows_of(x, quant))


@each_backend_and_dtype(ops.silu_and_mul_quantize)
@CODES
@GROUPS
def test_gated_rows_match_their_definition(backend: str, dtype: torch.dtype, code: torch.dtype, group: Any) -> None:
    x, quant = strided(randn(5, 192, dtype=dtype, device=device_of(backend))), quant_of(code, group, device_of(backend))

    assert_same_rows(ops.silu_and_mul_quantize.impls[backend](x, quant), rows_of(ops.silu_and_mul(x), quant))


@each_backend_and_dtype(ops.add_rms_norm_quantize)
@CODES
@GROUPS
def test_normed_rows_match_their_definition(backend: str, dtype: torch.dtype, code: torch.dtype, group: Any) -> None:
    x, residual = (randn(5, 96, dtype=dtype, device=device_of(backend), seed=seed) for seed in (0, 1))
    weight, quant = randn(96, dtype=dtype, device=device_of(backend), seed=2), quant_of(code, group, device_of(backend))
    expected = residual.clone()
    rows = rows_of(ops.add_rms_norm(x, expected, weight, EPS), quant)

    found = ops.add_rms_norm_quantize.impls[backend](strided(x), residual, weight, EPS, quant)

    assert_same_rows(found, rows)
    assert torch.equal(residual, expected)


def expected_of(rows: QuantizedRows, weight: Any, bias: Tensor | None) -> Tensor:
    out: Tensor = rows.dequantize() @ weight.dequantize().T
    return out if bias is None else out + wide(bias)


@each_backend_and_dtype(ops.linear_quantized_rows)
@CODES
@pytest.mark.parametrize("groups", [(None, None), (32, 32), (None, 32), (32, None), (16, 16)])
@pytest.mark.parametrize("shape", [(1, 64, 33), (17, 288, 80), (70, 96, 20)])
def test_a_product_of_8_bit_rows_matches_its_definition(
    backend: str,
    dtype: torch.dtype,
    code: torch.dtype,
    groups: tuple[int | None, int | None],
    shape: tuple[int, int, int],
) -> None:
    device, (tokens, wide_in, wide_out) = device_of(backend), shape
    rows = rows_of(randn(tokens, wide_in, device=device), RowQuant(code, groups[0]))
    weight = eight_bit_weight(wide_out, wide_in, code, device, group=groups[1] or wide_in)
    bias = randn(wide_out, dtype=dtype, device=device, seed=2)

    out = ops.linear_quantized_rows.impls[backend](*rows, weight, bias, dtype)

    if code == FP8 and dtype == torch.float32 and device == "cuda":  # its own sums over fp8 keep 14 bits
        torch.testing.assert_close(out, expected_of(rows, weight, bias), rtol=1e-3, atol=1e-3)
    else:
        assert_close(out, expected_of(rows, weight, bias), dtype)


@pytest.mark.parametrize("config", [_eight_bit_linear.NARROW, _eight_bit_linear.WIDE], ids=["narrow", "wide"])
@CODES
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_product_reads_every_tile_in_either_way(
    config: _eight_bit_linear.Config, code: torch.dtype, tokens: int
) -> None:
    device = device_of("triton")
    rows = rows_of(randn(tokens, 1100, device=device), RowQuant(code))
    weight = eight_bit_weight(130, 1100, code, device)

    out = _eight_bit_linear.multiply(rows, weight, None, torch.float32, config)

    assert_close(out, expected_of(rows, weight, None), torch.float32)


def test_shared_scales_are_loaded_row_by_row_into_the_same_memory() -> None:
    weight = eight_bit_weight(40, 128, FP8, "cpu", group=64)
    assert isinstance(weight, ops.Fp8Weight)
    shared = weight.share_scales(16)
    places = shared.codes.data_ptr(), shared.scales.data_ptr()
    other = eight_bit_weight(40, 128, FP8, "cpu", group=64)
    other = replace(other, scales=(other.scales[:3] * 2).repeat_interleave(16, 0)[:40])

    loaded = shared.for_loading()
    loaded.copy_(other)
    shared.store_(loaded)

    assert torch.equal(shared.dequantize(), other.dequantize())
    assert (shared.codes.data_ptr(), shared.scales.data_ptr()) == places
    assert loaded.codes.data_ptr() == shared.codes.data_ptr()  # they have the same layout


def test_weights_of_a_block_of_rows_may_share_their_scales() -> None:
    device = device_of("triton")
    weight = eight_bit_weight(80, 128, FP8, device, group=64)
    blocks = weight.scales[:5].repeat_interleave(16, 0)
    weight = replace(weight, scales=blocks)
    assert isinstance(weight, ops.Fp8Weight)

    shared = weight.share_scales(16)

    assert shared.scales.shape == (5, 2)
    assert torch.equal(shared.dequantize(), weight.dequantize())
    assert torch.equal(shared.rows(slice(3, 40)).dequantize(), weight.dequantize()[3:40])
    rows = rows_of(randn(3, 128, device=device), RowQuant(FP8, 64))
    for backend in ("triton", ops.batch_invariant("triton")):
        out = ops.linear_quantized_rows.impls[backend](*rows, shared, None, torch.float32)
        assert_close(out, expected_of(rows, weight, None), torch.float32)
        x = randn(3, 128, device=device)
        assert_close(ops.linear_fp8.impls[backend](x, shared), x @ weight.dequantize().T, torch.float32)


@CODES
@each_backend_and_dtype(ops.linear_int8)
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("group", [None, 16, 32])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_a_product_with_unrounded_rows_widens_the_weight(
    code: torch.dtype, backend: str, dtype: torch.dtype, has_offsets: bool, group: int | None, tokens: int
) -> None:
    device = device_of(backend)
    x, bias = randn(tokens, 288, dtype=dtype, device=device), randn(33, dtype=dtype, device=device, seed=2)
    weight = eight_bit_weight(33, 288, code, device, group=group or 288, has_offsets=has_offsets)
    product = ops.linear_int8 if code == INT8 else ops.linear_fp8
    if backend not in product.impls:
        pytest.skip("the backend has no product of this kind")

    out = product.impls[backend](strided(x), weight, bias)

    assert_close(out, wide(x) @ weight.dequantize().T + wide(bias), dtype)


@pytest.mark.parametrize("group", [None, 48])
@CODES
def test_a_widened_weight_is_the_dequantised_one(code: torch.dtype, group: int | None) -> None:
    weight = eight_bit_weight(5, 96, code, device_of("triton"), group=group or 96, has_offsets=True)
    if code == FP8:
        weight.codes.view(torch.uint8)[0] = torch.arange(96, device=weight.device)  # subnormals too

    torch.testing.assert_close(_weight_only_linear.dequantize(weight, torch.float32), weight.dequantize())


@CODES
@pytest.mark.parametrize("inputs", [InputQuant.TOKEN, InputQuant.STATIC, InputQuant.GROUP])
def test_a_product_rounds_its_input_as_its_weight_says(code: torch.dtype, inputs: InputQuant) -> None:
    ops.use_backend("triton")
    device = device_of("triton")
    weight = eight_bit_weight(20, 96, code, device, group=32 if inputs is InputQuant.GROUP else 96)
    weight = replace(weight, input_quant=inputs, input_scale=torch.tensor(0.05, device=device))
    product = ops.linear_int8 if code == INT8 else ops.linear_fp8
    x = randn(5, 96, device=device)

    out = product.impls["triton"](x, weight)

    assert_close(out, product.impls[ops.REFERENCE](x, weight), torch.float32)
    assert (out - x @ weight.dequantize().T).abs().max() > 1e-3


@CODES
def test_a_batch_invariant_product_does_not_depend_on_the_other_rows(code: torch.dtype) -> None:
    backend = ops.batch_invariant("triton")
    ops.use_backend(backend, "triton")
    device = device_of(backend)
    weight = eight_bit_weight(40, 160, code, device)
    x = randn(70, 160, device=device)
    product = ops.linear_int8 if code == INT8 else ops.linear_fp8
    for inputs in (InputQuant.NONE, InputQuant.TOKEN):
        rounded = replace(weight, input_quant=inputs)

        whole = product(x, rounded)

        for begin, end in [(0, 1), (69, 70), (3, 36), (1, 70)]:
            assert torch.equal(product(x[begin:end], rounded), whole[begin:end])


@pytest.mark.parametrize(
    ("code", "rows", "groups", "product"),
    [
        (FP8, 16, (1, 1), None),
        (FP8, 17, (1, 1), _scaled_products.tensorwise),
        (FP8, 129, (1, 1), _scaled_products.rowwise),
        (FP8, 127, (2, 2), None),
        (FP8, 128, (2, 2), _scaled_products.blockwise),
        (FP8, 128, (2, 1), None),
        (INT8, 128, (1, 1), None),
        (INT8, 129, (1, 1), _scaled_products.int_product),
        (INT8, 129, (2, 1), None),
    ],
)
def test_the_number_of_rows_chooses_the_product(
    code: torch.dtype, rows: int, groups: tuple[int, int], product: object
) -> None:
    weight = eight_bit_weight(256, 256, code, "cpu", group=256 // groups[0])
    if isinstance(weight, ops.Fp8Weight) and groups[0] > 1:
        weight = replace(weight, scales=weight.scales[:2], rows_per_scale=128)

    assert quantized_linear.product_of(rows, weight, groups[1], torch.bfloat16, True) is product
    if product is _scaled_products.blockwise:
        assert quantized_linear.product_of(rows, weight, groups[1], torch.bfloat16, False) is None


def test_sizes_that_torch_refuses_are_left_to_the_kernel() -> None:
    assert quantized_linear.product_of(512, eight_bit_weight(256, 200, FP8, "cpu"), 1, torch.bfloat16, True) is None


@pytest.mark.parametrize("product", [_scaled_products.tensorwise, _scaled_products.rowwise], ids=["tensor", "row"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_torch_products_of_fp8_are_scaled(product: Any, has_bias: bool) -> None:
    device = device_of("triton")
    rows = rows_of(randn(20, 96, device=device), RowQuant(FP8))
    weight = eight_bit_weight(48, 96, FP8, device)
    bias = randn(48, device=device, seed=2) if has_bias else None

    out = product(rows, weight, bias, torch.float32)

    torch.testing.assert_close(out, expected_of(rows, weight, bias), rtol=1.6e-2, atol=1.6e-2)


def test_the_integer_product_of_torch_is_exact() -> None:
    device = device_of("triton")
    rows = rows_of(randn(140, 96, device=device), RowQuant(INT8))
    weight = eight_bit_weight(48, 96, INT8, device)

    out = _scaled_products.int_product(rows, weight, None, torch.float32)

    assert_close(out, expected_of(rows, weight, None), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [128, 200])
def test_the_blockwise_product_of_torch_reads_its_scales(tokens: int) -> None:
    rows = rows_of(randn(tokens, 384, device="cuda"), RowQuant(FP8, 128))
    weight = eight_bit_weight(256, 384, FP8, "cuda", group=128)
    weight = replace(weight, scales=weight.scales[:2], rows_per_scale=128)

    out = _scaled_products.blockwise(rows, weight, None, torch.bfloat16)

    assert_close(out, expected_of(rows, weight, None), torch.bfloat16)
