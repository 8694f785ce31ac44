"""Tensor parallelism: this rank's place, and the two collectives that a model needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TpGroup:
    """This worker among the ranks that share a model; alone, every collective is the identity."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' ``x`` side by side along the last dimension."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def min_of_ranks(self, value: int, device: torch.device) -> int:
        if self.size == 1:
            return value
        box = torch.tensor(value, device=device)
        dist.all_reduce(box, op=dist.ReduceOp.MIN)
        return int(box)


def init_tp(rank: int, size: int, init_method: str, comm: str) -> TpGroup:
    """Meet the other ranks at ``init_method`` (a file or a loopback port) through the device's collective library."""
    if size > 1:
        dist.init_process_group(comm, init_method=init_method, rank=rank, world_size=size)
    return TpGroup(rank, size)
