"""Memory that others read by Mooncake's transfer engine: over RDMA where the machine has it, over TCP elsewhere.

It authenticates nobody and encrypts nothing: who reaches its ports can read and change registered memory.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from torch import Tensor

from lightserve.errors import ServerError
from lightserve.utils.logger import init_logger
from lightserve.worker.kv_mover.carrier import address_of
from lightserve.worker.kv_mover.pipe import WireError

logger = init_logger(__name__)

TOKEN_BYTES = 16
POLL_S = 50e-6
MAX_READS = 64  # of a frame at once: Mooncake queues 1024 for each sender, and drops the rest after a second
DONE, FAILED = 1, -1  # of transfer_check_status


class MooncakeMemory:
    """A ReadableMemory."""

    transport = "mooncake"

    def __init__(self) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it writes to stderr
        try:
            self._new_engine: Any = import_module("mooncake.engine").TransferEngine
        except ImportError as error:
            raise ServerError(
                f"kv_transport=mooncake: Mooncake does not start ({error}); see docs/scaling.md"
            ) from error
        logger.warning(
            "kv_transport=mooncake: who reaches the ports of Mooncake can read and change KV; see SECURITY.md"
        )
        self._token = secrets.token_bytes(TOKEN_BYTES)  # names of Mooncake are used again by other processes
        self._chunks: list[Tensor] = []
        self._engines: dict[str, _Engine] = {}  # by the address of this machine that others know
        self._replaced: list[_Engine] = []  # somebody may read there, and to destroy one takes most of a second
        self._lock = threading.Lock()

    def register(self, chunks: Sequence[Tensor]) -> None:
        self._chunks += chunks

    def introduction(self, host: str) -> bytes:
        with self._lock:
            return self._token + self._engine(host).name.encode()

    def open(self, host: str, introduction: bytes) -> MooncakeSenderMemory:
        token, name = introduction[:TOKEN_BYTES], introduction[TOKEN_BYTES:].decode(errors="replace")
        with self._lock:
            engine = self._engine(host)
            if engine.senders.get(name, token) != token:  # Mooncake would look for the memory of one that died
                self._replaced.append(self._engines.pop(host))
                engine = self._engine(host)
            engine.senders[name] = token
        return MooncakeSenderMemory(engine.engine, name)

    def being_read(self) -> AbstractContextManager[None]:
        return nullcontext()  # it has threads, which wait

    def _engine(self, host: str) -> _Engine:
        if host not in self._engines:
            self._engines[host] = _Engine(self._new_engine(), host, self._chunks)
        return self._engines[host]


class _Engine:
    def __init__(self, engine: Any, host: str, chunks: Sequence[Tensor]) -> None:
        is_v6 = ":" in host
        if is_v6 and "MC_USE_IPV6" not in os.environ:
            raise WireError(f"kv_transport=mooncake: {host} is an IPv6 address; set MC_USE_IPV6=1 on all engines")
        in_url = f"[{host}]" if is_v6 else host
        if engine.initialize(in_url, "P2PHANDSHAKE", "rdma", ""):  # if there is none, it takes TCP
            raise WireError(f"Mooncake does not start at {host}; stderr has its reason")
        if engine.batch_register_memory([chunk.data_ptr() for chunk in chunks], [chunk.nbytes for chunk in chunks]):
            raise WireError("Mooncake cannot register the memory; stderr has its reason")
        self.engine = engine
        self.name = f"{in_url}:{engine.get_rpc_port()}"
        self.senders: dict[str, bytes] = {}  # token, by name


class MooncakeSenderMemory:
    """A SenderMemory."""

    def __init__(self, engine: Any, sender: str) -> None:
        self._engine = engine
        self._sender = sender

    def read(self, addresses: Sequence[int], blocks: Sequence[memoryview]) -> None:
        """Reads of several parts at once fail at the first, while Mooncake still writes the others: one by one."""
        left = deque(_joined(addresses, blocks))
        reads: list[int] = []
        is_lost = False
        while reads or (left and not is_lost):
            while left and not is_lost and len(reads) < MAX_READS:
                here, there, size = left.popleft()
                read: int = self._engine.batch_transfer_async_read(self._sender, [here], [there], [size])
                is_lost = not read
                reads += [read] if read else []
            states = [self._engine.transfer_check_status(read) for read in reads]
            is_lost |= FAILED in states
            reads = [read for read, state in zip(reads, states, strict=True) if state not in (DONE, FAILED)]
            if reads:
                time.sleep(POLL_S)
        if is_lost:
            raise WireError("Mooncake has lost the sender")

    def close(self) -> None: ...


def _joined(addresses: Sequence[int], blocks: Sequence[memoryview]) -> list[tuple[int, int, int]]:
    """Address here, address there, size. Blocks that follow each other on both sides are one part."""
    parts: list[tuple[int, int, int]] = []
    for there, block in zip(addresses, blocks, strict=True):
        here, size = address_of(block), len(block)
        if parts and (here - parts[-1][0], there - parts[-1][1]) == (parts[-1][2],) * 2:
            parts[-1] = (*parts[-1][:2], parts[-1][2] + size)
        else:
            parts.append((here, there, size))
    return parts
