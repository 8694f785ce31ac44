"""Softmax and top-k of aten: what our kernels take, what stays torch's, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lightserve.ops
from lightserve.ops.reductions import takes_softmax, takes_topk
from test.aten.devices import DEVICES, each_device, on
from test.aten.test_aten import calls
from test.ops.cases import FLOATS, TOLERANCE, randn

each_with_kernel = pytest.mark.parametrize("device", DEVICES[1:])  # a CPU's stay torch's
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@each_with_kernel
@each_dtype
@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_is_that_of_torch_along_any_dimension(
    device: str, dtype: torch.dtype, function: Callable[..., Tensor], dim: int
) -> None:
    x = randn(3, 5, 7, dtype=dtype, device=on(device)).transpose(0, 2)
    expected = function(x.float(), dim)

    lightserve.ops.enable(device=device)
    out = function(x, dim)

    torch.testing.assert_close(out.float(), expected, **TOLERANCE[dtype])


@each_device
@each_dtype
def test_softmax_to_float32_is_that_of_torch(device: str, dtype: torch.dtype) -> None:
    x = randn(3, 70, dtype=dtype, device=on(device))
    expected = F.softmax(x, -1, dtype=torch.float32)

    lightserve.ops.enable(device=device)
    out = F.softmax(x, -1, dtype=torch.float32)

    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_the_conversion_of_softmax_is_taken_where_torch_has_it() -> None:
    half, on_cpu = torch.empty(2, 3, dtype=torch.float16, device="meta"), torch.empty(2, 3, dtype=torch.float16)

    assert takes_softmax(half, -1, True)
    assert not takes_softmax(half.float(), -1, True)
    assert not takes_softmax(on_cpu, -1, True)
    assert takes_softmax(on_cpu, -1, False)


@each_with_kernel
@each_dtype
@pytest.mark.parametrize(("dim", "largest"), [(0, True), (1, False), (-1, True)])
def test_topk_is_that_of_torch_along_any_dimension(device: str, dtype: torch.dtype, dim: int, largest: bool) -> None:
    x = randn(4, 5, 6, dtype=dtype, device=on(device)).transpose(0, 2)
    expected = x.topk(4, dim, largest)

    lightserve.ops.enable(device=device)
    out = x.topk(4, dim, largest)

    assert torch.equal(out.values, expected.values)
    assert torch.equal(x.gather(dim, out.indices), out.values)
    assert out.indices.dtype == torch.int64


UNTAKEN: dict[str, Callable[[str], Tensor]] = {
    "float64": lambda device: randn(3, 9, dtype=torch.float64, device=device).softmax(-1),
    "a number": lambda device: randn(device=device).softmax(0),
    "empty": lambda device: randn(0, 9, device=device).log_softmax(0),
    "topk of many": lambda device: randn(3, 200, device=device).topk(150).values,
    "topk of none": lambda device: randn(3, 9, device=device).topk(0).values,
    "topk of integers": lambda device: torch.arange(18, device=device).view(2, 9).topk(3).values,
    "topk of a number": lambda device: randn(device=device).topk(1).values,
}


@pytest.mark.parametrize(("rows", "length", "is_ours"), [(64, 2000, True), (65, 2000, False), (2048, 128, True)])
def test_many_long_rows_of_a_gpu_are_torchs_to_sort(rows: int, length: int, is_ours: bool) -> None:
    assert takes_topk(torch.empty(rows, length, device="meta"), 8) is is_ours
    assert takes_topk(torch.empty(rows, length), 8)


@each_device
@pytest.mark.parametrize("call", UNTAKEN.values(), ids=UNTAKEN)
def test_what_the_kernels_do_not_take_is_torchs(device: str, call: Callable[[str], Tensor]) -> None:
    expected = call(on(device))

    lightserve.ops.enable(device=device)
    out = call(on(device))

    assert calls() == {}
    torch.testing.assert_close(out, expected)


WRONG: list[Callable[[Tensor], object]] = [
    lambda x: x.softmax(2),
    lambda x: x.topk(10),
    lambda x: x.topk(-1),
    lambda x: x.topk(2, 5),
    lambda x: torch.bmm(x[None], x[None]),
    lambda x: torch.bmm(x[None], x.T[None].double()),
    lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None, :, :2], x[None, None]),
]


@each_device
@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_fails_as_it_does_in_torch(device: str, call: Callable[[Tensor], object]) -> None:
    x = randn(3, 9, device=on(device))
    with pytest.raises((RuntimeError, IndexError)) as expected:
        call(x)

    lightserve.ops.enable(device=device)

    with pytest.raises(expected.type) as error:
        call(x)
    assert str(error.value) == str(expected.value)


@each_device
def test_the_gradient_of_topk_reaches_what_was_chosen(device: str) -> None:
    x = randn(3, 50, 2, device=on(device))
    grads = []
    for is_enabled in (False, True):
        if is_enabled:
            lightserve.ops.enable(device=device)
        leaf = x.clone().requires_grad_()
        values, _ = leaf.topk(5, 1)
        (values.square() * torch.arange(5, device=leaf.device)[:, None]).sum().backward()  # type: ignore[no-untyped-call]
        grads.append(leaf.grad)

    assert torch.equal(*grads)  # type: ignore[arg-type]
