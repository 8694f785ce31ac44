"""Has the model workers compile a grammar before a request with it is admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import rpyc

from lightserve.io_struct import GrammarSpec
from lightserve.router.connection import close_all, connect

_encode_grammar = msgspec.msgpack.Encoder().encode


class GrammarClient:
    """A second connection to every rank, which a thread of its own serves there: no step waits behind a compilation."""

    def __init__(self, socket_paths: Sequence[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[None], int] = {}  # how many ranks have not replied
        self._connections: list[Any] = [connect(path) for path in socket_paths]
        self._filenos = [connection.fileno() for connection in self._connections]  # a lost connection has none
        self._compiles = [rpyc.async_(connection.root.compile_grammar) for connection in self._connections]
        for rank, fileno in enumerate(self._filenos):
            self._loop.add_reader(fileno, self._read, rank)

    def compile_grammar(self, grammar: GrammarSpec, eos_ids: tuple[int, ...]) -> asyncio.Future[None]:
        """Resolves when all ranks have compiled the grammar, found an error in it, or were lost.

        Errors are not reported here: a request with the grammar fails when it enters the workers.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting[future] = len(self._compiles)
        command = _encode_grammar((grammar, eos_ids))
        for rank, compile_grammar in enumerate(self._compiles):
            try:
                compile_grammar(command).add_callback(partial(self._on_reply, future))
            except EOFError:  # rpyc has closed the socket: another one may get its number soon
                self._on_lost(rank)
                break
        return future

    def close(self) -> None:
        close_all(self._loop, zip(self._filenos, self._connections, strict=True))
        self._resolve_all()

    def _read(self, rank: int) -> None:
        try:
            while self._connections[rank].poll(0):
                pass
        except EOFError:
            self._on_lost(rank)

    def _on_reply(self, future: asyncio.Future[None], reply: object) -> None:
        if future not in self._waiting:
            return
        self._waiting[future] -= 1
        if self._waiting[future] == 0:
            del self._waiting[future]
            _resolve(future)

    def _on_lost(self, rank: int) -> None:
        """The connection for steps is lost too, and its owner reports that."""
        self._loop.remove_reader(self._filenos[rank])
        self._resolve_all()

    def _resolve_all(self) -> None:
        for future in self._waiting:
            _resolve(future)
        self._waiting.clear()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():  # the caller may have cancelled it
        future.set_result(None)
