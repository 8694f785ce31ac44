"""The router's calls to all ranks of a model, beside its steps. See worker_calls.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from lightserve.errors import WorkerCallError
from lightserve.ipc.codec import encode
from lightserve.ipc.worker_calls import WorkerCall
from lightserve.router.workers.connection import RankConnection, RankConnections, close_all

Request = TypeVar("Request")
Reply = TypeVar("Reply")


@dataclass(slots=True, eq=False)
class PendingCall(Generic[Reply]):
    call: WorkerCall[Any, Reply]
    ranks: Sequence[int]
    result: asyncio.Future[Reply | None]
    replies: dict[int, Reply | WorkerCallError] = field(default_factory=dict)  # that are back, by rank

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.replies]


class RankCalls:
    def __init__(self, connections: RankConnections) -> None:
        """``connections``: for every call of the workers but steps."""
        self._loop = asyncio.get_running_loop()
        self._connections = connections
        self._lost: set[str] = set()  # calls without a connection to every rank
        self._pending: set[PendingCall[Any]] = set()
        for name, ranks in connections.items():
            for rank in ranks:
                self._loop.add_reader(rank.fileno, self._read, name, rank)

    def serves(self, call: WorkerCall[Any, Any]) -> bool:
        return call.name in self._connections

    def call(
        self,
        call: WorkerCall[Request, Reply],
        request: Request,
        timeout_s: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> asyncio.Future[Reply | None]:
        """As WorkerCaller says. ``ranks`` are called; None: all."""
        if not self.serves(call):
            served = ", ".join(self._connections) or "none"
            raise WorkerCallError(f"the model workers do not serve the call {call.name!r}; they serve: {served}")
        ranks = range(len(self._connections[call.name])) if ranks is None else ranks
        pending: PendingCall[Reply] = PendingCall(call, ranks, self._loop.create_future())
        self._pending.add(pending)
        if call.name in self._lost:
            self._end_as_lost(call.name)
            return pending.result
        if timeout_s is not None:
            timer = self._loop.call_later(timeout_s, self._on_timeout, pending, timeout_s)
            pending.result.add_done_callback(lambda _: timer.cancel())
        self._send(pending, encode(request))
        return pending.result

    def close(self) -> None:
        for ranks in self._connections.values():
            close_all(self._loop, ranks)
        for name in self._connections:
            self._end_as_lost(name)

    def _send(self, pending: PendingCall[Any], request: bytes) -> None:
        name = pending.call.name
        for rank in pending.ranks:
            connected = self._connections[name][rank]
            try:
                connected.call(request).add_callback(partial(self._on_reply, pending, rank))
            except EOFError:  # rpyc has closed the socket: another one may get its number soon
                self._on_lost(name, connected)
                return

    def _read(self, name: str, connected: RankConnection) -> None:
        try:
            while connected.connection.poll(0):
                pass
        except EOFError:
            self._on_lost(name, connected)

    def _on_reply(self, pending: PendingCall[Any], rank: int, reply: Any) -> None:
        pending.replies[rank] = _decoded(pending.call, rank, reply)
        self._end_if_complete(pending)

    def _on_timeout(self, pending: PendingCall[Any], timeout_s: float) -> None:
        for rank in pending.missing:
            pending.replies[rank] = _error(pending.call, rank, f"it did not reply within {timeout_s:g} s")
        self._end_if_complete(pending)

    def _end_if_complete(self, pending: PendingCall[Any]) -> None:
        if pending.missing or pending not in self._pending:
            return
        self._pending.remove(pending)
        if pending.result.done():  # the caller has cancelled it
            return
        try:
            pending.result.set_result(pending.call.joined([pending.replies[rank] for rank in pending.ranks]))
        except WorkerCallError as error:
            pending.result.set_exception(error)

    def _on_lost(self, name: str, connected: RankConnection) -> None:
        """The connection for steps is lost too, and its owner reports that."""
        self._loop.remove_reader(connected.fileno)
        self._end_as_lost(name)

    def _end_as_lost(self, name: str) -> None:
        self._lost.add(name)
        for pending in [pending for pending in self._pending if pending.call.name == name]:
            self._pending.remove(pending)
            if not pending.result.done():
                pending.result.set_result(None)


def _decoded(call: WorkerCall[Any, Reply], rank: int, reply: Any) -> Reply | WorkerCallError:
    try:
        value: bytes | str = reply.value
    except Exception as error:  # of rpyc: handlers raise nothing
        return _error(call, rank, type(error).__name__)
    if isinstance(value, str):
        return _error(call, rank, value)
    try:
        return call.decode_reply(value)
    except msgspec.DecodeError as error:
        return _error(call, rank, f"the reply is not of the type {call.reply}: {error}")


def _error(call: WorkerCall[Any, Any], rank: int, message: str) -> WorkerCallError:
    return WorkerCallError(f"model worker {rank}: {call.name}: {message}")
