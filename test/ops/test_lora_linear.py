"""Linears with adapters, by every backend, and the kernel that multiplies their A as more rows of the weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel.linear import linear, norm_linear
from lightserve.common.triton_kernel.lora import lora_linear as kernels
from test.ops.cases import (
    EPS,
    assert_close,
    device_of,
    each_backend_and_dtype,
    lora_linear_args,
    lora_rows,
    randn,
    strided,
    wide,
)
from test.ops.test_add_lora import oracle
from test.ops.test_norm_linear import IN_INTERPRETER

NONE = ops.NO_LORA
BATCHES = {"one": [1], "none": [NONE] * 3, "apart": [2, 0], "together": [2, 0, NONE, 2, 2, 1, NONE, 0]}
SIZES = [(100, (66,), 16), (1024, (48, 16, 16), 32), (1100, (70, 60), 16)]  # in, parts, rank
CONFIGS = {"narrow": linear.NARROW, "wide": linear.WIDE}


def arguments(
    slots: list[int], in_size: int, parts: tuple[int, ...], dtype: torch.dtype, rank: int = 16
) -> tuple[Tensor, ops.LoraLinear]:
    device = device_of("triton")
    x, layer = lora_linear_args(len(slots), in_size, parts, dtype, device, rank=rank)
    return strided(x), replace(layer, weight=strided(layer.weight), rows=lora_rows(slots, device))


def expected_of(x: Tensor, layer: ops.LoraLinear, slots: list[int]) -> Tensor:
    """By the formula, in float32."""
    assert layer.bias is not None
    return oracle(wide(x) @ wide(layer.weight).T + wide(layer.bias), x, layer.lora, slots)


@each_backend_and_dtype(ops.lora_linear)
@pytest.mark.parametrize("tokens", [1, 5, 19])
def test_the_op_is_the_linear_and_what_adapters_add(backend: str, dtype: torch.dtype, tokens: int) -> None:
    device, slots = device_of(backend), [(2, NONE, 0)[i % 3] for i in range(tokens)]
    x, layer = lora_linear_args(tokens, 72, (40, 16), dtype, device)

    assert_close(ops.lora_linear.impls[backend](x, layer), expected_of(x, layer, slots), dtype)


@pytest.mark.parametrize("dtype", IN_INTERPRETER)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("slots", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    ("in_size", "parts", "rank"), [(100, (66,), 16), (1024, (48, 16, 16), 32), (1100, (70, 60), 16)]
)
def test_the_kernel_multiplies_weight_and_adapters(
    dtype: torch.dtype, config: linear.Config, slots: list[int], in_size: int, parts: tuple[int, ...], rank: int
) -> None:
    x, layer = arguments(slots, in_size, parts, dtype, rank)

    out, _ = kernels.multiply(x, layer, config)

    assert_close(out, expected_of(x, layer, slots), dtype)


@pytest.mark.parametrize("dtype", IN_INTERPRETER)
@pytest.mark.parametrize("slots", [[1], [2, 0], [NONE, 1, 1]])
@pytest.mark.parametrize(("in_size", "parts"), [(100, (66,)), (1100, (48, 16, 16))])
def test_the_kernel_norms_the_sum_before_both_products(
    dtype: torch.dtype, slots: list[int], in_size: int, parts: tuple[int, ...]
) -> None:
    x, layer = arguments(slots, in_size, parts, dtype)
    residual = strided(8 * randn(*x.shape, dtype=dtype, device=str(x.device), seed=5))
    norm_weight = randn(in_size, dtype=dtype, device=str(x.device), seed=6)
    before, summed = residual.clone(), residual + x
    normed = ops.rms_norm.impls[ops.REFERENCE](wide(summed), wide(norm_weight), EPS)

    out, new_residual = kernels.multiply(x, layer, norm_linear.NARROW, kernels.Norm(residual, norm_weight, EPS))

    assert_close(out, expected_of(normed, layer, slots), dtype)
    assert_close(new_residual, wide(summed), dtype)
    assert torch.equal(residual, before)  # other programs read it


class Calls(list[str]):
    """Which implementations were called, and with how many outputs."""

    def replacing(self, name: str, result: Callable[[Tensor], Any]) -> Callable[..., Any]:
        def call(x: Tensor, *args: Any) -> Any:
            layer = next(arg for arg in args if isinstance(arg, ops.LoraLinear))
            self.append(f"{name} {len(x)} {len(layer.weight)}")
            return result(x)

        return call


def test_a_kernel_computes_few_rows_and_cublas_more(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr(kernels, "multiply", calls.replacing("fused", lambda x: (x, x)))
    monkeypatch.setattr(kernels, "multiply_beside", calls.replacing("beside", lambda x: x))
    monkeypatch.setitem(ops.lora_linear.impls, ops.REFERENCE, calls.replacing("apart", lambda x: x))

    for rows in (1, 8, 9, 64, 513):
        x, layer = lora_linear_args(rows, 16, (4096,), torch.float16, device_of("triton"))
        ops.lora_linear.impls["triton"](x, layer)

    assert calls == ["fused 1 4096", "fused 8 4096", "beside 9 4096", "beside 64 4096", "apart 513 4096"]


def test_one_row_in_bfloat16_has_its_norm_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, op = Calls(), ops.add_rms_norm_lora_linear
    monkeypatch.setattr(kernels, "multiply", calls.replacing("fused", lambda x: (x, x)))
    monkeypatch.setitem(op.impls, ops.REFERENCE, calls.replacing("apart", lambda x: (x, x)))

    for rows, out_size in ((1, 6144), (1, 28672), (3, 6144)):
        x, layer = lora_linear_args(rows, 16, (out_size,), torch.bfloat16, device_of("triton"))
        op.impls["triton"](x, x, x[0], EPS, layer)

    assert calls == ["fused 1 6144", "fused 1 28672", "apart 3 6144"]


def test_a_rank_below_the_kernels_limit_is_refused() -> None:
    x, layer = lora_linear_args(2, 40, (16,), torch.float32, device_of("triton"), rank=8)

    with pytest.raises(ValueError, match="lora_linear: 1 parts of rank 8; the limits are 3 parts of rank 16 or more"):
        ops.lora_linear.impls["triton"](x, layer)
