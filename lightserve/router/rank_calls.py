"""Calls of one method on every rank of a model, beside the steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from lightserve.router.connection import RankConnection, close_all

T = TypeVar("T")
Join = Callable[[list[bytes | None]], T]


class RankCalls(Generic[T]):
    """A connection to every rank of its own, which a thread serves there: no step waits behind a call.

    ``join`` makes the result of a call from the replies of all ranks, None for one that raised an exception.
    ``lost`` is the result if a rank is lost.
    """

    def __init__(self, ranks: Sequence[RankConnection], join: Join[T], lost: T) -> None:
        self._join = join
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[T], list[bytes | None]] = {}  # replies that are back
        self._ranks = ranks
        for rank, (_, fileno, _) in enumerate(ranks):
            self._loop.add_reader(fileno, self._read, rank)

    def call(self, command: bytes) -> asyncio.Future[T]:
        """Resolves when all ranks have replied, or one is lost."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting[future] = []
        for rank, (_, _, call) in enumerate(self._ranks):
            try:
                call(command).add_callback(partial(self._on_reply, future))
            except EOFError:  # rpyc has closed the socket: another one may get its number soon
                self._on_lost(rank)
                break
        return future

    def close(self) -> None:
        close_all(self._loop, self._ranks)
        self._resolve_all()

    def _read(self, rank: int) -> None:
        try:
            while self._ranks[rank].connection.poll(0):
                pass
        except EOFError:
            self._on_lost(rank)

    def _on_reply(self, future: asyncio.Future[T], reply: Any) -> None:
        replies = self._waiting.get(future)
        if replies is None:
            return
        replies.append(None if reply.error else reply.value)
        if len(replies) == len(self._ranks):
            del self._waiting[future]
            _resolve(future, self._join(replies))

    def _on_lost(self, rank: int) -> None:
        """The connection for steps is lost too, and its owner reports that."""
        self._loop.remove_reader(self._ranks[rank].fileno)
        self._resolve_all()

    def _resolve_all(self) -> None:
        for future in self._waiting:
            _resolve(future, self._lost)
        self._waiting.clear()


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # the caller may have cancelled it
        future.set_result(result)
