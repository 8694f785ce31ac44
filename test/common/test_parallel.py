"""Rank groups have their own collectives, and a group of one rank needs none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightserve.common.parallel import Parallel, ParallelSizes, RankGroup, connect_ranks
from test.ranks import run_ranks

CPU = torch.device("cpu")


def test_collectives_of_one_rank_return_their_input() -> None:
    x = torch.arange(6.0).view(2, 3)

    for group in (Parallel().tp, Parallel().pp, Parallel().dp, Parallel().ep):
        assert (group.rank, group.size) == (0, 1)
        assert group.all_reduce(x) is x
        assert group.all_gather(x) is x
        assert group.all_gather_rows(x) is x
        assert group.reduce_scatter_rows(x) is x
        assert group.min_of_ranks(7, CPU) == 7


def test_one_rank_starts_no_process_group() -> None:
    assert connect_ranks(0, ParallelSizes(), "file:///nowhere", "gloo") == Parallel()
    assert not dist.is_initialized()


def test_a_group_that_is_not_connected_refuses_collectives() -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 has no process group"):
        RankGroup(1, 2).all_reduce(torch.zeros(1))


@pytest.mark.parametrize(
    ("sizes", "kind", "groups"),
    [
        (ParallelSizes(tp=2, pp=2), "tp", [[0, 1], [2, 3]]),
        (ParallelSizes(tp=2, pp=2), "pp", [[0, 2], [1, 3]]),
        (ParallelSizes(tp=2, pp=2, dp=2), "dp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (ParallelSizes(tp=2, pp=2, dp=2, ep=4), "ep", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (ParallelSizes(tp=2, dp=2, ep=2), "ep", [[0, 1], [2, 3]]),
        (ParallelSizes(tp=2), "ep", [[0], [1]]),
    ],
)
def test_every_rank_is_in_one_group_of_each_kind(sizes: ParallelSizes, kind: str, groups: list[list[int]]) -> None:
    assert sizes.groups(kind) == groups


def test_an_expert_group_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ep=4 does not divide dp \* tp = 2"):
        ParallelSizes(tp=2, pp=2, ep=4)


def _sum_in_order(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    parallel = connect_ranks(rank, ParallelSizes(tp=4), f"file://{folder}/store", "gloo").with_ordered_sums()
    x = torch.randn(32, 500, generator=torch.Generator().manual_seed(rank))
    rows = parallel.tp.all_reduce(x.clone())
    alone = torch.cat([parallel.tp.all_reduce(row.clone()) for row in x.view(32, 1, 500)])
    scattered = parallel.tp.reduce_scatter_rows(x.clone())
    half = parallel.tp.all_reduce(x.bfloat16())
    torch.save((x, rows, alone, scattered, half), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.tp
def test_ordered_sums_of_a_row_have_the_same_bits_among_other_rows_and_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(_sum_in_order, 4, str(tmp_path))

    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    xs = [x for x, *_ in saved]
    expected = ((xs[0] + xs[1]) + xs[2]) + xs[3]
    for rank, (_, rows, alone, scattered, half) in enumerate(saved):
        assert torch.equal(rows, expected)
        assert torch.equal(alone, expected)
        assert torch.equal(scattered, expected[rank * 8 :][:8])
        of_half = sum((x.bfloat16().float() for x in xs), torch.zeros(()))
        assert torch.equal(half, of_half.bfloat16())


def _run_rank(rank: int, sizes: ParallelSizes, folder: str) -> None:
    torch.set_num_threads(1)
    parallel = connect_ranks(rank, sizes, f"file://{folder}/store", "gloo")
    results = {
        kind: [
            group.all_reduce(torch.tensor([float(1 << rank)])),
            group.all_gather(torch.tensor([[float(rank)]])),
            group.all_gather_rows(torch.tensor([[float(rank)], [0.5]])),
            group.reduce_scatter_rows(torch.arange(2.0 * group.size)[:, None] + (1 << rank)),
            torch.tensor([group.rank, group.size, group.min_of_ranks(100 - rank, CPU)]),
        ]
        for kind in ("tp", "pp", "dp", "ep")
        for group in [getattr(parallel, kind)]
    }
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.tp
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [ParallelSizes(tp=2), ParallelSizes(tp=2, dp=2, ep=4)], ids=["two", "four"])
def test_collectives_reach_the_ranks_of_their_group_only(sizes: ParallelSizes, tmp_path: Path) -> None:
    run_ranks(_run_rank, sizes.world, sizes, str(tmp_path))

    for rank in range(sizes.world):
        results = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for kind in ("tp", "pp", "dp", "ep"):
            ranks = next(group for group in sizes.groups(kind) if rank in group)
            summed, gathered, rows, scattered, place = results[kind]
            first = 2 * ranks.index(rank)
            assert summed.tolist() == [sum(1 << other for other in ranks)]
            assert gathered.tolist() == [[float(other) for other in ranks]]
            assert rows.flatten().tolist() == [value for other in ranks for value in (float(other), 0.5)]
            assert scattered.flatten().tolist() == [
                len(ranks) * row + sum(1 << other for other in ranks) for row in (first, first + 1)
            ]
            assert place.tolist() == [ranks.index(rank), len(ranks), 100 - max(ranks)]
