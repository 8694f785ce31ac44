"""The calls of KV tiers to the ranks of an LLM. Replies come in other threads, and what follows runs in the LLM's."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from lightserve.errors import WorkerCallError
from lightserve.ipc.codec import encode
from lightserve.ipc.worker_calls import WorkerCall
from lightserve.router.kv.source import KvWorkers
from lightserve.router.kv.tiers.storage import StorageClient
from lightserve.router.workers.client import StorageCalls
from lightserve.worker.rpc import CallHandler

Request = TypeVar("Request")
Reply = TypeVar("Reply")
T = TypeVar("T")
Send = Callable[[WorkerCall[Any, Any], Any], Future[Any]]  # a request to ranks; the result is None if they are lost


class Mailbox:
    """What follows on replies, until the thread of the LLM runs it."""

    def __init__(self) -> None:
        self._callbacks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.num_open = 0  # replies that something will follow on

    def follow(self, future: Future[T], callback: Callable[[], object]) -> None:
        self.num_open += 1
        future.add_done_callback(lambda _: self._callbacks.put(callback))

    def deliver(self, timeout_s: float | None = 0.0) -> None:
        """Run what follows on the replies that are here. Wait for the first one, if none is."""
        try:
            while True:
                callback = self._callbacks.get(timeout_s != 0, timeout_s)
                self.num_open -= 1
                timeout_s = 0.0
                callback()
        except queue.Empty:
            return


@dataclass(frozen=True, slots=True)
class MailedReply(Generic[T]):
    future: Future[T]
    mailbox: Mailbox

    def result(self) -> T:
        return self.future.result()

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        self.mailbox.follow(self.future, partial(callback, self))


class KvCalls(KvWorkers):
    """To the ranks that have the KV of an attention group."""

    def __init__(self, send: Send, mailbox: Mailbox, has_stores: bool) -> None:
        """``has_stores``: there are tiers below host memory."""
        self._send = send
        self._mailbox = mailbox
        self._storage_tiers = StorageCalls(self) if has_stores else None

    @property
    def storage_tiers(self) -> StorageClient | None:
        return self._storage_tiers

    @property
    def kv_receiver(self) -> None:
        return None

    def call(self, call: WorkerCall[Request, Reply], request: Request) -> MailedReply[Reply | None]:
        return MailedReply(self._send(call, request), self._mailbox)


class LocalCalls:
    """To a rank in this process. Each call has a thread of its own, as in a worker process."""

    def __init__(self, handlers: Sequence[CallHandler]) -> None:
        self._handles = dict(handlers)
        self._threads = {name: ThreadPoolExecutor(1, f"lightserve-{name}") for name in self._handles}

    def send(self, call: WorkerCall[Request, Reply], request: Request) -> Future[Reply]:
        return self._threads[call.name].submit(self._run, call, encode(request))

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        self._handles.clear()

    def _run(self, call: WorkerCall[Request, Reply], request: bytes) -> Reply:
        reply = self._handles[call.name](request)
        return call.joined([WorkerCallError(reply) if isinstance(reply, str) else call.decode_reply(reply)])
