"""The model workers as the router sees them: one step goes to all ranks, one list of tokens comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from lightserve.errors import WorkerCallError, WorkerDiedError
from lightserve.ipc.codec import encode
from lightserve.ipc.worker_calls import (
    CANCEL_RECEIVE,
    FETCH_KV,
    FLUSH_KV,
    KV_ADDRESS,
    LOOKUP_KV,
    RECEIVE_KV,
    RUN,
    WorkerCall,
    WorkerCaller,
)
from lightserve.messages.step import Step, StepResult
from lightserve.messages.worker_calls import KvFetch, KvFetched, KvFlush, KvFlushed, KvLookup, KvReceived
from lightserve.router.kv.source import KvCaller, KvWorkers
from lightserve.router.kv.tiers.storage import Reply as KvReply
from lightserve.router.workers.calls import RankCalls
from lightserve.router.workers.connection import CONNECT_S, RankConnections, close_all, connect_ranks
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)
Request = TypeVar("Request")
Reply = TypeVar("Reply")


class KvReceiverClient:
    """Every rank has a call open, which returns when it has ended a transfer. A transfer ends when all ranks have."""

    def __init__(self, calls: RankCalls, addresses: list[str], ranks: Sequence[int]) -> None:
        """``addresses`` of the workers that receive together: these ``ranks``, in their order."""
        self.addresses = addresses
        self._ranks = ranks
        self.on_received: Callable[[KvReceived], None] = lambda _: None
        self._calls = calls
        self._ended: dict[int, list[int]] = {}  # by transfer: blocks that have come, of each rank that has ended it

    def start(self) -> None:
        for rank in self._ranks:
            self._wait(rank)

    def cancel(self, transfer_id: int) -> None:
        self._calls.call(CANCEL_RECEIVE, transfer_id, ranks=self._ranks)

    def _wait(self, rank: int) -> None:
        self._calls.call(RECEIVE_KV, None, ranks=[rank]).add_done_callback(partial(self._on_reply, rank))

    def _on_reply(self, rank: int, reply: asyncio.Future[list[KvReceived] | None]) -> None:
        if (error := reply.exception()) is not None:
            logger.error("no KV of other engines can be received: %s", error)
            return
        received = reply.result()
        if received is None:  # the workers are lost
            return
        self._wait(rank)
        for ended in received:
            counts = self._ended.setdefault(ended.transfer_id, [])
            counts.append(ended.num_blocks)
            if len(counts) == len(self._ranks):
                del self._ended[ended.transfer_id]
                self.on_received(KvReceived(ended.transfer_id, min(counts)))


class ModelClient(WorkerCaller, Protocol):
    """Runs steps in the order in which they are given; several may be in flight."""

    @property
    def is_lost(self) -> bool:
        """A worker died. The steps in flight fail with WorkerDiedError."""

    def run(self, step: Step) -> asyncio.Future[StepResult]: ...

    def kv_workers(self, group: int) -> KvWorkers:
        """Those of an attention group: each has KV of its own."""

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
    ) -> None:
        """``answering_ranks``: one of each attention group."""
        self.is_lost = False
        self._answering_ranks = answering_ranks
        self._on_restart = on_restart
        self._loop = asyncio.get_running_loop()
        self._in_flight: dict[asyncio.Future[StepResult], dict[int, StepResult]] = {}  # what is back, by rank
        self._ranks = connections[RUN.name]
        for rank, (_, fileno, _) in enumerate(self._ranks):
            self._loop.add_reader(fileno, self._read, rank)
        self._calls = RankCalls({name: ranks for name, ranks in connections.items() if name != RUN.name})
        per_group = len(self._ranks) // len(answering_ranks)
        firsts = range(0, len(self._ranks), per_group)
        self._groups = [GroupWorkers(self._calls, range(at, at + per_group)) for at in firsts]

    @classmethod
    async def connect(
        cls,
        socket_paths: Sequence[str],
        on_restart: Callable[[str, bool], None],
        answering_ranks: Sequence[int] = (0,),
    ) -> RpycModelClient:
        """Raises OSError or EOFError if a worker is lost, or does not answer in time."""
        client = cls(await connect_ranks(socket_paths), on_restart, answering_ranks)
        try:
            await client._find_receivers()
        except BaseException:
            client.close()
            raise
        return client

    async def _find_receivers(self) -> None:
        """Ask the workers of a decode engine where they receive KV: only they know the addresses of their nodes."""
        if not self.serves(KV_ADDRESS):
            return
        try:
            addresses = await self.call(KV_ADDRESS, None, CONNECT_S)
        except WorkerCallError as error:
            raise ConnectionError(str(error)) from error
        if addresses is None:
            raise EOFError("a model worker closed its connection")
        for group in self._groups:
            group.use_receivers(addresses)

    def kv_workers(self, group: int) -> KvWorkers:
        return self.group(group)

    def group(self, number: int) -> GroupWorkers:
        return self._groups[number]

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


class GroupWorkers:
    """The ranks of an attention group, as the sources of its KV see them: see KvWorkers."""

    def __init__(self, calls: RankCalls, ranks: Sequence[int]) -> None:
        self._calls = calls
        self._ranks = ranks
        self.storage_tiers = StorageCalls(self) if calls.serves(LOOKUP_KV) else None
        self.kv_receiver: KvReceiverClient | None = None

    def use_receivers(self, addresses: Sequence[str]) -> None:
        """``addresses``: where all ranks of the model receive KV."""
        self.kv_receiver = KvReceiverClient(self._calls, [addresses[rank] for rank in self._ranks], self._ranks)

    def call(
        self, call: WorkerCall[Request, Reply], request: Request, timeout_s: float | None = None
    ) -> asyncio.Future[Reply | None]:
        return self._calls.call(call, request, timeout_s, self._ranks)


class StorageCalls:
    """See StorageClient."""

    def __init__(self, workers: KvCaller) -> None:
        self._workers = workers

    def lookup(self, command: KvLookup) -> KvReply[list[int] | None]:
        return self._workers.call(LOOKUP_KV, command)

    def fetch(self, command: KvFetch) -> KvReply[KvFetched | None]:
        return self._workers.call(FETCH_KV, command)

    def flush(self, command: KvFlush) -> KvReply[KvFlushed | None]:
        return self._workers.call(FLUSH_KV, command)
