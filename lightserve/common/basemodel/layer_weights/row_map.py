"""Which rows of a checkpoint tensor are the rows of a weight.

Checkpoints store q, k and v as one tensor, or the two halves of a rotary pair side by side. A weight says where its
rows are, and loading puts them in the order in which the ops read them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowMap(NamedTuple):
    total: int  # rows of the checkpoint's tensor
    rows: Tensor  # int64: the number there of each row of the weight

    def stored_rows(self, weight_rows: slice) -> slice | Tensor:
        """Where the rows ``weight_rows`` of the weight are. Neighbours are a slice, which reads less of the file."""
        rows = self.rows[weight_rows]
        first = int(rows[0]) if len(rows) else 0
        if torch.equal(rows, torch.arange(first, first + len(rows))):
            return slice(first, first + len(rows))
        return rows


def whole(heads: int, dim: int) -> RowMap:
    """The tensor has the rows of the weight and no others."""
    return RowMap(heads * dim, torch.arange(heads * dim))


def in_blocks(*sizes: int) -> list[RowMap]:
    """The tensor holds several weights, one after the other."""
    rows = torch.arange(sum(sizes)).split_with_sizes(sizes)
    return [RowMap(sum(sizes), block) for block in rows]


def in_kv_groups(num_heads: int, num_kv_heads: int, dim: int) -> list[RowMap]:
    """q, k and v of a tensor that holds, for each KV head, its query heads, its key and its value."""
    group = num_heads // num_kv_heads
    total = num_kv_heads * (group + 2) * dim
    heads = torch.arange(total).view(num_kv_heads, group + 2, dim)
    return [RowMap(total, rows.flatten()) for rows in heads.split_with_sizes([group, 1, 1], dim=1)]


def in_head_parts(num_heads: int, *sizes: int) -> list[RowMap]:
    """The weights of a tensor that holds, for each head, ``sizes[i]`` rows of weight i, one weight after the other."""
    total = num_heads * sum(sizes)
    parts = torch.arange(total).view(num_heads, -1).split_with_sizes(sizes, dim=1)
    return [RowMap(total, rows.flatten()) for rows in parts]


def pairs_to_halves(row_map: RowMap, heads: int, rotary_dim: int, *, first: int = 0) -> RowMap:
    """Reorder the rotary rows of each head, from row ``first`` on, from (0, 1, 2, 3, ...) to (0, 2, ..., 1, 3, ...).

    The scores stay the same if queries and keys are reordered alike.
    """
    rows = row_map.rows.view(heads, -1)
    before, rotary, after = rows.tensor_split([first, first + rotary_dim], dim=1)
    rotary = rotary.reshape(heads, -1, 2).transpose(1, 2).flatten(1)
    return RowMap(row_map.total, torch.cat((before, rotary, after), dim=1).flatten())
