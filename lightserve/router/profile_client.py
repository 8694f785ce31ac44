"""Starts and ends the profiles of the model workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from lightserve.io_struct import ProfileCommand, ProfileResult
from lightserve.router.connection import RankConnection, close_all, connect_ranks

METHOD = "profile"
LOST = "the model workers were lost"

_encode_command = msgspec.msgpack.Encoder().encode
_decode_result = msgspec.msgpack.Decoder(ProfileResult).decode


class ProfileClient:
    """A connection to every rank. It is opened after all others: workers take them in the order of StepServer."""

    def __init__(self, ranks: Sequence[RankConnection]) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[ProfileResult]] = set()
        self._ranks = ranks
        for rank, (_, fileno, _) in enumerate(ranks):
            self._loop.add_reader(fileno, self._read, rank)

    @classmethod
    async def connect(cls, socket_paths: Sequence[str]) -> ProfileClient:
        return cls((await connect_ranks(socket_paths, [METHOD]))[METHOD])

    async def run(self, command: ProfileCommand, timeout_s: float) -> list[ProfileResult]:
        """The result of every rank. A rank that is lost or hangs has an error."""
        results = [self._call(rank, _encode_command(command)) for rank in range(len(self._ranks))]
        _, hanging = await asyncio.wait(results, timeout=timeout_s)
        for result in hanging:
            self._resolve(result, ProfileResult(error=f"a model worker did not reply within {timeout_s:.0f} s"))
        return [result.result() for result in results]

    def close(self) -> None:
        close_all(self._loop, self._ranks)
        self._resolve_all()

    def _call(self, rank: int, command: bytes) -> asyncio.Future[ProfileResult]:
        future: asyncio.Future[ProfileResult] = self._loop.create_future()
        self._waiting.add(future)
        try:
            self._ranks[rank].call(command).add_callback(partial(self._on_reply, future))
        except EOFError:  # rpyc has closed the socket
            self._resolve(future, ProfileResult(error=LOST))
        return future

    def _on_reply(self, future: asyncio.Future[ProfileResult], reply: Any) -> None:
        self._resolve(future, ProfileResult(error=LOST) if reply.error else _decode_result(reply.value))

    def _read(self, rank: int) -> None:
        try:
            while self._ranks[rank].connection.poll(0):
                pass
        except EOFError:
            self._loop.remove_reader(self._ranks[rank].fileno)
            self._resolve_all()

    def _resolve_all(self) -> None:
        for future in list(self._waiting):
            self._resolve(future, ProfileResult(error=LOST))

    def _resolve(self, future: asyncio.Future[ProfileResult], result: ProfileResult) -> None:
        self._waiting.discard(future)
        if not future.done():
            future.set_result(result)
