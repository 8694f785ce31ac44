"""Arrays of token ids and KV slots: compact in memory, and bytes on the wire."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

NO_INT32 = np.empty(0, dtype=np.int32)
NO_INT64 = np.empty(0, dtype=np.int64)
NO_INT32.flags.writeable = NO_INT64.flags.writeable = False

MIN_ROOM = 64  # values that are added to the capacity at least
ROOM_SHARE = 4  # and this part of the length: appending stays cheap, and a long array wastes little


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
