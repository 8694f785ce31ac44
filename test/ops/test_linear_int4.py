"""Products with 4-bit weights, by the kernels for few, more and many rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from lightserve.common import ops
from lightserve.common.triton_kernel.linear import _int4_tiles, dequantize, linear_int4
from lightserve.common.triton_kernel.linear._tiled_int4 import TiledInt4Weight, empty_tiled
from test.ops.cases import (
    TOLERANCE,
    assert_close,
    codebook4_weight,
    device_of,
    each_backend_and_dtype,
    each_op_backend_and_dtype,
    int4_weight,
    int4_weight_with_zero_points,
    mxfp4_weight,
    randn,
    strided,
    wide,
)
from test.ops.quantized import tiled

WITH_TABLES = {"linear_codebook4": codebook4_weight, "linear_mxfp4": mxfp4_weight}
int4_weight_with_offsets = partial(int4_weight, has_offsets=True)
MEAN = 1 / 4  # of the inputs: offsets of groups must show


@each_backend_and_dtype(ops.linear_int4)
@pytest.mark.parametrize(
    ("rows", "shape", "group"),
    [
        (1, (40, 256), 128),
        (3, (17, 96), 32),
        (9, (33, 192), 64),
        (40, (20, 128), 128),
        (130, (20, 64), 32),
        (5, (20, 48), 16),
    ],
)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_linear_int4_matches_its_definition(
    backend: str, dtype: torch.dtype, rows: int, shape: tuple[int, int], group: int, has_offsets: bool
) -> None:
    out_size, in_size = shape
    x = strided(randn(rows, in_size, dtype=dtype, device=device_of(backend)) + MEAN)
    weight = int4_weight(out_size, in_size, group, device_of(backend), has_offsets)
    bias = randn(out_size, dtype=dtype, device=device_of(backend), seed=2) if has_offsets else None

    out = ops.linear_int4.impls[backend](x, weight, bias)

    expected = wide(x) @ weight.dequantize().T + (0 if bias is None else wide(bias))
    # Where offsets are no zero points, and for more rows, each weight is rounded to the dtype.
    by = 2 * TOLERANCE[dtype]["rtol"]
    torch.testing.assert_close(out.float(), expected, rtol=by, atol=by)


@each_backend_and_dtype(ops.linear_int4)
@pytest.mark.parametrize(("rows", "group"), [(1, 128), (12, 64), (40, 32), (130, 32)])
def test_zero_points_are_subtracted_from_the_codes(backend: str, dtype: torch.dtype, rows: int, group: int) -> None:
    x = randn(rows, 256, dtype=dtype, device=device_of(backend)) + MEAN
    weight = int4_weight_with_zero_points(20, 256, group, device_of(backend))

    out = ops.linear_int4.impls[backend](x, weight, None)

    assert_close(out, wide(x) @ weight.dequantize().T, dtype)


@pytest.mark.parametrize("splits", [2, 3, 9])
@pytest.mark.parametrize("has_bias", [False, True])
def test_programs_may_share_the_inputs(splits: int, has_bias: bool) -> None:
    x = randn(3, 5 * 32, device=device_of("triton"))
    weight = int4_weight(18, 5 * 32, 32, device_of("triton"), has_offsets=True)
    bias = randn(18, device=device_of("triton"), seed=2) if has_bias else None
    expected = x @ weight.dequantize().T + (0 if bias is None else bias)

    few = linear_int4.multiply(x, weight, bias, replace(linear_int4.FLOAT32, splits=splits))

    assert_close(few, expected, torch.float32)


@pytest.mark.parametrize("splits", [2, 3, 9])
@pytest.mark.parametrize("is_tiled", [False, True])
def test_the_last_program_of_a_tile_adds_the_sums_of_all(splits: int, is_tiled: bool) -> None:
    x = randn(40, 5 * 64, device=device_of("triton"))
    weight = int4_weight(48, 5 * 64, 64, device_of("triton"), has_offsets=True)
    bias = randn(48, device=device_of("triton"), seed=2)
    split = replace(_int4_tiles.FLOAT32, splits=splits)

    shared = tiled(weight) if is_tiled else weight
    products = [_int4_tiles.multiply(x, shared, bias, split) for _ in range(2)]

    assert_close(products[0], x @ weight.dequantize().T + bias, torch.float32)
    assert torch.equal(*products), "no count is left of the first product"


@pytest.mark.parametrize("config", [linear_int4.NARROW, linear_int4.WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("groups", [1, 5, 9])
def test_tiles_may_be_larger_than_what_is_left_of_a_row(config: linear_int4.Config, groups: int) -> None:
    x = randn(2, groups * 32, device=device_of("triton"))
    weight = int4_weight(18, groups * 32, 32, device_of("triton"), has_offsets=True)

    out = linear_int4.multiply(x, weight, None, config)

    assert_close(out, x @ weight.dequantize().T, torch.float32)


def test_weights_may_be_rows_of_a_larger_one() -> None:
    x = randn(2, 64, device=device_of("triton"))
    weight = int4_weight(40, 128, 32, device_of("triton"), has_offsets=True).rows(slice(3, 30)).columns(slice(64, 128))

    out = ops.linear_int4.impls["triton"](x, weight)

    assert_close(out, x @ weight.dequantize().T, torch.float32)


@pytest.mark.interpreted
@pytest.mark.parametrize("rows", [1, 40])
def test_a_weight_is_dequantised_part_by_part(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(dequantize, "SCRATCH_BYTES", 0)
    x = randn(rows, 64, device=device_of("triton"))
    weight = int4_weight(300, 64, 32, device_of("triton"), has_offsets=True)
    bias = randn(300, device=device_of("triton"), seed=2)

    out = dequantize.linear_dequantized(x, weight, bias)

    assert_close(out, x @ weight.dequantize().T + bias, torch.float32)


@each_op_backend_and_dtype("linear_codebook4", "linear_mxfp4")
@pytest.mark.parametrize(("rows", "shape"), [(3, (17, 64)), (70, (33, 192))])
def test_products_with_tables_of_numbers_match_their_definitions(
    name: str, backend: str, dtype: torch.dtype, rows: int, shape: tuple[int, int]
) -> None:
    x = strided(randn(rows, shape[1], dtype=dtype, device=device_of(backend)))
    weight = WITH_TABLES[name](*shape, device_of(backend))

    out = ops.OPS[name].impls[backend](x, weight)

    assert_close(out, wide(x) @ weight.dequantize().T, dtype)


@each_op_backend_and_dtype("linear_codebook4", "linear_mxfp4")
def test_products_with_tables_take_cut_groups(name: str, backend: str, dtype: torch.dtype) -> None:
    x = randn(3, 112, dtype=dtype, device=device_of(backend))
    whole = WITH_TABLES[name](17, 192, device_of(backend))

    cut = whole.columns(slice(80, 192))

    assert cut.group_size == 16
    assert torch.equal(cut.dequantize(), whole.dequantize()[:, 80:])
    assert_close(ops.OPS[name].impls[backend](x, cut), wide(x) @ cut.dequantize().T, dtype)


@pytest.mark.parametrize("name", ["linear_int4", "linear_codebook4"])
def test_a_row_is_the_same_in_every_batch(name: str) -> None:
    x = randn(70, 128, device=device_of("triton"))
    weight = (
        int4_weight(20, 128, 64, device_of("triton"), has_offsets=True)
        if name == "linear_int4"
        else codebook4_weight(20, 128, device_of("triton"))
    )
    linear = ops.OPS[name].impls[ops.batch_invariant("triton")]

    alone = torch.cat([linear(x[row : row + 1], weight) for row in (0, 1, 69)])

    assert torch.equal(alone, linear(x, weight)[[0, 1, 69]])


@each_backend_and_dtype(ops.linear_int4)
@pytest.mark.parametrize("rows", [1, 40, 260])
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("make", [int4_weight, int4_weight_with_offsets, int4_weight_with_zero_points])
def test_tiles_of_a_weight_have_its_product(
    backend: str, dtype: torch.dtype, rows: int, group: int, make: Callable[..., ops.Int4Weight]
) -> None:
    x = randn(rows, 256, dtype=dtype, device=device_of(backend)) + MEAN
    weight = make(48, 256, group, device_of(backend))

    out = ops.linear_int4.impls[backend](x, tiled(weight))

    by = 2 * TOLERANCE[dtype]["rtol"]
    torch.testing.assert_close(out.float(), wide(x) @ weight.dequantize().T, rtol=by, atol=by)


@pytest.mark.parametrize("group", [64, 128])
def test_tiles_hold_the_weight(group: int) -> None:
    weight = int4_weight(48, 256, group, "cpu", has_offsets=True)
    numbers = torch.tensor([47, 0, 17])

    tiles = tiled(weight)

    assert torch.equal(tiles.dequantize(), weight.dequantize())
    assert isinstance(tiles.rows(slice(16, 48)), TiledInt4Weight)
    for rows in (slice(16, 48), slice(3, 20), numbers):
        assert torch.equal(tiles.rows(rows).dequantize(), weight.rows(rows).dequantize())
    assert torch.equal(tiles.columns(slice(128, 256)).dequantize(), weight.columns(slice(128, 256)).dequantize())


def test_a_weight_that_is_no_whole_number_of_tiles_keeps_its_layout() -> None:
    for shape, group in (((40, 256), 128), ((48, 64), 32)):
        assert empty_tiled(int4_weight(*shape, group, "cpu"), torch.device("cpu")) is None
