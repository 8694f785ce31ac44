"""RMSNorm with a gate: one program for a few rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel.norm._norm import ELEMENTS_PER_WARP, MAX_WARPS

ELEMENTS = 1024  # of a program, in rows: by their width alone, so that a token does not depend on how many there are


@triton.jit
def _gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    n_rows,
    groups,
    x_token_stride,
    x_group_stride,
    gate_token_stride,
    gate_group_stride,
    weight_rows,
    n_cols,
    eps,
    HAS_SILU: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row is a group of a token."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    tokens, group = (rows // groups).to(tl.int64), rows % groups

    weight = tl.load(weight_ptr + rows % weight_rows * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    x_ptrs = x_ptr + tokens * x_token_stride + group * x_group_stride + cols
    gate_ptrs = gate_ptr + tokens * gate_token_stride + group * gate_group_stride + cols
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gate)
    if HAS_SILU:
        factor *= gate
    if GATES_FIRST:
        x *= factor
    out = x * tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / n_cols + eps) * weight
    if not GATES_FIRST:
        out *= factor
    tl.store(out_ptr + rows.to(tl.int64) * n_cols + cols, out, mask=mask)


@ops.gated_rms_norm.impl("triton")
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm: ops.GatedNorm) -> Tensor:
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    check_last_contiguous("gated_rms_norm", x=x, gate=gate)
    tokens, groups, width = x.shape
    block = next_power_of_2(width)
    rows = max(ELEMENTS // block, 1)
    _gated_rms_norm_kernel[(cdiv(tokens * groups, rows),)](
        x,
        gate,
        weight.contiguous(),
        out,
        tokens * groups,
        groups,
        *x.stride()[:2],
        *gate.stride()[:2],
        weight.numel() // width,
        width,
        eps,
        HAS_SILU=norm.activation == "silu",
        GATES_FIRST=norm.gates_first,
        ROWS=rows,
        BLOCK=block,
        num_warps=min(max(rows * block // ELEMENTS_PER_WARP, 1), MAX_WARPS),
    )
    return out
