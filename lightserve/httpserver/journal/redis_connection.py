"""A connection to Redis or Valkey for the event loop: sends some commands at once and returns their replies."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Any

from lightserve.utils.net import RedisAddress

Command = Sequence[bytes | int]
Reply = Any  # bytes, int, None, a RedisError or a list of them


class RedisError(Exception):
    """Redis refuses a command. The connection is fine."""


class RedisConnection:
    """Any OSError leaves it unusable: close it. It is for one caller at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: RedisAddress) -> RedisConnection:
        if address.socket_path is not None:
            reader, writer = await asyncio.open_unix_connection(address.socket_path)
        else:
            tls = ssl.create_default_context() if address.has_tls else None
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
        connection = cls(reader, writer)
        try:
            await connection._log_in(address)
        except BaseException:
            connection.close()
            raise
        return connection

    async def call(self, *commands: Command) -> list[Reply]:
        """The reply of each command. One that Redis refuses has a RedisError."""
        self._writer.write(b"".join([_encoded(command) for command in commands]))
        await self._writer.drain()
        return [await self._read() for _ in commands]

    def close(self) -> None:
        self._writer.transport.abort()

    async def _log_in(self, address: RedisAddress) -> None:
        commands: list[Command] = []
        if address.password is not None:
            names = [] if address.user is None else [address.user.encode()]
            commands.append((b"AUTH", *names, address.password.encode()))
        if address.db:
            commands.append((b"SELECT", address.db))
        for reply in await self.call(*commands):
            if isinstance(reply, RedisError):
                raise ConnectionError(str(reply))

    async def _read(self) -> Reply:
        try:
            line = await self._reader.readuntil(b"\r\n")
            kind, rest = line[:1], line[1:-2]
            if kind == b"$":
                return None if rest == b"-1" else (await self._reader.readexactly(int(rest) + 2))[:-2]
            if kind == b"*":
                return None if rest == b"-1" else [await self._read() for _ in range(int(rest))]
            if kind == b":":
                return int(rest)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise ConnectionError("the connection ended, or the reply is none of Redis") from error
        if kind == b"-":
            return RedisError(rest.decode(errors="replace"))
        if kind != b"+":
            raise ConnectionError("the reply is none of Redis")
        return rest


def _encoded(command: Command) -> bytes:
    parts = [part if isinstance(part, bytes) else b"%d" % part for part in command]
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])
