"""Arrays of token ids and KV slots: compact in memory, and bytes on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

if TYPE_CHECKING:
    Int32s: TypeAlias = Any  # of a message: an array, or a list in a message that is not sent
    Int64s: TypeAlias = Any  # the same of 64 bits
else:  # what a receiver gets
    Int32s, Int64s = Int32Array, Int64Array

NO_INT32 = np.empty(0, dtype=np.int32)
NO_INT64 = np.empty(0, dtype=np.int64)
NO_INT32.flags.writeable = NO_INT64.flags.writeable = False

MIN_ROOM = 64  # values that are added to the capacity at least
ROOM_SHARE = 4  # and this part of the length: appending stays cheap, and a long array wastes little
BLOCK = 64  # values that wait in a row of Tails before they are appended to the array of a request


def int32s(values: Int32Array | Sequence[int]) -> Int32Array:
    """Without a copy if it is such an array already."""
    return np.asarray(values, dtype=np.int32)


def int64s(values: Int64Array | Sequence[int]) -> Int64Array:
    """The same of 64 bits."""
    return np.asarray(values, dtype=np.int64)


class GrowingArray:
    """An int32 array to which values are appended, in amortised constant time each."""

    __slots__ = ("_len", "_room")

    def __init__(self, values: Int32Array | Sequence[int] = NO_INT32) -> None:
        """``values`` are not copied before something is appended."""
        self._room = int32s(values)
        self._len = len(self._room)

    def __len__(self) -> int:
        return self._len

    @property
    def view(self) -> Int32Array:
        """The values so far. They do not change when more are appended."""
        return self._room[: self._len]

    def item(self, at: int) -> int:
        number: int = self._room.item(at)
        return number

    def append(self, value: int) -> None:
        if self._len == len(self._room):
            self.extend((value,))
            return
        self._room[self._len] = value
        self._len += 1

    def extend(self, values: Int32Array | Sequence[int]) -> None:
        end = self._len + len(values)
        if end > len(self._room):
            room = np.empty(end + max(MIN_ROOM, end // ROOM_SHARE), dtype=np.int32)
            room[: self._len] = self.view
            self._room = room
        self._room[self._len : end] = values
        self._len = end


class Tails:
    """The last values of one growing array per row, so that many arrays get one more value in one call."""

    def __init__(self, rows: int) -> None:
        self._values: Int32Array = np.empty((rows, BLOCK), dtype=np.int32)
        self._lens = np.zeros(rows, dtype=np.int64)
        self._limits = BLOCK - np.arange(rows) % (BLOCK // 2)  # so that not all rows are full at once

    def full(self, rows: Int64Array, counts: Int32Array | int = 1) -> list[int]:
        """Those of ``rows`` that must be taken before ``counts`` more values are appended, at most BLOCK."""
        full: list[int] = rows[self._lens[rows] + counts > self._limits[rows]].tolist()
        return full

    def append(self, rows: Int64Array, values: Int32Array, counts: Int32Array = NO_INT32) -> None:
        """``counts`` values to each of ``rows``, which differ, at most BLOCK; empty: one each."""
        at = self._lens[rows]
        if not len(counts):
            self._values[rows, at] = values
            self._lens[rows] = at + 1
            return
        first = np.cumsum(counts) - counts  # of a row's values
        self._values[np.repeat(rows, counts), np.arange(len(values)) + np.repeat(at - first, counts)] = values
        self._lens[rows] = at + counts

    def extend(self, rows: Int64Array, values: npt.NDArray[np.int32]) -> None:
        """Several values to each of ``rows``: a row of ``values``. At most BLOCK."""
        at = self._lens[rows]
        self._values[rows[:, None], at[:, None] + np.arange(values.shape[1])] = values
        self._lens[rows] = at + values.shape[1]

    def take(self, row: int) -> Int32Array:
        """The values of a row, which is empty afterwards. They are valid until the next call."""
        count, self._lens[row] = int(self._lens[row]), 0
        values: Int32Array = self._values[row, :count]
        return values

    def last(self, rows: Int64Array) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
        """The last value of each row, and which of the rows have one."""
        at = self._lens[rows] - 1
        values: Int32Array = self._values[rows, at]
        return values, at >= 0


class Heads:
    """The next values of one array per row, so that many arrays lose their first value in one call."""

    def __init__(self, rows: int) -> None:
        self._values: Int32Array = np.empty((rows, BLOCK), dtype=np.int32)
        self._at = np.zeros(rows, dtype=np.int64)  # the next value of each row
        self._ends = np.zeros(rows, dtype=np.int64)

    def empty(self, rows: Int64Array) -> Int64Array:
        """Those of ``rows`` that have no values left: call ``fill``."""
        empty: Int64Array = rows[self._at[rows] == self._ends[rows]]
        return empty

    def fill(self, row: int, values: Int32Array) -> None:
        """The first of ``values`` are the next ones of the row, which has none."""
        count = min(len(values), BLOCK - row % (BLOCK // 2))  # so that not all rows are empty at once
        self._values[row, :count] = values[:count]
        self._at[row], self._ends[row] = 0, count

    def take(self, rows: Int64Array) -> Int32Array:
        """The next value of each of ``rows``, which differ."""
        at = self._at[rows]
        self._at[rows] = at + 1
        values: Int32Array = self._values[rows, at]
        return values

    def clear(self, row: int) -> None:
        self._at[row] = self._ends[row] = 0
