"""RMSNorm with a gate: one program for each row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel.norm._norm import ELEMENTS_PER_WARP, MAX_WARPS


@triton.jit
def _gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    x_row_stride,
    gate_row_stride,
    weight_rows,
    n_cols,
    eps,
    HAS_SILU: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols

    weight = tl.load(weight_ptr + row % weight_rows * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gate)
    if HAS_SILU:
        factor *= gate
    if GATES_FIRST:
        x *= factor
    out = x * tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps) * weight
    if not GATES_FIRST:
        out *= factor
    tl.store(out_ptr + row * n_cols + cols, out, mask=mask)


@ops.gated_rms_norm.impl("triton")
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm: ops.GatedNorm) -> Tensor:
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    width = x.shape[-1]
    rows, gates = x.reshape(-1, width), gate.reshape(-1, width)
    check_last_contiguous("gated_rms_norm", x=rows, gate=gates)
    block = next_power_of_2(width)
    _gated_rms_norm_kernel[(len(rows),)](
        rows,
        gates,
        weight.contiguous(),
        out,
        rows.stride(0),
        gates.stride(0),
        weight.numel() // width,
        width,
        eps,
        HAS_SILU=norm.activation == "silu",
        GATES_FIRST=norm.gates_first,
        BLOCK=block,
        num_warps=min(max(block // ELEMENTS_PER_WARP, 1), MAX_WARPS),
    )
    return out
