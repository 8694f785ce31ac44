"""Blocks that the receiver reads from the sender's memory, by NIXL: RDMA where the network has it.

    sender ──header, addresses of its blocks──▶ receiver ──"read"──▶ sender ──"kept"──▶ receiver
                                                   └─ or "not needed"

The receiver reads, so nobody writes to memory that it may use for something else by then. The sender says at the end
that its blocks were still the same while they were read: a frame counts only then. NIXL itself authenticates nobody and
encrypts nothing; who may read, and from where, goes through the pipe, which is a unix socket or TLS.
"""

from __future__ import annotations

import logging
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from torch import Tensor

from lightserve.errors import ServerError
from lightserve.worker.kv_mover.pipe import Pipe, WireError, read, send

MAX_METADATA_BYTES = 1 << 20
LENGTH = struct.Struct("<I")
READ, NOT_NEEDED, KEPT = b"R", b"N", b"K"
POLL_S = 20e-6


class NixlMemory:
    """The memory of a mover, which others can read."""

    def __init__(self) -> None:
        logging.getLogger("nixl").setLevel(logging.WARNING)
        try:
            nixl: Any = import_module("nixl._api")
            strict = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # every connection has a thread
            config = nixl.nixl_agent_config(backends=["UCX"], sync_mode=strict)
            self.agent: Any = nixl.nixl_agent(secrets.token_hex(16), config)
        except (ImportError, RuntimeError) as error:
            raise ServerError(f"kv_transport=nixl: NIXL does not start ({error}); see docs/scaling.md") from error
        self._senders: Counter[str] = Counter()  # connections, by the name of the sender's agent
        self._lock = threading.Lock()

    def register(self, chunks: Sequence[Tensor]) -> None:
        """All blocks are in these chunks of host memory."""
        self.agent.register_memory([(chunk.data_ptr(), chunk.nbytes, 0, "") for chunk in chunks], "DRAM")

    def add_sender(self, metadata: bytes) -> str:
        with self._lock:
            try:
                name: bytes | str = self.agent.add_remote_agent(metadata)
            except Exception as error:  # its bindings have exceptions of their own
                raise WireError(f"NIXL does not know the sender: {error}") from error
            sender = name if isinstance(name, str) else name.decode()
            self._senders[sender] += 1
            return sender

    def remove_sender(self, sender: str) -> None:
        with self._lock:
            self._senders[sender] -= 1
            if not self._senders[sender]:
                del self._senders[sender]
                self.agent.remove_remote_agent(sender)

    def read(self, sender: str, addresses: Sequence[int], blocks: Sequence[memoryview]) -> None:
        """Waits until it has ended, even if that takes long: until then NIXL may write to the blocks."""
        here = [(_address(block), len(block), 0) for block in blocks]
        there = [(address, len(block), 0) for address, block in zip(addresses, blocks, strict=True)]
        try:
            descriptors = [self.agent.get_xfer_descs(one, "DRAM") for one in (here, there)]
            handle = self.agent.initialize_xfer("READ", *descriptors, sender)
            state = self.agent.transfer(handle)
            while state == "PROC":
                time.sleep(POLL_S)
                state = self.agent.check_xfer_state(handle)
            self.agent.release_xfer_handle(handle)
        except Exception as error:  # as above: wrong addresses, a sender that is gone
            raise WireError(f"NIXL cannot read: {error}") from error
        if state != "DONE":
            raise WireError("NIXL has lost the sender")


class NixlSender:
    """A SendingCarrier."""

    def __init__(self, pipe: Pipe, memory: NixlMemory) -> None:
        self._pipe = pipe
        metadata: bytes = memory.agent.get_agent_metadata()
        send(pipe, LENGTH.pack(len(metadata)) + metadata)

    def send(self, header: bytes, blocks: Sequence[memoryview]) -> None:
        addresses = np.array([_address(block) for block in blocks], "<u8")
        self._pipe.send_all([memoryview(header), memoryview(addresses.tobytes())])
        answer = read(self._pipe, 1)
        if answer == READ:
            send(self._pipe, KEPT)
        elif answer != NOT_NEEDED:
            raise WireError(f"the receiver answered {answer!r}")


class NixlReceiver:
    """A ReceivingCarrier."""

    def __init__(self, pipe: Pipe, memory: NixlMemory) -> None:
        self._pipe = pipe
        self._memory = memory
        (size,) = LENGTH.unpack(read(pipe, LENGTH.size))
        if not 0 < size <= MAX_METADATA_BYTES:
            raise WireError(f"the metadata of a sender has {size} bytes")
        self._sender = memory.add_sender(read(pipe, size))

    def read(self, blocks: Sequence[memoryview]) -> None:
        addresses = np.frombuffer(read(self._pipe, 8 * len(blocks)), "<u8").tolist()
        self._memory.read(self._sender, addresses, blocks)
        send(self._pipe, READ)
        if read(self._pipe, 1) != KEPT:
            raise WireError("the sender did not keep its blocks")

    def skip(self, num_blocks: int, block_bytes: int) -> None:
        read(self._pipe, 8 * num_blocks)
        send(self._pipe, NOT_NEEDED)

    def close(self) -> None:
        self._memory.remove_sender(self._sender)


def _address(block: memoryview) -> int:
    address: int = np.frombuffer(block, np.uint8).ctypes.data
    return address
