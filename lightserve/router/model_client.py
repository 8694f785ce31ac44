"""The model workers as the router sees them: one step command to all ranks, one list of tokens back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import rpyc
from rpyc.core.channel import Channel
from rpyc.utils.factory import connect_channel

from lightserve.errors import WorkerDiedError
from lightserve.io_struct import Step, StepResult
from lightserve.router.loop_stream import LoopStream

RPYC_CONFIG = {"allow_pickle": False, "sync_request_timeout": None, "include_local_version": False}

_encode_step = msgspec.msgpack.Encoder().encode
_decode_result = msgspec.msgpack.Decoder(StepResult).decode


class ModelClient(Protocol):
    """Runs steps in the order in which they are given; more than one may be under way."""

    @property
    def is_lost(self) -> bool:
        """A worker is gone. Steps that were under way fail with WorkerDiedError."""

    def run(self, step: Step) -> asyncio.Future[StepResult]: ...

    def give_up(self, why: str, is_explained: bool) -> None:
        """Have the workers replaced: they are lost, or a step does not end."""

    def close(self) -> None: ...


class RpycModelClient:
    """All ranks of one model behind rpyc: every rank runs every step, and rank 0 answers.

    Commands and answers cross as bytes: an object would cross as a proxy, one round trip a field. Replies are read by
    the event loop when a socket has them, so that a step under way blocks nobody. ``on_give_up`` is told why, and
    whether a request was to blame.
    """

    def __init__(self, socket_paths: Sequence[str], on_give_up: Callable[[str, bool], None]) -> None:
        self.is_lost = False
        self._on_give_up = on_give_up
        self._loop = asyncio.get_running_loop()
        self._under_way: set[asyncio.Future[StepResult]] = set()
        self._connections: list[Any] = [_connect(path) for path in socket_paths]
        self._filenos = [connection.fileno() for connection in self._connections]  # rpyc forgets that of a lost one
        self._runs = [rpyc.async_(connection.root.run) for connection in self._connections]
        for rank, fileno in enumerate(self._filenos):
            self._loop.add_reader(fileno, self._read, rank)

    def run(self, step: Step) -> asyncio.Future[StepResult]:
        future: asyncio.Future[StepResult] = self._loop.create_future()
        self._under_way.add(future)
        command = _encode_step(step)
        for rank, run in enumerate(self._runs):
            try:
                reply = run(command)
            except EOFError:  # rpyc has closed the socket: its number may be another's soon
                self._loop.remove_reader(self._filenos[rank])
                self._lose(f"model worker {rank} is gone")
                break
            if rank == 0:
                reply.add_callback(partial(self._answered, future))
        return future

    def give_up(self, why: str, is_explained: bool) -> None:
        self._lose(why)
        self.close()
        self._on_give_up(why, is_explained)

    def close(self) -> None:
        """Hang up without a word, which rpyc would have answered: a worker that hangs would never do that."""
        for fileno, connection in zip(self._filenos, self._connections, strict=True):
            if not connection.closed:
                if not connection._channel.closed:
                    self._loop.remove_reader(fileno)
                    connection._channel.close()
                connection.close()

    def _read(self, rank: int) -> None:
        connection = self._connections[rank]
        try:
            while connection.poll(0):
                pass
        except EOFError:
            self._loop.remove_reader(self._filenos[rank])
            self._lose(f"model worker {rank} is gone")

    def _answered(self, future: asyncio.Future[StepResult], reply: Any) -> None:
        """Rank 0 is done with a step; replies may pass each other."""
        self._under_way.discard(future)
        if not future.done():
            future.set_result(_decode_result(reply.value))

    def _lose(self, why: str) -> None:
        """A worker that fails hangs up; why, it has told the launcher."""
        self.is_lost = True
        for future in self._under_way:
            if not future.done():
                future.set_exception(WorkerDiedError(why))
                future.exception()  # counts as seen: not all of them are waited for


def _connect(socket_path: str) -> Any:
    """Uncompressed: rpyc would spend 1.5 ms on the step of a prompt of 8,000 tokens, and some on every large batch."""
    return connect_channel(Channel(LoopStream.unix_connect(socket_path), compress=False), config=RPYC_CONFIG)
