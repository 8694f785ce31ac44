"""The embeddings of images for ranks on other nodes: they lie in memory of node 0, the arena, and are read by row.

rank ──bytes of a row, number of rows, rows──▶ node 0 ──the content of these rows──▶ rank
"""

from __future__ import annotations

import socket
import struct

from lightserve.messages.int_arrays import Int32Array

HEADER = struct.Struct("<II")
ROW = "<i4"
MAX_READ_BYTES = 8 << 20  # of one request: the replies go over the link that steps take too


class ArenaReader:
    """One thread uses it."""

    def __init__(self, path: str) -> None:
        """``path``: the socket of this node, which is connected with node 0."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)

    def read(self, rows: Int32Array, into: memoryview) -> None:
        """Fill ``into`` with the content of these rows, one after the other."""
        row_bytes = len(into) // len(rows)
        most = max(MAX_READ_BYTES // row_bytes, 1)
        for begin in range(0, len(rows), most):
            asked = rows[begin : begin + most]
            self._socket.sendall(HEADER.pack(row_bytes, len(asked)) + asked.astype(ROW).tobytes())
            self._fill(into[begin * row_bytes : (begin + len(asked)) * row_bytes])

    def _fill(self, into: memoryview) -> None:
        while into:
            count = self._socket.recv_into(into)
            if not count:
                raise ConnectionError("node 0 does not send the embeddings of images any more")
            into = into[count:]
