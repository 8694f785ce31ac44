"""A rank's place in each kind of group, and the collectives within a group."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from lightserve.common.parallel.custom_all_reduce import CustomAllReduce


@dataclass(slots=True)
class Traffic:
    """What a rank has given to the collectives of a group. Replayed graphs are not counted."""

    bytes: int = 0
    calls: int = 0

    def add(self, x: Tensor) -> None:
        self.bytes += x.nbytes
        self.calls += 1


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks that work on one thing together, and this rank's place among them.

    In a group of one rank every collective returns its input. A larger group without a ``process_group`` is enough to
    load this rank's weights; its collectives fail.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    custom_all_reduce: CustomAllReduce | None = None  # for sums of few rows
    sums_in_order: bool = False  # the bits of a sum do not depend on its place in ``x``
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def part_of(self, count: int) -> slice:
        """This rank's part of ``count`` heads or rows. With fewer of them than ranks, neighbouring ranks share one."""
        if count >= self.size:
            per_rank = count // self.size
            return slice(self.rank * per_rank, (self.rank + 1) * per_rank)
        shared = self.rank * count // self.size
        return slice(shared, shared + 1)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks. The sum may be in its place."""
        if self.size > 1:
            if self._must_order:
                return _ordered_sum(self.all_gather_rows(x).view(self.size, *x.shape))
            self.traffic.add(x)
            if self.custom_all_reduce is not None and self.custom_all_reduce.takes(x):
                return self.custom_all_reduce.sum(x)
            dist.all_reduce(x, group=self._connected())
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the ``x`` of all ranks along the last dimension."""
        if self.size == 1:
            return x
        self.traffic.add(x)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self._connected())
        return torch.cat(parts, dim=-1)

    def all_gather_rows(self, x: Tensor) -> Tensor:
        """The rows of all ranks, those of the first rank first. Every rank has as many."""
        if self.size == 1:
            return x
        self.traffic.add(x)
        rows = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(rows), x.contiguous(), group=self._connected())
        return rows.flatten(0, 1)

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks. Every rank gets as many rows of the sum: the first rank the first ones."""
        if self.size == 1:
            return x
        if self._must_order:
            gathered = self.all_gather_rows(x).view(self.size, self.size, len(x) // self.size, *x.shape[1:])
            return _ordered_sum(gathered[:, self.rank])
        self.traffic.add(x)
        parts = x.contiguous().view(self.size, len(x) // self.size, *x.shape[1:])
        local_rows = torch.empty_like(parts[0])
        dist.reduce_scatter(local_rows, list(parts), group=self._connected())
        return local_rows

    @property
    def _must_order(self) -> bool:
        """A ring adds the ranks in an order that depends on the place. Two of them have one order."""
        return self.sums_in_order and self.size > 2

    def send_to_next(self, x: Tensor) -> dist.Work | None:
        """Start to send ``x`` to the next rank. Keep ``x`` as it is until the work is done."""
        self.traffic.add(x)
        return dist.isend(x, group=self._connected(), group_dst=self.rank + 1)

    def receive_from_previous(self, into: Tensor) -> None:
        """Wait for what the rank before this one sends; on a GPU, the present stream waits."""
        dist.recv(into, group=self._connected(), group_src=self.rank - 1)

    def min_of_ranks(self, value: int, device: torch.device) -> int:
        if self.size == 1:
            return value
        box = torch.tensor(value, device=device)
        dist.all_reduce(box, op=dist.ReduceOp.MIN, group=self._connected())
        return int(box)

    def _connected(self) -> dist.ProcessGroup:
        """A collective without a group would silently run over all ranks of the process."""
        if self.process_group is None:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no process group; create it with connect_ranks")
        return self.process_group


def _ordered_sum(parts: Tensor) -> Tensor:
    """Over the first dimension, which is that of the ranks."""
    total = parts[0].float()
    for of_rank in parts[1:]:
        total = total + of_rank
    return total.to(parts.dtype)


ONE_RANK = RankGroup()


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank's place in every kind of group. A model reads only the groups that it uses."""

    tp: RankGroup = ONE_RANK  # tensor parallel: ranks that split every layer
    pp: RankGroup = ONE_RANK  # pipeline parallel: ranks that hold different layers
    dp: RankGroup = ONE_RANK  # data-parallel attention: ranks that compute different requests
    ep: RankGroup = ONE_RANK  # expert parallel: ranks that hold different experts

    @property
    def num_ranks(self) -> int:
        return self.tp.size * self.pp.size * self.dp.size

    @property
    def rank(self) -> int:
        """Among all ranks: see ParallelSizes."""
        return self.dp.rank * self.pp.size * self.tp.size + self.rank_in_group

    @property
    def rank_in_group(self) -> int:
        """Among the ranks that compute the same requests: it says which part of their KV this rank has."""
        return self.pp.rank * self.tp.size + self.tp.rank

    def with_ordered_sums(self) -> Parallel:
        """For a row's result not to depend on the rows beside it."""
        return Parallel(*(replace(getattr(self, kind.name), sums_in_order=True) for kind in fields(self)))

    def min_of_engine(self, value: int, device: torch.device) -> int:
        """The least of all ranks."""
        for group in (self.tp, self.pp, self.dp):
            value = group.min_of_ranks(value, device)
        return value


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How many ranks each kind of group has.

    A rank's number is ``(dp_rank * pp + pp_rank) * tp + tp_rank``. Expert groups take ``ep`` consecutive ranks of one
    pipeline stage, in the order of their numbers; ``ep`` divides ``dp * tp``.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.ep) < 1:
            raise ValueError(f"every group needs at least one rank: {self}")
        if self.dp * self.tp % self.ep:
            raise ValueError(f"ep={self.ep} does not divide dp * tp = {self.dp * self.tp}")

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def groups(self, kind: str) -> list[list[int]]:
        """The rank numbers of every group of a kind: ``tp``, ``pp``, ``dp`` or ``ep``."""
        numbers = torch.arange(self.world).view(self.dp, self.pp, self.tp)
        rows = {
            "tp": numbers,
            "pp": numbers.permute(0, 2, 1),
            "dp": numbers.permute(1, 2, 0),
            "ep": numbers.permute(1, 0, 2).reshape(-1, self.ep),
        }[kind]
        groups: list[list[int]] = rows.reshape(-1, rows.shape[-1]).tolist()
        return groups
