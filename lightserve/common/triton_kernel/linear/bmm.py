"""Products of matrices of any strides: one program for each tile of a result, which sums along the whole depth."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._gpu import stages_that_fit

MIN_SIDE = 16  # of a tile: the smallest that tl.dot takes
WIDE_TILE = 64 * 64  # numbers of a result from which a program has 8 warps


@dataclass(frozen=True, slots=True)
class Tile:
    """The largest one; small matrices have smaller ones."""

    rows: int
    cols: int
    depth: int
    num_stages: int


HALF = Tile(128, 128, 64, num_stages=3)
FLOAT32 = Tile(64, 64, 32, num_stages=3)  # products of float32 are not made by tensor cores


@triton.jit
def _bmm_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    rows,
    cols,
    depth,
    x_batch_stride,
    x_row_stride,
    x_depth_stride,
    y_batch_stride,
    y_depth_stride,
    y_col_stride,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_in_row = tl.cdiv(cols, BLOCK_N)
    tiles = tl.cdiv(rows, BLOCK_M) * tiles_in_row
    batch, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    out_rows = (tile // tiles_in_row).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    out_cols = (tile % tiles_in_row).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_col = (out_rows < rows)[:, None], (out_cols < cols)[None, :]
    depths = tl.arange(0, BLOCK_K).to(tl.int64)
    x_ptrs = x_ptr + batch * x_batch_stride + out_rows[:, None] * x_row_stride + depths[None, :] * x_depth_stride
    y_ptrs = y_ptr + batch * y_batch_stride + depths[:, None] * y_depth_stride + out_cols[None, :] * y_col_stride

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        is_in = depths < (BLOCK_K if IS_EVEN else depth - start)
        x = tl.load(x_ptrs, mask=is_row & is_in[None, :], other=0.0)
        y = tl.load(y_ptrs, mask=is_in[:, None] & is_col, other=0.0)
        acc = tl.dot(x, y, acc=acc, input_precision="ieee")
        x_ptrs += BLOCK_K * x_depth_stride
        y_ptrs += BLOCK_K * y_depth_stride
    out_ptrs = out_ptr + batch * rows * cols + out_rows[:, None] * cols + out_cols[None, :]
    tl.store(out_ptrs, acc, mask=is_row & is_col)


@ops.bmm.impl("triton")
def bmm(x: Tensor, y: Tensor) -> Tensor:
    (batch, rows, depth), cols = x.shape, y.shape[2]
    if y.shape[:2] != (batch, depth):
        raise ValueError(f"bmm: shapes {tuple(x.shape)} and {tuple(y.shape)} do not match")
    out = x.new_empty(batch, rows, cols)
    if not out.numel():
        return out
    largest = HALF if x.element_size() == 2 else FLOAT32
    block_m, block_n, block_k = (
        min(max(next_power_of_2(max(size, 1)), MIN_SIDE), limit)
        for size, limit in ((rows, largest.rows), (cols, largest.cols), (depth, largest.depth))
    )
    _bmm_kernel[(batch * cdiv(rows, block_m) * cdiv(cols, block_n),)](
        x,
        y,
        out,
        rows,
        cols,
        depth,
        *x.stride(),
        *y.stride(),
        IS_EVEN=depth % block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8 if block_m * block_n > WIDE_TILE else 4,
        num_stages=stages_that_fit((block_m + block_n) * block_k * x.element_size(), largest.num_stages),
    )
    return out
