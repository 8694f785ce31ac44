"""Connect the ranks of a server to each other."""

from __future__ import annotations

from dataclasses import fields

import torch.distributed as dist

from lightserve.common.parallel.groups import ONE_RANK, Parallel, ParallelSizes, RankGroup


def connect_ranks(rank: int, sizes: ParallelSizes, init_method: str, comm: str) -> Parallel:
    """Join the other ranks at ``init_method`` (a file or a loopback port) with the device's collective library.

    Every group has a process group of its own. A collective over torch's default group would reach all ranks.
    """
    if sizes.world == 1:
        return Parallel()
    dist.init_process_group(comm, init_method=init_method, rank=rank, world_size=sizes.world)
    return Parallel(**{field.name: _own_group(rank, sizes.groups(field.name)) for field in fields(Parallel)})


def _own_group(rank: int, groups: list[list[int]]) -> RankGroup:
    """Create all groups of a kind, as torch requires of every rank, and return the one with this rank in it."""
    own = ONE_RANK
    for ranks in groups:
        process_group = dist.new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks and process_group is not None:
            own = RankGroup(ranks.index(rank), len(ranks), process_group)
    return own
