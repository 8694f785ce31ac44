"""Captured functions on a GPU: what a replay returns, and the memory of many captures."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightserve.common.device.cuda_graph import LARGE_BYTES, CudaGraphs

KEYS = range(64, 48, -1)


class Result(NamedTuple):
    large: Tensor
    sums: tuple[Tensor, ...]
    small: Tensor


def compute(inputs: Tensor, rows: int) -> Result:
    """``large`` is not the beginning of its memory, and has gaps."""
    wide = inputs[:rows, None].float() * torch.arange(LARGE_BYTES // 32, device=inputs.device)
    large = wide[1:, :-8]
    return Result(large, (large.sum(),), large[:, :2] + 1)


@pytest.mark.gpu
def test_large_results_share_their_memory() -> None:
    device = torch.device("cuda")
    graphs = CudaGraphs(compute)
    example = torch.zeros(max(KEYS), dtype=torch.int32, device=device)
    expected = {rows: compute(example.copy_(torch.arange(len(example))), rows) for rows in KEYS}  # also launches all

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    graphs.capture((rows, torch.zeros_like(example)) for rows in KEYS)
    kept = torch.cuda.memory_allocated() - before

    assert kept < LARGE_BYTES  # 16 results of 8 MB
    for rows in [*KEYS, *reversed(KEYS)]:
        result = graphs.replay(rows, torch.arange(len(example), dtype=torch.int32).pin_memory())
        assert torch.equal(result.large, expected[rows].large)
        assert torch.equal(result.small, expected[rows].small)
        assert torch.equal(result.sums[0], expected[rows].sums[0])
