"""Has the model workers load LoRA adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import rpyc

from lightserve.io_struct import LoraLoad, LoraLoaded
from lightserve.router.connection import close_all, connect

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LoraLoaded).decode


class LoraClient:
    """A connection to every rank of its own, which a thread serves there: no step waits while a rank reads a file."""

    def __init__(self, socket_paths: Sequence[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[LoraLoaded | None], list[LoraLoaded]] = {}  # replies that are back
        self._connections: list[Any] = [connect(path) for path in socket_paths]
        self._filenos = [connection.fileno() for connection in self._connections]  # a lost connection has none
        self._calls = [rpyc.async_(connection.root.load_lora) for connection in self._connections]
        for rank, fileno in enumerate(self._filenos):
            self._loop.add_reader(fileno, self._read, rank)

    def load(self, command: LoraLoad) -> asyncio.Future[LoraLoaded | None]:
        """Resolves when all ranks have replied, with the first error if there is one; None: the workers are lost."""
        future: asyncio.Future[LoraLoaded | None] = self._loop.create_future()
        self._waiting[future] = []
        for rank, call in enumerate(self._calls):
            try:
                call(_encode(command)).add_callback(partial(self._on_reply, future))
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

    def _on_reply(self, future: asyncio.Future[LoraLoaded | None], reply: Any) -> None:
        replies = self._waiting.get(future)
        if replies is None:
            return
        replies.append(LoraLoaded(str(reply.value)) if reply.error else _decode(reply.value))
        if len(replies) == len(self._calls):
            del self._waiting[future]
            _resolve(future, next((one for one in replies if one.error), LoraLoaded()))

    def _on_lost(self, rank: int) -> None:
        """The connection for steps is lost too, and its owner reports that."""
        self._loop.remove_reader(self._filenos[rank])
        self._resolve_all()

    def _resolve_all(self) -> None:
        for future in self._waiting:
            _resolve(future, None)
        self._waiting.clear()


def _resolve(future: asyncio.Future[LoraLoaded | None], result: LoraLoaded | None) -> None:
    if not future.done():  # the caller may have cancelled it
        future.set_result(result)
