"""LoRA in two launches for all adapters of a batch and all parts of a linear: shrink to the rank, expand and add.

Groups of rows with one adapter are made on the host once a step, so nothing is sorted here, and no weight is read twice
for rows of one group. The grids depend on the shape of the step alone; programs of unused groups end at once.

Shrink: the sums over the inputs are split, because an adapter has few rows and a decode step few groups. Expand adds
the splits in order, so the result does not depend on the order in which programs end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel import _gpu
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous, rows_in_place
from lightserve.common.triton_kernel.linear.linear import MIN_BLOCK_K

INVARIANT_SPLITS = 8
INVARIANT_ROWS = 16
MAX_PARTS = 3  # q, k and v


@dataclass(frozen=True, slots=True)
class Config:
    """The fastest for 64 rows of 8 adapters of rank 16 on an H200, by ``benchmark.lora --configs``."""

    tile_bytes: int = 256  # of each row of A and x in a tile of shrink
    columns: int = 128  # of the output for each program of expand
    max_splits: int = 16  # of the sums over the inputs
    min_split: int = 256  # inputs of a split: a program with fewer takes as long to start as to compute
    programs_per_sm: int = 4  # of shrink, which mostly waits for memory
    shrink_warps: int = 2
    expand_warps: int = 4


CONFIG = Config()


@triton.jit(do_not_specialize=["n_groups", "n_rows"])
def _lora_shrink_kernel(
    x_ptr,
    a_ptr,
    hidden_ptr,  # [splits, rows, parts * RANK] float32, in the order of rows_ptr
    rows_ptr,
    groups_ptr,
    n_groups,
    n_rows,
    in_size,
    split_size,
    x_row_stride,
    a_slot_stride,
    a_row_stride,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a group
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    part_idx, split = tl.program_id(1), tl.program_id(2)
    slot = tl.load(groups_ptr + group).to(tl.int64)
    if slot < 0:
        return
    places = tl.load(groups_ptr + n_groups + group) + block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = places < tl.load(groups_ptr + 2 * n_groups + group)
    rows = tl.load(rows_ptr + places, mask=is_row, other=0).to(tl.int64)
    ranks = tl.arange(0, RANK)
    cols = tl.arange(0, BLOCK_K)[None, :]
    begin = split * split_size
    end = tl.minimum(begin + split_size, in_size)
    x_ptrs = x_ptr + rows[:, None] * x_row_stride + cols
    a_ptrs = a_ptr + slot * a_slot_stride + (part_idx * RANK + ranks).to(tl.int64)[:, None] * a_row_stride + cols

    acc = tl.zeros([RANK, BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_K):
        is_in = cols < end - start
        x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_in, other=0.0)
        a = tl.load(a_ptrs + start, mask=is_in, other=0.0)
        acc = tl.dot(a, x.T, acc=acc, input_precision="ieee")
    hidden_offsets = (split.to(tl.int64) * n_rows + places) * (PARTS * RANK) + part_idx * RANK
    tl.store(hidden_ptr + hidden_offsets[None, :] + ranks[:, None], acc, mask=is_row[None, :])


@triton.jit(do_not_specialize=["n_groups", "n_rows"])
def _lora_expand_kernel(
    out_ptr,
    hidden_ptr,
    b_ptr,
    rows_ptr,
    groups_ptr,
    n_groups,
    n_rows,
    end_0,  # the output column behind part 0
    end_1,
    end_2,
    out_row_stride,
    b_slot_stride,
    b_row_stride,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    group, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    part_idx = tl.program_id(2)
    slot = tl.load(groups_ptr + group).to(tl.int64)
    end = tl.where(part_idx == 0, end_0, tl.where(part_idx == 1, end_1, end_2))
    begin = tl.where(part_idx == 0, 0, tl.where(part_idx == 1, end_0, end_1)) + tl.program_id(0) * BLOCK_N
    if (slot < 0) | (begin >= end):
        return
    places = tl.load(groups_ptr + n_groups + group) + block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = places < tl.load(groups_ptr + 2 * n_groups + group)
    rows = tl.load(rows_ptr + places, mask=is_row, other=0).to(tl.int64)
    ranks = tl.arange(0, RANK)
    columns = begin + tl.arange(0, BLOCK_N)
    is_column = columns < end
    b_rows = columns.to(tl.int64)[:, None] * b_row_stride
    b = tl.load(b_ptr + slot * b_slot_stride + b_rows + ranks[None, :], mask=is_column[:, None], other=0.0)

    hidden = tl.zeros([BLOCK_M, RANK], tl.float32)
    for split in tl.static_range(SPLITS):
        hidden_offsets = (split * n_rows.to(tl.int64) + places) * (PARTS * RANK) + part_idx * RANK
        hidden += tl.load(hidden_ptr + hidden_offsets[:, None] + ranks[None, :], mask=is_row[:, None], other=0.0)
    added = tl.dot(b, hidden.to(b.dtype).T, input_precision="ieee")
    ptrs = out_ptr + rows[None, :] * out_row_stride + columns[:, None]
    is_place = is_row[None, :] & is_column[:, None]
    sums = tl.load(ptrs, mask=is_place, other=0.0).to(tl.float32) + added
    tl.store(ptrs, sums, mask=is_place)


def splits_of(groups: int, parts: int, in_size: int, config: Config = CONFIG) -> int:
    """Enough splits to give every multiprocessor its programs. It depends on the shape of the step alone."""
    wanted = config.programs_per_sm * _gpu.active.multiprocessors // max(groups * parts, 1)
    most = min(wanted, in_size // config.min_split, config.max_splits)
    return 1 << (max(most, 1).bit_length() - 1)


def new_hidden(splits: int, n_rows: int, weights: ops.LoraWeights) -> Tensor:
    """Memory for the result of ``shrink``."""
    width = weights.num_parts * weights.rank
    return torch.empty((splits, n_rows, width), dtype=torch.float32, device=weights.a.device)


def shrink(
    x: Tensor,
    weights: ops.LoraWeights,
    lora_rows: ops.LoraRows,
    splits: int,
    block_m: int,
    config: Config = CONFIG,
    hidden: Tensor | None = None,
) -> Tensor:
    """``[splits, rows, parts * rank]`` float32, in the order of ``lora_rows.rows``; rows of no group have no value.

    ``block_m``: rows of a program, which divides the size of a group. ``hidden``: memory for the result.
    """
    n_groups, n_rows, in_size = lora_rows.groups.shape[1], len(lora_rows.rows), x.shape[1]
    block_k = min(config.tile_bytes // x.element_size(), max(next_power_of_2(in_size), MIN_BLOCK_K))
    split_size = cdiv(cdiv(in_size, splits), block_k) * block_k
    if hidden is None:
        hidden = new_hidden(splits, n_rows, weights)
    tile_bytes, blocks = (weights.rank + block_m) * block_k * x.element_size(), lora_rows.max_group // block_m
    _lora_shrink_kernel[(n_groups * blocks, weights.num_parts, splits)](
        x,
        weights.a,
        hidden,
        lora_rows.rows,
        lora_rows.groups,
        n_groups,
        n_rows,
        in_size,
        split_size,
        x.stride(0),
        weights.a.stride(0),
        weights.a.stride(1),
        PARTS=weights.num_parts,
        RANK=weights.rank,
        BLOCKS=blocks,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=config.shrink_warps,
        num_stages=_gpu.stages_that_fit(tile_bytes, 3),
    )
    return hidden


def expand(
    out: Tensor,
    hidden: Tensor,
    weights: ops.LoraWeights,
    lora_rows: ops.LoraRows,
    block_m: int,
    config: Config = CONFIG,
) -> None:
    """Add the product of ``b`` and the sum of ``hidden`` over its splits."""
    splits, n_rows, _ = hidden.shape
    ends = (*weights.part_ends, *weights.part_ends[-1:] * (MAX_PARTS - weights.num_parts))
    widest = max(columns.stop - columns.start for columns in weights.parts())
    n_groups, blocks = lora_rows.groups.shape[1], lora_rows.max_group // block_m
    _lora_expand_kernel[(cdiv(widest, config.columns), n_groups * blocks, weights.num_parts)](
        out,
        hidden,
        weights.b,
        lora_rows.rows,
        lora_rows.groups,
        n_groups,
        n_rows,
        *ends,
        out.stride(0),
        weights.b.stride(0),
        weights.b.stride(1),
        PARTS=weights.num_parts,
        RANK=weights.rank,
        SPLITS=splits,
        BLOCKS=blocks,
        BLOCK_M=block_m,
        BLOCK_N=config.columns,
        num_warps=config.expand_warps,
    )


def check_lora(op: str, weights: ops.LoraWeights, lora_rows: ops.LoraRows) -> None:
    check_last_contiguous(op, a=weights.a, b=weights.b, rows=lora_rows.rows, groups=lora_rows.groups)
    if weights.num_parts > MAX_PARTS or weights.rank < ops.MIN_LORA_RANK:
        shape = f"{weights.num_parts} parts of rank {weights.rank}"
        raise ValueError(f"{op}: {shape}; the limits are {MAX_PARTS} parts of rank {ops.MIN_LORA_RANK} or more")


def add(
    out: Tensor,
    x: Tensor,
    weights: ops.LoraWeights,
    lora_rows: ops.LoraRows,
    splits: int | None = None,
    block_m: int | None = None,
) -> None:
    """``splits`` and ``block_m`` are chosen by the shape of the step, if they are None."""
    check_last_contiguous("add_lora", out=out, x=x)
    check_lora("add_lora", weights, lora_rows)
    rows, n_groups = rows_in_place("add_lora", "out", out), lora_rows.groups.shape[1]
    if not n_groups:
        return
    splits = splits or splits_of(n_groups, weights.num_parts, x.shape[1])
    block_m = block_m or lora_rows.max_group
    expand(rows, shrink(x, weights, lora_rows, splits, block_m), weights, lora_rows, block_m)


@ops.add_lora.impl("triton")
def add_lora(out: Tensor, x: Tensor, weights: ops.LoraWeights, lora_rows: ops.LoraRows) -> None:
    add(out, x, weights, lora_rows)


@ops.add_lora.impl(ops.batch_invariant("triton"))
def add_lora_batch_invariant(out: Tensor, x: Tensor, weights: ops.LoraWeights, lora_rows: ops.LoraRows) -> None:
    """Neither the splits of the sums nor the rows of a program depend on the step."""
    add(out, x, weights, lora_rows, INVARIANT_SPLITS, INVARIANT_ROWS)
