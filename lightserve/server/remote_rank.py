"""A model worker on another node, seen from the launcher: like a child process, over a stream to its node."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from lightserve.ipc.process import EXIT_CRASH
from lightserve.messages.control import FromChild, RankExited
from lightserve.messages.nodes import StartRank
from lightserve.server.child_process import ChildProcess


class RemoteProcess:
    """What the launcher knows of a process on another node: whether it has exited, and how."""

    pid = 0  # of no process here

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._exited = asyncio.Event()

    def exit(self, code: int) -> None:
        self.returncode = code
        self._exited.set()

    async def wait(self) -> int:
        await self._exited.wait()
        assert self.returncode is not None
        return self.returncode


class RemoteRank(ChildProcess):
    def __init__(self, role: str, node: int, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self._node = node
        self._remote = RemoteProcess()
        self._failed = asyncio.Event()  # it has sent its error, or the stream has ended
        super().__init__(role, self._remote, connection)
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start_at(cls, nodes_path: str, role: str, node: int, start: StartRank) -> RemoteRank:
        """``nodes_path``: where the nodes process listens for the launcher. Does not wait for the node."""
        reader, writer = await asyncio.open_unix_connection(nodes_path)
        writer.write(msgspec.json.encode(start) + b"\n")
        return cls(role, node, (reader, writer))

    async def wait(self) -> None:
        await super().wait()
        await self._reading

    def _kill(self) -> None:
        """The end of the stream kills the rank, and the node says when it has exited."""
        if not self._writer.is_closing():
            with contextlib.suppress(OSError):
                self._writer.write_eof()

    async def _receive(self) -> None:
        await self._failed.wait()

    async def _read(self) -> None:
        """Until the end of the stream, also behind an error: the last message says that the rank has exited."""
        decode = msgspec.json.Decoder(FromChild).decode
        try:
            while line := await self._reader.readline():
                self._handle_line(decode(line))
        except ConnectionError:
            pass
        except ValueError as error:  # not a message, or a line longer than the reader's limit
            self.exit_message = self.exit_message or f"it sent an invalid message ({error})"
        if self._remote.returncode is None:
            self.exit_message = self.exit_message or f"the connection to node {self._node} was lost"
            self._remote.exit(EXIT_CRASH)
        self._failed.set()

    def _handle_line(self, message: FromChild) -> None:
        if isinstance(message, RankExited):
            self.is_node_missing = message.is_node_missing
            self._remote.exit(message.exit_code)
        elif self.exit_message is None:
            self._handle(message)
        if self.exit_message is not None:
            self._failed.set()
