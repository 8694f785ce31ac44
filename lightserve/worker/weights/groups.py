"""How a trainer's tensors reach this worker: by a process group of torch, or by NCCL alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore  # where their types are known

from lightserve.common.device import device_of
from lightserve.messages.weights import JoinNccl, JoinTorchGroup
from lightserve.worker.weights.unique_id import UNIQUE_ID_KEY, read_unique_id

TRAINER = 0  # its rank in every group


class TrainerGroup(ABC):
    """The trainer and all workers. The trainer sends, the workers receive."""

    @abstractmethod
    def receive(self, into: Tensor) -> None:
        """Wait for the next tensor of the trainer."""

    @abstractmethod
    def close(self) -> None: ...


class TorchGroup(TrainerGroup):
    """A process group with a trainer: torch's default group may not exist, or not reach the trainer.

    The store's keys are those of ``init_process_group`` with the group's name as a prefix, as trainers make them.
    """

    def __init__(self, command: JoinTorchGroup, rank: int, device: torch.device) -> None:
        self._is_gloo = command.backend == "gloo"  # which knows no floats of 8 bits: they come as bytes
        self._device = torch.device("cpu") if self._is_gloo else device
        timeout = timedelta(seconds=command.timeout_s)
        store = TCPStore(
            command.address,
            command.port,
            world_size=command.world_size,
            is_master=False,
            timeout=timeout,
            wait_for_workers=True,
        )
        self._group, _ = dist.distributed_c10d._new_process_group_helper(
            command.world_size,
            command.first_rank + rank,
            [],  # as for a default group
            command.backend,
            PrefixStore(command.name, store),
            group_name=dist.distributed_c10d.GroupName(command.name),
            timeout=timeout,
        )
        ranks = {member: member for member in range(command.world_size)}
        dist.distributed_c10d._world.pg_group_ranks[self._group] = ranks

    def receive(self, into: Tensor) -> None:
        buffer = into if into.device.type == self._device.type else torch.empty_like(into, device=self._device)
        is_unknown = self._is_gloo and buffer.dtype.is_floating_point and buffer.itemsize == 1
        work = self._group.broadcast(buffer.view(torch.uint8) if is_unknown else buffer, TRAINER)
        work.wait()
        if buffer is not into:
            into.copy_(buffer)

    def close(self) -> None:
        dist.destroy_process_group(self._group)


class NcclGroup(TrainerGroup):
    def __init__(self, command: JoinNccl, rank: int, device: torch.device) -> None:
        unique_id = command.unique_id or _stored_unique_id(command)
        platform = device_of(device)
        self._communicator = platform.join_communicator(
            unique_id, command.first_rank + rank, command.world_size, device
        )

    def receive(self, into: Tensor) -> None:
        self._communicator.broadcast(into, TRAINER)

    def close(self) -> None:
        self._communicator.close()


def _stored_unique_id(command: JoinNccl) -> bytes:
    store = TCPStore(
        command.address,
        command.port,
        world_size=command.world_size,
        is_master=False,
        timeout=timedelta(seconds=command.timeout_s),
        wait_for_workers=True,  # the trainer waits until all ranks are counted
    )
    return read_unique_id(store.get(UNIQUE_ID_KEY))
