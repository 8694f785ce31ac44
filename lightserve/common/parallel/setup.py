"""Connect the ranks of a server to each other."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore  # where their types are known

from lightserve.common.parallel.groups import ONE_RANK, Parallel, ParallelSizes, RankGroup


def tcp_store(port: int, listen_fd: int | None, timeout_s: float) -> Store:
    """Where ranks on several nodes find each other, at a port of loopback. ``listen_fd``: of the rank that serves it.

    Such a store knows no keys. So it never listens on the network: a link with keys brings the other nodes there.
    """
    timeout = timedelta(seconds=timeout_s)
    is_master = listen_fd is not None
    return TCPStore(
        "127.0.0.1", port, is_master=is_master, wait_for_workers=False, timeout=timeout, master_listen_fd=listen_fd
    )


def connect_ranks(
    rank: int,
    sizes: ParallelSizes,
    rendezvous: str | Store,
    comm: str,
    timeout_s: float | None = None,
    custom_all_reduce_gpu: torch.device | None = None,
) -> Parallel:
    """Join the other ranks at ``rendezvous`` (a file or a store) with the device's collective library.

    ``timeout_s``: for all ranks of a store to connect to each other; None: torch's own limit, half an hour for gloo.
    ``custom_all_reduce_gpu``: if given, tensor-parallel ranks, all on one node, read few rows from each other's memory.
    Every group has a process group of its own. A collective over torch's default group would reach all ranks.
    """
    if sizes.world == 1:
        return Parallel()
    if isinstance(rendezvous, str):
        dist.init_process_group(comm, init_method=rendezvous, rank=rank, world_size=sizes.world)
    else:  # the default group connects all ranks, so it is the one that finds a closed network
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        dist.init_process_group(comm, store=rendezvous, rank=rank, world_size=sizes.world, timeout=timeout)
    parallel = Parallel(**{field.name: _own_group(rank, sizes.groups(field.name)) for field in fields(Parallel)})
    if custom_all_reduce_gpu is None or parallel.tp.size == 1:
        return parallel
    from lightserve.common.parallel.custom_all_reduce import connect_custom_all_reduce  # a CPU has no use for it

    custom_all_reduce = connect_custom_all_reduce(parallel.tp, custom_all_reduce_gpu)
    return replace(parallel, tp=replace(parallel.tp, custom_all_reduce=custom_all_reduce))


def _own_group(rank: int, groups: list[list[int]]) -> RankGroup:
    """Create all groups of a kind, as torch requires of every rank, and return the one with this rank in it."""
    rank_group = ONE_RANK
    for ranks in groups:
        process_group = dist.new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks and process_group is not None:
            rank_group = RankGroup(ranks.index(rank), len(ranks), process_group)
    return rank_group
