"""How the blocks of frames get to the other end of a connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lightserve.worker.kv_mover.pipe import Pipe

SKIP_BYTES = 1 << 20  # of one read that is dropped


class SendingCarrier(Protocol):
    def send(self, header: bytes, blocks: Sequence[memoryview]) -> None:
        """The header goes through the pipe, before the blocks. They may be changed afterwards."""


class ReceivingCarrier(Protocol):
    def read(self, blocks: Sequence[memoryview]) -> None:
        """Fill them with the blocks of the frame whose header was read."""

    def skip(self, num_blocks: int, block_bytes: int) -> None:
        """Nobody needs them."""

    def close(self) -> None: ...


class PipeCarrier:
    """They go through the pipe too. It is both ends."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def send(self, header: bytes, blocks: Sequence[memoryview]) -> None:
        self._pipe.send_all([memoryview(header), *blocks])

    def read(self, blocks: Sequence[memoryview]) -> None:
        self._pipe.read_into(blocks)

    def skip(self, num_blocks: int, block_bytes: int) -> None:
        left = num_blocks * block_bytes
        spare = memoryview(bytearray(min(left, SKIP_BYTES)))
        while left:
            self._pipe.read_into([spare[:left]])
            left -= len(spare[:left])

    def close(self) -> None: ...
