"""Sums of a few rows over the GPUs of one node: each rank reads the rows of all others from their memory at once.

A ring passes its data on from rank to rank. For the rows of a decode step, waiting for each hop is most of its time.
"""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from lightserve.common.device import device_of
from lightserve.common.parallel.groups import RankGroup

logger = logging.getLogger(__name__)

# Each rank reads the rows of all ranks, so more ranks pay only for fewer bytes. These are the limits of vLLM and SGLang
# for GPUs with NVLink; they were not measured here.
MAX_BYTES_OF_FEW_RANKS = 512 * 1024
MAX_BYTES = 256 * 1024
FEW_RANKS = 4
ALIGNMENT = 16  # bytes
DTYPES = (torch.bfloat16, torch.float32)
ON_ONE_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch reads it too; for tests


class CustomAllReduce:
    """A buffer on the GPU of each rank of a group, which the others can read. All ranks create it together."""

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self.max_bytes = MAX_BYTES_OF_FEW_RANKS if process_group.size() <= FEW_RANKS else MAX_BYTES
        self._group_name = process_group.group_name
        self._buffer = symm_mem.empty(self.max_bytes, dtype=torch.uint8, device=device)
        symm_mem.rendezvous(self._buffer, group=self._group_name)

    def takes(self, x: Tensor) -> bool:
        is_aligned = x.nbytes % ALIGNMENT == 0 and x.is_contiguous()
        return is_aligned and 0 < x.nbytes <= self.max_bytes and x.dtype in DTYPES and not x.is_cpu

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the ``x`` of all ranks, as a new tensor."""
        shared = self._buffer[: x.nbytes].view(x.dtype)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x.view(-1), "sum", self._group_name)
        return total.view(x.shape)


def connect_custom_all_reduce(group: RankGroup, device: torch.device) -> CustomAllReduce | None:
    """None if a rank's GPU cannot read the memory of another one's. All ranks of the group call it together."""
    indices = group.all_gather(torch.tensor([device.index], device=device)).tolist()
    others = [index for rank, index in enumerate(indices) if rank != group.rank]
    can_read = all(_can_read(device, peer) for peer in others)
    process_group = group.process_group
    if process_group is None or not group.min_of_ranks(int(can_read), device):
        if group.is_first:
            logger.info("a GPU cannot read another one's memory: all sums over ranks go through the process group")
        return None
    return CustomAllReduce(process_group, device)


def _can_read(device: torch.device, peer: int) -> bool:
    if device.index == peer:
        return os.environ.get(ON_ONE_GPU) == "1"
    return device_of(device).reads_peer(device, peer)
