"""Which tokens of a step belong to which request, and where its state is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

NO_ROW = -1


class Snapshots(NamedTuple):
    """A second row that a request writes, where it has computed some of its tokens.

    No request of the batch reads it or writes it otherwise.
    """

    rows: Tensor  # [batch] int32; NO_ROW: the request has none
    lens: Tensor  # [batch] int32: its tokens of the step before that, at least one and not all


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The requests of a step. A layer's states are one tensor whose first dimension is rows.

    A request continues from the row that it reads, and its final state goes to the row that it writes, which may be the
    same. So a snapshot or a fork needs no copy, only another row to write. No other request of the batch reads or
    writes a row that a request writes.
    """

    b1_start: Tensor  # [batch + 1] int32: the first token of each request, and the end of the last one
    b_read_row: Tensor  # [batch] int32; NO_ROW: the request begins with zeros
    b_write_row: Tensor  # [batch] int32; NO_ROW: the state is not kept. A request without tokens must have it
    max_tokens: int  # no request has more; 1 in a decode step
    snapshots: Snapshots | None = None
    # What a backend derives once for all layers of a step. The key is all that it depends on.
    plans: dict[Hashable, Any] = field(default_factory=dict)
    # The ops that ``run`` has computed, without a batch: they can be computed again with fewer tokens. None: not kept.
    recorded: list[Callable[[StateBatch], Tensor]] | None = None

    def run(self, state_op: Callable[..., Tensor], *args: Any) -> Tensor:
        """Compute an op with these requests. Its last parameter is the batch."""
        if self.recorded is not None:
            self.recorded.append(partial(state_op, *args))
        return state_op(*args, self)

    def requests(self) -> Iterator[tuple[slice, int, int]]:
        """The tokens, the row to read and the row to write of each request that has tokens. It waits for the device.

        One with a snapshot comes twice: the tokens before it, and those after it, which continue from its row.
        """
        starts = self.b1_start.tolist()
        rows = zip(self.b_read_row.tolist(), self.b_write_row.tolist(), self._snapshots(), strict=True)
        for start, end, (read, write, (row, count)) in zip(starts[:-1], starts[1:], rows, strict=True):
            if row != NO_ROW:
                yield slice(start, start + count), read, row
                start, read = start + count, row
            if end > start:
                yield slice(start, end), read, write

    def _snapshots(self) -> list[tuple[int, int]]:
        if self.snapshots is None:
            return [(NO_ROW, 0)] * len(self.b_read_row)
        return list(zip(*(column.tolist() for column in self.snapshots), strict=True))


def read_state(states: Tensor, row: int) -> Tensor:
    return torch.zeros_like(states[0]) if row == NO_ROW else states[row]


def write_state(states: Tensor, row: int, state: Tensor) -> None:
    if row != NO_ROW:
        states[row] = state
