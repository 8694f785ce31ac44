"""Products whose inputs are split over several programs: each stores its sum in float32, and a kernel adds them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common.triton_kernel._blocks import cdiv

BLOCK = 1024


@triton.jit
def _add_sums_kernel(sums_ptr, bias_ptr, out_ptr, count, width, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """``count``: numbers of a split."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < count
    total = tl.load(sums_ptr + places, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(sums_ptr + split * count.to(tl.int64) + places, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + places % width, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, total, mask=mask)


def new_sums(x: Tensor, rows: int, out_size: int, splits: int) -> Tensor:
    """Where the programs store: the output itself, if nothing is split."""
    return x.new_empty((splits, rows, out_size), dtype=x.dtype if splits == 1 else torch.float32)


def add_sums(sums: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``sums`` ``[splits, rows, out]``. The bias is added here, if there are several splits."""
    splits, rows, out_size = sums.shape
    if splits == 1:
        return sums[0]
    out = torch.empty((rows, out_size), dtype=dtype, device=sums.device)
    count = rows * out_size
    _add_sums_kernel[(cdiv(count, BLOCK),)](sums, bias, out, count, out_size, SPLITS=splits, BLOCK=BLOCK)
    return out
