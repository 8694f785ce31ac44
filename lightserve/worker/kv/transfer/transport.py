"""How the blocks of frames get to the other end of a connection: through its pipe, or the receiver reads them.

    sender ──header, addresses of its blocks──▶ receiver ──"read"──▶ sender ──"kept"──▶ receiver
                                                   └─ or "not needed"

The receiver reads from the sender's memory, so nobody writes to memory that it may use for something else by then. The
sender says at the end that its blocks were still the same while they were read: a frame counts only then. Who may read,
and from where, goes through the pipe, which is a unix socket or TLS.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from torch import Tensor

from lightserve.worker.kv.transfer.pipe import KvTransferError, Pipe, read, send

SKIP_BYTES = 1 << 20  # of one read that is dropped
MAX_INTRODUCTION_BYTES = 1 << 20
LENGTH = struct.Struct("<I")
READ, NOT_NEEDED, KEPT = b"R", b"N", b"K"


class SendTransport(Protocol):
    def send(self, header: bytes, blocks: Sequence[memoryview]) -> None:
        """The header goes through the pipe, before the blocks. They may be changed afterwards."""


class ReceiveTransport(Protocol):
    def read(self, blocks: Sequence[memoryview]) -> None:
        """Fill them with the blocks of the frame whose header was read."""

    def skip(self, num_blocks: int, block_bytes: int) -> None:
        """Nobody needs them."""

    def close(self) -> None: ...


class SocketTransport:
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


class SenderMemory(Protocol):
    """The memory of a sender, at the receiver."""

    def read(self, addresses: Sequence[int], blocks: Sequence[memoryview]) -> None:
        """Waits until nothing writes to the blocks any more, or raises ReadTimeoutError. Raises KvTransferError."""

    def close(self) -> None: ...


class ReadableMemory(Protocol):
    """The memory of a transfer backend, which those that it sends to can read. Used by several threads."""

    transport: str  # as --kv_transport calls it

    def register(self, chunks: Sequence[Tensor]) -> None:
        """All blocks are in these chunks of host memory."""

    def introduction(self, host: str) -> bytes:
        """What a receiver needs to read from here. ``host``: address of this machine that the receiver can reach."""

    def open(self, host: str, introduction: bytes) -> SenderMemory:
        """Of another transfer backend, which can reach this machine at ``host``. Raises KvTransferError."""

    def being_read(self) -> AbstractContextManager[None]:
        """A receiver may read within this context."""


class ReadableSender:
    """A SendTransport: the receiver reads the blocks."""

    def __init__(self, pipe: Pipe, memory: ReadableMemory, host: str) -> None:
        self._pipe = pipe
        self._memory = memory
        introduction = memory.introduction(host)
        send(pipe, LENGTH.pack(len(introduction)) + introduction)

    def send(self, header: bytes, blocks: Sequence[memoryview]) -> None:
        addresses = np.array([address_of(block) for block in blocks], "<u8")
        with self._memory.being_read():
            self._pipe.send_all([memoryview(header), memoryview(addresses.tobytes())])
            answer = read(self._pipe, 1)
        if answer == READ:
            send(self._pipe, KEPT)
        elif answer != NOT_NEEDED:
            raise KvTransferError(f"the receiver answered {answer!r}")


class ReadingReceiver:
    """A ReceiveTransport: it reads the blocks."""

    def __init__(self, pipe: Pipe, memory: ReadableMemory, host: str) -> None:
        self._pipe = pipe
        (size,) = LENGTH.unpack(read(pipe, LENGTH.size))
        if not 0 < size <= MAX_INTRODUCTION_BYTES:
            raise KvTransferError(f"the introduction of a sender has {size} bytes")
        self._sender = memory.open(host, read(pipe, size))

    def read(self, blocks: Sequence[memoryview]) -> None:
        addresses = np.frombuffer(read(self._pipe, 8 * len(blocks)), "<u8").tolist()
        self._sender.read(addresses, blocks)
        send(self._pipe, READ)
        if read(self._pipe, 1) != KEPT:
            raise KvTransferError("the sender did not keep its blocks")

    def skip(self, num_blocks: int, block_bytes: int) -> None:
        read(self._pipe, 8 * num_blocks)
        send(self._pipe, NOT_NEEDED)

    def close(self) -> None:
        self._sender.close()


def address_of(block: memoryview) -> int:
    address: int = np.frombuffer(block, np.uint8).ctypes.data
    return address
