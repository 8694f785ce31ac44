"""Ranks read few rows from each other's memory. Both ranks are on one GPU here, which torch allows for tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightserve.common.parallel import ParallelSizes, RankGroup, connect_ranks
from lightserve.common.parallel.custom_all_reduce import MAX_BYTES_OF_FEW_RANKS, ON_ONE_GPU
from test.ranks import run_ranks

SHAPES = [(1, 4096), (8, 4096), (64, 4096), (3, 24)]
GPU = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.tp
def test_sums_of_few_rows_are_those_of_the_process_group(tmp_path: Path) -> None:
    run_ranks(_check_rank, 2, str(tmp_path / "store"))


def _check_rank(rank: int, store: str) -> None:
    os.environ[ON_ONE_GPU] = "1"
    torch.cuda.set_device(GPU)
    tp = connect_ranks(rank, ParallelSizes(tp=2), f"file://{store}", "gloo", custom_all_reduce_gpu=GPU).tp
    assert tp.custom_all_reduce is not None
    for dtype in (torch.bfloat16, torch.float32):
        for seed, shape in enumerate(SHAPES):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + rank)).to(GPU, dtype)
            expected = x.clone()
            dist.all_reduce(expected, group=tp.process_group)
            assert tp.custom_all_reduce.takes(x) == (x.nbytes <= MAX_BYTES_OF_FEW_RANKS)
            assert torch.equal(tp.all_reduce(x), expected)
    _check_what_it_does_not_take(tp, rank)
    _check_graph(tp, rank)
    dist.destroy_process_group()


@pytest.mark.tp
def test_without_access_to_each_other_ranks_use_the_process_group(tmp_path: Path) -> None:
    run_ranks(_check_rank_without_access, 2, str(tmp_path / "store"))


def _check_rank_without_access(rank: int, store: str) -> None:
    device = torch.device("cpu", 0)  # of both ranks, and one device is allowed in tests on a GPU only
    tp = connect_ranks(rank, ParallelSizes(tp=2), f"file://{store}", "gloo", custom_all_reduce_gpu=device).tp
    assert tp.custom_all_reduce is None
    assert tp.all_reduce(torch.tensor([float(rank)])).tolist() == [1.0]
    dist.destroy_process_group()


def _check_what_it_does_not_take(tp: RankGroup, rank: int) -> None:
    large = torch.full((MAX_BYTES_OF_FEW_RANKS // 4 + 4,), float(rank), device=GPU)
    for x in (large, torch.full((3,), float(rank), device=GPU), torch.full((8,), float(rank), device=GPU).half()):
        assert tp.custom_all_reduce is not None
        assert not tp.custom_all_reduce.takes(x)
        assert bool((tp.all_reduce(x) == 1).all())


def _check_graph(tp: RankGroup, rank: int) -> None:
    """Sums that follow each other use the same buffer, also when a graph is replayed."""
    x = torch.zeros(4, 4096, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = tp.all_reduce(tp.all_reduce(x + 1) + rank)
    for number in range(3):
        x.fill_(number + rank)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((total == 2 * (2 * number + 1 + 2) + 1).all())
