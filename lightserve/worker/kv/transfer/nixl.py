"""Memory that others read by NIXL: RDMA where the network has it. It authenticates nobody and encrypts nothing."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from lightserve.errors import ServerError
from lightserve.worker.kv.transfer.pipe import TIMEOUT_S, KvTransferError, ReadTimeoutError
from lightserve.worker.kv.transfer.transport import address_of

POLL_S = 20e-6
IDLE_POLL_S = 0.01  # a read that one side has given up may still go on
READ_S = TIMEOUT_S  # of a frame: its sender does not wait longer for it


class NixlMemory:
    """A ReadableMemory."""

    transport = "nixl"

    def __init__(self) -> None:
        logging.getLogger("nixl").setLevel(logging.WARNING)
        try:
            nixl: Any = import_module("nixl._api")
            strict = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # every connection has a thread
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
            self.agent: Any = nixl.nixl_agent(secrets.token_hex(16), config)
        except (ImportError, RuntimeError) as error:
            raise ServerError(
                f"kv_transport=nixl: NIXL does not start ({error}); see docs/scaling/disaggregation.md"
            ) from error
        self._senders: Counter[str] = Counter()  # connections and late reads, by the name of the sender's agent
        self._late: Counter[str] = Counter()  # reads that were given up and go on, the same
        self._lock = threading.Lock()
        self._num_read = 0  # frames that receivers may read now
        self._is_read = threading.Condition()
        threading.Thread(target=self._progress, name="nixl", daemon=True).start()

    def register(self, chunks: Sequence[Tensor]) -> None:
        self.agent.register_memory([(chunk.data_ptr(), chunk.nbytes, 0, "") for chunk in chunks], "DRAM")

    def introduction(self, host: str) -> bytes:
        metadata: bytes = self.agent.get_agent_metadata()
        return metadata

    def open(self, host: str, introduction: bytes) -> NixlSenderMemory:
        with self._lock:
            try:
                name: bytes | str = self.agent.add_remote_agent(introduction)
            except Exception as error:  # its bindings have exceptions of their own
                raise KvTransferError(f"NIXL does not know the sender: {error}") from error
            sender = name if isinstance(name, str) else name.decode()
            if self._late[sender]:  # each would hold memory for as long
                raise KvTransferError(f"{self._late[sender]} frames of the sender are still being read")
            self._senders[sender] += 1
        return NixlSenderMemory(self, sender)

    def forget(self, sender: str) -> None:
        """One of its connections has ended."""
        with self._lock:
            self._senders[sender] -= 1
            if not self._senders[sender]:
                del self._senders[sender]
                self.agent.remove_remote_agent(sender)

    def give_up(self, sender: str, handle: Any) -> Callable[[], None]:
        """A read takes too long. NIXL cannot stop it: the function that is returned waits until it has ended."""
        with self._lock:
            self._senders[sender] += 1
            self._late[sender] += 1
        return partial(self._finish_late, sender, handle)

    def _finish_late(self, sender: str, handle: Any) -> None:
        with suppress(Exception):  # as above; then the sender is lost
            while self.agent.check_xfer_state(handle) == "PROC":
                time.sleep(IDLE_POLL_S)
            self.agent.release_xfer_handle(handle)
        with self._lock:
            self._late[sender] -= 1
        self.forget(sender)

    @contextmanager
    def being_read(self) -> Iterator[None]:
        with self._is_read:
            self._num_read += 1
            self._is_read.notify()
        try:
            yield
        finally:
            with self._is_read:
                self._num_read -= 1

    def _progress(self) -> None:
        """Without RDMA, UCX moves bytes only when it is called. NIXL's own thread would take a whole core for that."""
        while True:
            with self._is_read:
                is_read = self._is_read.wait_for(lambda: self._num_read, IDLE_POLL_S)
            self.agent.get_new_notifs()  # there are none, but it calls UCX
            if is_read:
                time.sleep(POLL_S)


class NixlSenderMemory:
    """A SenderMemory."""

    def __init__(self, memory: NixlMemory, sender: str) -> None:
        self._memory = memory
        self._sender = sender

    def read(self, addresses: Sequence[int], blocks: Sequence[memoryview]) -> None:
        agent = self._memory.agent
        here = [(address_of(block), len(block), 0) for block in blocks]
        there = [(address, len(block), 0) for address, block in zip(addresses, blocks, strict=True)]
        try:
            descriptors = [agent.get_xfer_descs(regions, "DRAM") for regions in (here, there)]
            handle = agent.initialize_xfer("READ", *descriptors, self._sender)
            state, end_s = agent.transfer(handle), time.monotonic() + READ_S
            while state == "PROC" and time.monotonic() < end_s:
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            if state != "PROC":
                agent.release_xfer_handle(handle)
        except Exception as error:  # as above: wrong addresses, a sender that is gone
            raise KvTransferError(f"NIXL cannot read: {error}") from error
        if state == "PROC":
            late = self._memory.give_up(self._sender, handle)
            raise ReadTimeoutError(f"NIXL has not read a frame within {READ_S:g} s", late)
        if state != "DONE":
            raise KvTransferError("NIXL has lost the sender")

    def close(self) -> None:
        self._memory.forget(self._sender)
