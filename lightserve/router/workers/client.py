"""The model workers as the router sees them: one step goes to all ranks, one list of tokens comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from lightserve.errors import WorkerDiedError
from lightserve.ipc.codec import encode
from lightserve.ipc.worker_calls import FETCH_KV, FLUSH_KV, LOOKUP_KV, RUN, WorkerCall
from lightserve.messages.step import Step, StepResult
from lightserve.messages.worker_calls import KvFetch, KvFetched, KvFlush, KvFlushed, KvLookup
from lightserve.router.kv.source import KvWorkers
from lightserve.router.workers.calls import RankCalls
from lightserve.router.workers.connection import RankConnections, close_all, connect_ranks
from lightserve.router.workers.kv_receiver import KvReceiverClient

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class ModelClient(KvWorkers, Protocol):
    """Runs steps in the order in which they are given; several may be in flight."""

    @property
    def is_lost(self) -> bool:
        """A worker died. The steps in flight fail with WorkerDiedError."""

    def run(self, step: Step) -> asyncio.Future[StepResult]: ...

    def serves(self, call: WorkerCall[Any, Any]) -> bool:
        """Whether the workers have a handler for a call."""

    def request_restart(self, reason: str, caused_by_request: bool) -> None:
        """Close the connections and have the workers replaced: they are lost, or a step does not end.

        ``caused_by_request``: a request caused it.
        """

    def close(self) -> None: ...


class RpycModelClient:
    """All ranks of one model behind rpyc: every rank runs every step, and some of them return the tokens.

    Steps and tokens cross as bytes: rpyc would send an object as a proxy, with one round trip per field. The event
    loop reads a reply when the socket has it, so a step in flight blocks nothing. ``on_restart`` gets the arguments of
    ``request_restart``.
    """

    def __init__(
        self,
        connections: RankConnections,
        on_restart: Callable[[str, bool], None],
        answering_ranks: Sequence[int] = (0,),
        kv_addresses: Sequence[str] = (),
    ) -> None:
        self.is_lost = False
        self._answering_ranks = answering_ranks
        self._on_restart = on_restart
        self._loop = asyncio.get_running_loop()
        self._in_flight: dict[asyncio.Future[StepResult], dict[int, StepResult]] = {}  # what is back, by rank
        self._ranks = connections[RUN.name]
        for rank, (_, fileno, _) in enumerate(self._ranks):
            self._loop.add_reader(fileno, self._read, rank)
        self._calls = RankCalls({name: ranks for name, ranks in connections.items() if name != RUN.name})
        self.storage_tiers = StorageCalls(self._calls) if self.serves(LOOKUP_KV) else None
        self.kv_receiver = KvReceiverClient(self._calls, list(kv_addresses)) if kv_addresses else None

    @classmethod
    async def connect(
        cls,
        socket_paths: Sequence[str],
        on_restart: Callable[[str, bool], None],
        answering_ranks: Sequence[int] = (0,),
        kv_addresses: Sequence[str] = (),
    ) -> RpycModelClient:
        """Raises OSError or EOFError if a worker is lost, or does not answer in time."""
        return cls(await connect_ranks(socket_paths), on_restart, answering_ranks, kv_addresses)

    def serves(self, call: WorkerCall[Any, Any]) -> bool:
        return self._calls.serves(call)

    def call(
        self, call: WorkerCall[Request, Reply], request: Request, timeout_s: float | None = None
    ) -> asyncio.Future[Reply | None]:
        return self._calls.call(call, request, timeout_s)

    def run(self, step: Step) -> asyncio.Future[StepResult]:
        future: asyncio.Future[StepResult] = self._loop.create_future()
        self._in_flight[future] = {}
        command = encode(step)
        for rank, (_, fileno, call) in enumerate(self._ranks):
            try:
                reply = call(command)
            except EOFError:  # rpyc has closed the socket: another one may get its number soon
                self._loop.remove_reader(fileno)
                self._mark_lost(f"model worker {rank} closed its connection")
                break
            if rank in self._answering_ranks:
                reply.add_callback(partial(self._on_reply, future, rank))
        return future

    def request_restart(self, reason: str, caused_by_request: bool) -> None:
        self._mark_lost(reason)
        self.close()
        self._on_restart(reason, caused_by_request)

    def close(self) -> None:
        close_all(self._loop, self._ranks)
        self._calls.close()

    def _read(self, rank: int) -> None:
        connection, fileno, _ = self._ranks[rank]
        try:
            while connection.poll(0):
                pass
        except EOFError:
            self._loop.remove_reader(fileno)
            self._mark_lost(f"model worker {rank} closed its connection")

    def _on_reply(self, future: asyncio.Future[StepResult], rank: int, reply: Any) -> None:
        """An answering rank finished a step. Replies may overtake each other."""
        results = self._in_flight[future]
        if not future.done():
            results[rank] = RUN.decode_reply(reply.value)
        if len(results) == len(self._answering_ranks):
            del self._in_flight[future]
            future.set_result(RUN.joined([results[rank] for rank in self._answering_ranks]))

    def _mark_lost(self, reason: str) -> None:
        """A worker that fails closes its connection. It reports the error to the launcher, not to the router."""
        self.is_lost = True
        for future in self._in_flight:
            if not future.done():
                future.set_exception(WorkerDiedError(reason))
                future.exception()  # marks it as retrieved: not every future is awaited


class StorageCalls:
    """See StorageClient."""

    def __init__(self, calls: RankCalls) -> None:
        self._calls = calls

    def lookup(self, command: KvLookup) -> asyncio.Future[list[int] | None]:
        return self._calls.call(LOOKUP_KV, command)

    def fetch(self, command: KvFetch) -> asyncio.Future[KvFetched | None]:
        return self._calls.call(FETCH_KV, command)

    def flush(self, command: KvFlush) -> asyncio.Future[KvFlushed | None]:
        return self._calls.call(FLUSH_KV, command)
