"""Node 0's end of a stream on which a rank of another node reads embeddings of images: see ipc/arena.py."""

from __future__ import annotations

import asyncio
from mmap import mmap

import numpy as np

from lightserve.cluster.nodes.streams import READ_BYTES
from lightserve.ipc.arena import HEADER, MAX_READ_BYTES, ROW


class ArenaEndpoint:
    """Answers one request after the other."""

    def __init__(self, arena: mmap) -> None:
        self._arena = np.frombuffer(arena, np.uint8)
        self._unread = bytearray()  # of a request that has not come whole
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def read(self) -> bytes:
        return await self._answers.get()

    async def write(self, data: bytes) -> None:
        self._unread += data
        while len(self._unread) >= HEADER.size:
            row_bytes, count = HEADER.unpack_from(self._unread)
            if not 0 < row_bytes * count <= MAX_READ_BYTES:
                raise ConnectionError(f"a rank asks for {count} rows of {row_bytes} bytes")
            size = HEADER.size + count * np.dtype(ROW).itemsize
            if len(self._unread) < size:
                return
            rows = np.frombuffer(bytes(self._unread[HEADER.size : size]), ROW)
            del self._unread[:size]
            self._answer(rows, row_bytes)

    def end(self) -> None:
        self._answers.put_nowait(b"")

    def close(self) -> None:
        """It has nothing that must be closed."""

    def _answer(self, rows: np.ndarray[tuple[int], np.dtype[np.int32]], row_bytes: int) -> None:
        num_rows = len(self._arena) // row_bytes
        if rows.min() < 0 or rows.max() >= num_rows:
            raise ConnectionError(f"a rank asks for rows {rows.min()} to {rows.max()}; there are {num_rows}")
        content = self._arena[: num_rows * row_bytes].reshape(num_rows, row_bytes)[rows].tobytes()
        for begin in range(0, len(content), READ_BYTES):
            self._answers.put_nowait(content[begin : begin + READ_BYTES])
