"""Softmax, top-k and products of batches, which programs of torch call, along any dimension and with any strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel.norm import softmax
from lightserve.common.triton_kernel.sampling import top_k
from test.ops.cases import (
    assert_close,
    device_of,
    each_backend_and_dtype,
    each_op_backend_and_dtype,
    randn,
    strided,
    wide,
)

SHAPES = [((1, 1), -1), ((3, 33), 1), ((5, 300), -1), ((7, 4), 0), ((2, 9, 3), 1), ((1, 2, 3, 2, 5), 2), ((6,), 0)]
each_shape = pytest.mark.parametrize(("shape", "dim"), SHAPES)
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "part of wider rows": strided,
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "every other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1),
}
each_stride = pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES)


@each_op_backend_and_dtype("softmax", "log_softmax")
@each_shape
def test_softmax_is_along_any_dimension(
    name: str, backend: str, dtype: torch.dtype, shape: tuple[int, ...], dim: int
) -> None:
    x = randn(*shape, dtype=dtype, device=device_of(backend)) * 3

    out = ops.OPS[name].impls[backend](x, dim)

    assert_close(out, ops.OPS[name](wide(x), dim), dtype)


@each_op_backend_and_dtype("softmax", "log_softmax")
@each_stride
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_softmax_reads_any_strides(
    name: str, backend: str, dtype: torch.dtype, change: Callable[[Tensor], Tensor], dim: int
) -> None:
    x = change(randn(4, 3, 6, dtype=dtype, device=device_of(backend)))

    out = ops.OPS[name].impls[backend](x, dim)

    assert out.is_contiguous()
    assert_close(out, ops.OPS[name](wide(x), dim), dtype)


@each_op_backend_and_dtype("softmax", "log_softmax")
def test_softmax_reads_a_row_twice_that_is_longer_than_registers(
    name: str, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "MAX_BLOCK", 16)
    x = randn(3, 50, 2, dtype=dtype, device=device_of(backend))
    x[0, :20] = float("-inf")  # more than a tile

    out = ops.OPS[name].impls[backend](x, 1)

    assert_close(out, ops.OPS[name](wide(x), 1), dtype)


@each_op_backend_and_dtype("softmax", "log_softmax")
@pytest.mark.parametrize("block", [4, 8192])
def test_softmax_of_infinities_and_nan_is_that_of_torch(
    name: str, backend: str, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "MAX_BLOCK", block)
    inf, nan = float("inf"), float("nan")
    rows = [[-inf] * 6, [1, -inf, 2, 3, -inf, 0], [0, 1, 2, 3, inf, 4], [0, nan, 1, 2, 3, 4], [-inf, 0, 0, nan, 0, 0]]
    x = torch.tensor(rows, dtype=dtype, device=device_of(backend))

    out = ops.OPS[name].impls[backend](x, -1)

    torch.testing.assert_close(out, ops.OPS[name](wide(x), -1).to(dtype), equal_nan=True, rtol=2e-3, atol=2e-3)


@each_op_backend_and_dtype("softmax", "log_softmax")
def test_softmax_writes_the_dtype_that_it_is_called_with(name: str, backend: str, dtype: torch.dtype) -> None:
    x = randn(3, 70, dtype=dtype, device=device_of(backend))

    out = ops.OPS[name].impls[backend](x, -1, torch.float32)

    assert_close(out, ops.OPS[name](wide(x), -1), torch.float32)


def assert_top_k(backend: str, x: Tensor, k: int, dim: int, largest: bool) -> None:
    values, places = ops.top_k.impls[backend](x, k, dim, largest)
    expected, expected_places = ops.top_k(x.cpu(), k, dim, largest)  # a sort on a GPU orders NaN by its bits
    torch.testing.assert_close(values.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places.cpu(), expected_places)


@each_backend_and_dtype(ops.top_k)
@each_shape
@pytest.mark.parametrize("largest", [True, False])
def test_top_k_is_along_any_dimension(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], dim: int, largest: bool
) -> None:
    x = randn(*shape, dtype=dtype, device=device_of(backend))

    for k in {1, min((shape[dim] + 1) // 2, 31), min(shape[dim], ops.MAX_TOP_K)}:
        assert_top_k(backend, x, k, dim, largest)


@each_backend_and_dtype(ops.top_k)
@each_stride
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_top_k_reads_any_strides(
    backend: str, dtype: torch.dtype, change: Callable[[Tensor], Tensor], dim: int
) -> None:
    assert_top_k(backend, change(randn(4, 3, 6, dtype=dtype, device=device_of(backend))), 2, dim, True)


@each_backend_and_dtype(ops.top_k)
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("largest", [True, False])
def test_top_k_of_a_long_row_is_that_of_its_parts(
    backend: str, dtype: torch.dtype, k: int, largest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_k, "MAX_BLOCK", 16)
    x = randn(2, 300, dtype=dtype, device=device_of(backend))

    assert_top_k(backend, x, k, -1, largest)


@each_backend_and_dtype(ops.top_k)
@pytest.mark.parametrize("largest", [True, False])
def test_top_k_orders_equal_values_by_their_places_and_nan_above_infinity(
    backend: str, dtype: torch.dtype, largest: bool
) -> None:
    inf, nan = float("inf"), float("nan")
    row = [0.0, -0.0, 1, -nan, inf, -inf, 1, nan, 1, -1, inf, -inf, 0.0]
    x = torch.tensor([row, row[::-1], [2.0] * 13], dtype=dtype, device=device_of(backend))

    for k in (1, 4, 13):
        assert_top_k(backend, x, k, -1, largest)


def test_top_k_refuses_more_than_it_sorts() -> None:
    with pytest.raises(ValueError, match="top_k: k is 7 of 6 values"):
        ops.top_k.impls["triton"](randn(2, 6), 7, -1)
    with pytest.raises(ValueError, match="top_k: k is 65 of 300 values; it takes 1 to 64"):
        ops.top_k.impls["triton"](randn(2, 300), 65, -1)


@each_backend_and_dtype(ops.bmm)
@pytest.mark.parametrize(
    ("batch", "rows", "depth", "cols"), [(1, 1, 1, 1), (3, 5, 33, 7), (2, 1, 64, 90), (2, 130, 17, 20), (4, 6, 0, 3)]
)
def test_bmm_multiplies_matrices_of_any_size(
    backend: str, dtype: torch.dtype, batch: int, rows: int, depth: int, cols: int
) -> None:
    x = randn(batch, rows, depth, dtype=dtype, device=device_of(backend))
    y = randn(batch, depth, cols, dtype=dtype, device=device_of(backend), seed=1) * max(depth, 1) ** -0.5

    assert_close(ops.bmm.impls[backend](x, y), ops.bmm(wide(x), wide(y)), dtype)


@each_backend_and_dtype(ops.bmm)
@each_stride
@pytest.mark.parametrize("other", STRIDES.values(), ids=STRIDES)
def test_bmm_reads_any_strides(
    backend: str, dtype: torch.dtype, change: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]
) -> None:
    x = change(randn(2, 3, 40, dtype=dtype, device=device_of(backend)))
    y = other(randn(2, 3, 40, dtype=dtype, device=device_of(backend), seed=1) / 8).transpose(1, 2)

    assert_close(ops.bmm.impls[backend](x, y), ops.bmm(wide(x), wide(y)), dtype)


def test_bmm_refuses_shapes_that_do_not_match() -> None:
    with pytest.raises(ValueError, match=r"bmm: shapes \(2, 3, 4\) and \(2, 5, 6\) do not match"):
        ops.bmm.impls["triton"](randn(2, 3, 4), randn(2, 5, 6))
