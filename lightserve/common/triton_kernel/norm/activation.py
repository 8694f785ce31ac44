"""Activations, plain and gated: one program for each block of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import check_last_contiguous

BLOCK = 1024  # 8 elements in each lane of 4 warps: one 16-byte load of float16

SQRT_HALF = tl.constexpr(0.5**0.5)
TWO_SQRT_2_OVER_PI = tl.constexpr(2 * (2 / 3.141592653589793) ** 0.5)


@triton.jit
def activate(x, FUNCTION: tl.constexpr):
    if FUNCTION == "silu":
        return x * tl.sigmoid(x)
    if FUNCTION == "gate":
        return tl.sigmoid(x)
    if FUNCTION == "softplus":
        small = tl.exp(-tl.abs(x))
        return tl.maximum(x, 0.0) + tl.where(small < 1e-3, small - 0.5 * small * small, tl.log(1 + small))
    if FUNCTION == "relu":
        return tl.maximum(x, 0.0)
    if FUNCTION == "relu2":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    if FUNCTION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * SQRT_HALF))
    # gelu_tanh, as 0.5 * (1 + tanh(y)) = sigmoid(2 * y)
    return x * tl.sigmoid(TWO_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))


@triton.jit
def _activation_kernel(
    x_ptr, out_ptr, x_row_stride, n_cols, FUNCTION: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols

    x_ptrs = x_ptr + row * x_row_stride + cols
    out = activate(tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32), FUNCTION)
    if IS_GATED:
        out *= tl.load(x_ptrs + n_cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n_cols + cols, out, mask=mask)


@triton.jit
def _add_gated_kernel(
    out_ptr, values_ptr, gates_ptr, out_row_stride, values_row_stride, gates_row_stride, n_cols, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols

    factor = activate(tl.load(gates_ptr + row * gates_row_stride).to(tl.float32), "gate")
    values = tl.load(values_ptr + row * values_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + row * out_row_stride + cols
    tl.store(out_ptrs, tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + values * factor, mask=mask)


@triton.jit
def _xielu_kernel(x_ptr, numbers_ptr, out_ptr, x_row_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols

    x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    bent = tl.minimum(x, tl.load(numbers_ptr + 3))
    # exp(x) - 1 of a small x has few digits
    series = bent * (1 + bent * (0.5 + bent * (1 / 6 + bent / 24)))
    less_one = tl.where(tl.abs(bent) < 0.02, series, tl.exp(bent) - 1)
    curve = tl.where(x > 0, tl.load(numbers_ptr) * x * x, tl.load(numbers_ptr + 1) * (less_one - x))
    tl.store(out_ptr + row * n_cols + cols, curve + tl.load(numbers_ptr + 2) * x, mask=mask)


def _launch(op: str, x: Tensor, function: str, is_gated: bool) -> Tensor:
    if is_gated and x.shape[-1] % 2:
        raise ValueError(f"{op}: the last dimension holds gate and up, and {x.shape[-1]} is odd")
    width = x.shape[-1] // (2 if is_gated else 1)
    out = x.new_empty((*x.shape[:-1], width))
    if out.numel() == 0:
        return out
    rows = x.reshape(-1, x.shape[-1])
    check_last_contiguous(op, x=rows)
    grid = (rows.shape[0], cdiv(width, BLOCK))
    _activation_kernel[grid](rows, out, rows.stride(0), width, function, is_gated, BLOCK)
    return out


@ops.silu.impl("triton")
def silu(x: Tensor) -> Tensor:
    return _launch("silu", x, "silu", is_gated=False)


@ops.gate.impl("triton")
def gate(x: Tensor) -> Tensor:
    return _launch("gate", x, "gate", is_gated=False)


@ops.add_gated.impl("triton")
def add_gated(out: Tensor, values: Tensor, gates: Tensor) -> None:
    check_last_contiguous("add_gated", out=out, values=values)
    if out.numel():
        strides = (out.stride(0), values.stride(0), gates.stride(0))
        grid = (len(out), cdiv(out.shape[1], BLOCK))
        _add_gated_kernel[grid](out, values, gates, *strides, out.shape[1], BLOCK)


@ops.relu.impl("triton")
def relu(x: Tensor) -> Tensor:
    return _launch("relu", x, "relu", is_gated=False)


@ops.relu2.impl("triton")
def relu2(x: Tensor) -> Tensor:
    return _launch("relu2", x, "relu2", is_gated=False)


@ops.gelu.impl("triton")
def gelu(x: Tensor) -> Tensor:
    return _launch("gelu", x, "gelu", is_gated=False)


@ops.gelu_tanh.impl("triton")
def gelu_tanh(x: Tensor) -> Tensor:
    return _launch("gelu_tanh", x, "gelu_tanh", is_gated=False)


@ops.xielu.impl("triton")
def xielu(x: Tensor, numbers: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    rows = x.reshape(-1, x.shape[-1])
    check_last_contiguous("xielu", x=rows, numbers=numbers)
    grid = (rows.shape[0], cdiv(rows.shape[1], BLOCK))
    _xielu_kernel[grid](rows, numbers, out, rows.stride(0), rows.shape[1], BLOCK)
    return out


@ops.silu_and_mul.impl("triton")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _launch("silu_and_mul", gate_up, "silu", is_gated=True)


@ops.gelu_and_mul.impl("triton")
def gelu_and_mul(gate_up: Tensor) -> Tensor:
    return _launch("gelu_and_mul", gate_up, "gelu", is_gated=True)


@ops.gelu_tanh_and_mul.impl("triton")
def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _launch("gelu_tanh_and_mul", gate_up, "gelu_tanh", is_gated=True)


@ops.relu2_and_mul.impl("triton")
def relu2_and_mul(gate_up: Tensor) -> Tensor:
    return _launch("relu2_and_mul", gate_up, "relu2", is_gated=True)
