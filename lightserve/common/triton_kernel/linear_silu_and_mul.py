"""The first half of a gated feed-forward in one kernel: gate and up are multiplied side by side, and only what becomes
of both is written.

For many rows alone: with few, reading the weight is what takes time, and ``linear`` does that better.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import COPY_ALIGNMENT, can_copy, check_last_contiguous

# Gate and up of [28672, 4096] in bfloat16 on an H200 at its power limit, and with cuBLAS and silu_and_mul: 512 rows 210
# and 210 us, 1,024 rows 367 and 381, 2,048 rows 762 and 776, 8,000 rows 2,940 and 2,957.
MIN_ROWS = 513


@dataclass(frozen=True, slots=True)
class Config:
    block_m: int  # rows of the input a program
    block_n: int  # columns of the output: as many of gate and of up
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8  # tiles of rows that go together: they find the weight in the cache


HALVES = Config(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4)  # of types of two bytes


@triton.jit(do_not_specialize=["rows"])
def _linear_silu_and_mul_kernel(
    x_desc,
    weight_desc,
    out_desc,
    rows,
    width,
    IN_SIZE: tl.constexpr,  # were the compiler to think of a loop of no rounds, it would wait for every product
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile = tl.program_id(0)
    tiles_of_group = GROUP * tl.cdiv(width, BLOCK_N)
    first_row_tile = tile // tiles_of_group * GROUP
    row_tiles = tl.minimum(tl.cdiv(rows, BLOCK_M) - first_row_tile, GROUP)
    first_row = (first_row_tile + tile % tiles_of_group % row_tiles) * BLOCK_M
    first_col = tile % tiles_of_group // row_tiles * BLOCK_N

    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN_SIZE, BLOCK_K):  # what is past an end is 0, and not stored
        x = x_desc.load(
            [first_row, start]
        )  # one load after the other: with a product between, each would be waited for
        gate_weight = weight_desc.load([first_col, start])
        up_weight = weight_desc.load([width + first_col, start])
        gate = tl.dot(x, gate_weight.T, acc=gate, input_precision="ieee")
        up = tl.dot(x, up_weight.T, acc=up, input_precision="ieee")
    gate = gate.to(out_desc.dtype).to(tl.float32)  # rounded as if they had been stored
    up = up.to(out_desc.dtype).to(tl.float32)
    out_desc.store([first_row, first_col], (gate * tl.sigmoid(gate) * up).to(out_desc.dtype))


def multiply(x: Tensor, weight: Tensor, config: Config) -> Tensor:
    """``silu_and_mul(x @ weight.T)`` for ``x`` ``[rows, in]`` and ``weight`` ``[2 * width, in]``."""
    (rows, in_size), width = x.shape, len(weight) // 2
    out = x.new_empty((rows, width))
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    _linear_silu_and_mul_kernel[(cdiv(rows, block_m) * cdiv(width, block_n),)](
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        TensorDescriptor.from_tensor(out, [block_m, block_n]),
        rows,
        width,
        IN_SIZE=in_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP=config.group,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


@ops.linear_silu_and_mul.impl("triton")
def linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_last_contiguous("linear_silu_and_mul", x=x, weight=weight)
    if bias is None and x.dim() == 2 and len(x) >= MIN_ROWS and x.element_size() == 2 and _can_multiply(x, weight):
        return multiply(x, weight, HALVES)
    return ops.silu_and_mul(ops.linear(x, weight, bias))


def _can_multiply(x: Tensor, weight: Tensor) -> bool:
    out_row_bytes = len(weight) // 2 * x.element_size()
    return can_copy(x) and can_copy(weight) and out_row_bytes % COPY_ALIGNMENT == 0
