"""Which rows the experts of a layer compute: those of the step, or of the steps of all attention groups.

With data-parallel attention every group computes a step of its own, and the experts are divided over the ranks of all
groups. So each rank gathers the rows of all groups before its experts, and gets the sums of its own rows after them:

    group 0: rows ─┐        ┌─▶ experts of its ranks ─┐               ┌─▶ rows of group 0
                   ├─ gather┤                         ├─ sum, scatter ┤
    group 1: rows ─┘        └─▶ experts of its ranks ─┘               └─▶ rows of group 1

All groups gather as many rows as the largest step has. A group without a step gathers padding: no rank may leave out a
gather or a sum, because the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightserve.common.basemodel.routed_experts import ExpertsWriter
from lightserve.common.parallel import RankGroup

ONE_GROUP = RankGroup()


@dataclass(frozen=True, slots=True)
class ExpertRows:
    is_padding: Tensor  # [rows that ``gather`` returns]: rows whose output is not used
    groups: RankGroup = ONE_GROUP  # one rank of each group
    rows_per_group: int = 0  # that are gathered
    writer: ExpertsWriter | None = None  # keeps which experts are chosen; None: nobody wants to know

    @property
    def first_row(self) -> int:
        """Of this group, among those that ``gather`` returns."""
        return self.groups.rank * self.rows_per_group

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all groups, from those of this one."""
        if self.groups.size == 1:
            return x
        return self.groups.all_gather_rows(pad(x, (0, 0, 0, self.rows_per_group - len(x))))

    def scatter(self, out: Tensor, count: int) -> Tensor:
        """The first ``count`` rows of this group, summed over one rank of each group."""
        return out if self.groups.size == 1 else self.groups.reduce_scatter_rows(out)[:count]


def expert_rows(is_padding: Tensor, groups: RankGroup, group_tokens: Sequence[int]) -> ExpertRows:
    """``is_padding``: of this group's rows. ``group_tokens``: of each group; empty: all have the same step."""
    if groups.size == 1:
        return ExpertRows(is_padding)
    if not group_tokens:
        return ExpertRows(is_padding.repeat(groups.size), groups, len(is_padding))
    rows = max(group_tokens)
    tokens = torch.tensor(group_tokens)[:, None]
    is_padding = (torch.arange(rows) >= tokens).flatten().to(is_padding.device, non_blocking=True)
    return ExpertRows(is_padding, groups, rows)
