"""Where the states of requests are, in models with recurrent layers: which rows a step reads and writes.

The router names the row that a request writes in each step. The request reads the one that it wrote last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightserve.common import ops
from lightserve.messages.int_arrays import Int32Array, Int64Array


class StateColumns(NamedTuple):
    """The part of a step's input that says it, on the host or the device: the int32 columns of ops.StateBatch."""

    start: Any  # [requests + 1]
    read_row: Any  # [requests]
    write_row: Any  # [requests]
    snapshot_row: Any  # [requests]
    snapshot_len: Any  # [requests]


class WrittenRows(NamedTuple):
    """Of the requests of a step. Snapshots are those of ops.Snapshots."""

    rows: Int32Array
    snapshot_rows: Int32Array
    snapshot_lens: Int32Array

    @classmethod
    def of_step(cls, written: Int32Array, snapshots: Int32Array, num_reqs: int) -> WrittenRows:
        """``written``: the rows of the requests, then those of snapshots. ``snapshots``: see Step."""
        rows = np.full(num_reqs, ops.NO_ROW, dtype=np.int32)
        lens = np.zeros(num_reqs, dtype=np.int32)
        rows[snapshots[::2]], lens[snapshots[::2]] = written[num_reqs:], snapshots[1::2]
        return cls(written[:num_reqs], rows, lens)

    def arranged(self, order: Int64Array) -> WrittenRows:
        return WrittenRows(*(column[order] for column in self))


class StateRows:
    def __init__(self, max_reqs: int) -> None:
        self._row: Int32Array = np.full(max_reqs, ops.NO_ROW, dtype=np.int32)  # that each request has written last

    def enter(self, row: int, held: Int32Array) -> None:
        """A request enters the batch. ``held``: the row that it reads first; empty: it begins without a state."""
        self._row[row] = held[0] if len(held) else ops.NO_ROW

    def pack(self, columns: StateColumns, rows: Int64Array, q_len: Int64Array, written: WrittenRows) -> None:
        """Requests compute ``q_len`` tokens, and write these rows. The rest stays padding."""
        count = len(rows)
        columns.start[1 : count + 1] = ends = np.cumsum(q_len)
        # padding has no tokens of its own in a step with prompts: see step_input.py
        columns.start[count + 1 :] = np.maximum(columns.start[count + 1 :], ends[-1])
        columns.read_row[:count] = self._row[rows]
        columns.write_row[:count] = self._row[rows] = written.rows
        columns.snapshot_row[:count], columns.snapshot_len[:count] = written.snapshot_rows, written.snapshot_lens
