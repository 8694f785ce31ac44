"""What RMSNorm and LayerNorm share: one program holds a row, and adds it to a residual if there is one."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common.triton_kernel._blocks import next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous, rows_in_place

ELEMENTS_PER_WARP = 512  # 16 in a lane: two 16-byte loads of float16
MAX_WARPS = 16


@triton.jit
def load_row(x_ptr, residual_ptr, row, x_row_stride, residual_row_stride, cols, mask):
    """The row in float32. With a residual, the row is added to it, and the rounded sum is returned."""
    x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + row * residual_row_stride + cols
        residual = tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        rounded = (residual + x).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptrs, rounded, mask=mask)
        x = rounded.to(tl.float32)
    return x


def launch_norm(
    kernel: Any, op: str, x: Tensor, residual: Tensor | None, params: tuple[Tensor, ...], eps: float
) -> Tensor:
    normed = x if residual is None else residual
    out = torch.empty_like(normed, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    rows = x.reshape(-1, x.shape[-1])
    residual_rows = None if residual is None else rows_in_place(op, "residual", residual)
    check_last_contiguous(op, x=rows, residual=rows if residual_rows is None else residual_rows)
    width = rows.shape[1]
    block = next_power_of_2(width)
    kernel[(rows.shape[0],)](
        rows,
        residual_rows,
        out,
        *(param.contiguous() for param in params),
        rows.stride(0),
        0 if residual_rows is None else residual_rows.stride(0),
        width,
        eps,
        BLOCK=block,
        num_warps=min(max(block // ELEMENTS_PER_WARP, 1), MAX_WARPS),
    )
    return out
