from __future__ import annotations

import psutil
import pytest
import torch

from lightserve.common import ops
from lightserve.common.cpu_kernel import linear as cpu_linear
from lightserve.common.triton_kernel.linear import linear
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


@each_backend_and_dtype(ops.linear_float32)
@pytest.mark.parametrize("tokens", [1, 8, 40])
@pytest.mark.parametrize(("wide_in", "wide_out"), [(512, 64), (2100, 33)])
def test_linear_float32_does_not_round_its_result(
    backend: str, dtype: torch.dtype, tokens: int, wide_in: int, wide_out: int
) -> None:
    x = randn(tokens, wide_in, dtype=dtype, device=device_of(backend))
    weight = randn(wide_out, wide_in, dtype=dtype, device=device_of(backend), seed=1) * wide_in**-0.5

    out = ops.linear_float32.impls[backend](x, weight)

    assert out.dtype == torch.float32
    assert_close(out, ops.linear(wide(x), wide(weight)), torch.float32)


@each_backend_and_dtype(ops.linear)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
@pytest.mark.parametrize(("wide_in", "wide_out"), [(512, 48), (520, 33), (1100, 16)])
def test_linear_of_few_rows_reads_every_tile_of_its_weight(
    backend: str, dtype: torch.dtype, tokens: int, wide_in: int, wide_out: int
) -> None:
    x = randn(tokens, wide_in, dtype=dtype, device=device_of(backend))
    weight = strided(randn(wide_out, wide_in, dtype=dtype, device=device_of(backend), seed=1) * wide_in**-0.5)

    out = ops.linear.impls[backend](x, weight)

    assert_close(out, ops.linear(wide(x), wide(weight)), dtype)


@each_backend_and_dtype(ops.linear)
@pytest.mark.parametrize("wide_in", [1, 512, 2100, 5000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_has_a_single_output(backend: str, dtype: torch.dtype, wide_in: int, has_bias: bool) -> None:
    x, weight = (randn(*size, dtype=dtype, device=device_of(backend)) for size in ((37, wide_in), (1, wide_in)))
    bias = randn(1, dtype=dtype, device=device_of(backend), seed=2) if has_bias else None
    weight *= wide_in**-0.5

    out = ops.linear.impls[backend](x, weight, bias)

    assert_close(out, ops.linear(wide(x), wide(weight), None if bias is None else wide(bias)), dtype)


@pytest.mark.parametrize("config", [linear.NARROW, linear.WIDE, linear.SMALL], ids=["narrow", "wide", "small"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [1, 8, 9, 32])
@pytest.mark.parametrize("wide_in", [100, 1024, 1100])
def test_linear_in_either_way_adds_a_bias(config: linear.Config, dtype: torch.dtype, tokens: int, wide_in: int) -> None:
    x = strided(randn(tokens, wide_in, dtype=dtype, device=device_of("triton")))
    weight = randn(130, wide_in, dtype=dtype, device=device_of("triton"), seed=1) * wide_in**-0.5
    bias = randn(130, dtype=dtype, device=device_of("triton"), seed=2)

    out = linear.multiply(x, weight, bias, config)

    assert_close(out, ops.linear(wide(x), wide(weight), wide(bias)), dtype)


@pytest.mark.parametrize(
    ("rows", "out_size", "in_size", "config"),
    [
        (1, 4096, 14336, linear.NARROW),
        (8, 4096, 4096, linear.NARROW),
        (4, 1024, 2048, linear.SMALL),
        (8, 520, 2048, linear.SMALL),
        (8, 256, 2048, None),
        (9, 4096, 4096, linear.WIDE),
        (8, 6144, 4096, linear.WIDE),
        (16, 3584, 18944, linear.NARROW),
        (17, 3584, 18944, None),
        (1, 28672, 4096, None),
        (3, 28672, 4096, None),
        (4, 37888, 3584, linear.NARROW),
        (32, 152064, 3584, linear.WIDE),
        (33, 4096, 4096, None),
    ],
)
def test_the_first_rule_that_fits_a_product_decides(
    rows: int, out_size: int, in_size: int, config: linear.Config | None
) -> None:
    assert linear.config_of(rows, out_size, in_size) is config


def test_a_cpu_multiplies_any_number_of_rows() -> None:
    weight = torch.nn.Parameter(randn(40, 48, seed=1), requires_grad=False)
    x = randn(70, 48)

    for rows in range(71):
        assert_close(ops.linear.impls["cpu"](x[:rows], weight), x[:rows] @ weight.T, torch.float32)


def test_prompts_of_every_length_take_no_memory_each() -> None:
    """oneDNN keeps what it compiles for a number of rows: half a megabyte and more."""
    weight = torch.nn.Parameter(randn(3072, 576, seed=1), requires_grad=False)
    x = randn(400, 576)
    for rows in (*cpu_linear.SIZES, 400):
        ops.linear.impls["cpu"](x[:rows], weight)
    before = psutil.Process().memory_info().rss

    for rows in range(2, 400, 2):
        ops.linear.impls["cpu"](x[:rows], weight)

    assert psutil.Process().memory_info().rss - before < 32 * 2**20
