"""A connection to Redis or Valkey for the event loop: sends some commands at once and returns their replies."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Any

from lightserve.utils.net import RedisAddress

READ_BYTES = 2**20
Command = Sequence[bytes | int]
Reply = Any  # bytes, int, None, a RedisError or a list of them


class RedisError(Exception):
    """Redis refuses a command. The connection is fine."""


class RedisConnection:
    """Any OSError leaves it unusable: close it. It is for one caller at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unread = b""

    @classmethod
    async def open(cls, address: RedisAddress) -> RedisConnection:
        if address.socket_path is not None:
            reader, writer = await asyncio.open_unix_connection(address.socket_path)
        else:
            tls = ssl.create_default_context() if address.has_tls else None
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
        connection = cls(reader, writer)
        try:
            for reply in await connection.call(*address.login()):
                if isinstance(reply, RedisError):
                    raise ConnectionError(str(reply))
        except BaseException:
            connection.close()
            raise
        return connection

    async def call(self, *commands: Command) -> list[Reply]:
        """The reply of each command. One that Redis refuses has a RedisError."""
        self._writer.write(b"".join([_encoded(command) for command in commands]))
        await self._writer.drain()
        replies: list[Reply] = []
        at = 0
        while len(replies) < len(commands):
            try:
                reply, at = _parse(self._unread, at)
                replies.append(reply)
            except _IncompleteReplyError:
                more = await self._reader.read(READ_BYTES)
                if not more:
                    raise ConnectionError("Redis closed the connection") from None
                self._unread, at = self._unread[at:] + more, 0
        self._unread = self._unread[at:]
        return replies

    def close(self) -> None:
        self._writer.transport.abort()


class _IncompleteReplyError(Exception):
    """The rest has not come yet."""


def _parse(data: bytes, at: int) -> tuple[Reply, int]:
    """The reply that begins there, and where the next one begins. No await: it is called for every entry."""
    end = data.find(b"\r\n", at)
    if end < 0:
        raise _IncompleteReplyError
    kind, rest, after = data[at : at + 1], data[at + 1 : end], end + 2
    if kind == b"+":
        return rest, after
    if kind == b"-":
        return RedisError(rest.decode(errors="replace")), after
    if kind not in (b":", b"$", b"*") or not rest.lstrip(b"-").isdigit():
        raise ConnectionError("the reply is none of Redis")
    number = int(rest)
    if kind == b":":
        return number, after
    if number < 0:
        return None, after
    if kind == b"*":
        return _parse_list(data, after, number)
    if len(data) < after + number + 2:
        raise _IncompleteReplyError
    return data[after : after + number], after + number + 2


def _parse_list(data: bytes, at: int, count: int) -> tuple[Reply, int]:
    found: list[Reply] = []
    for _ in range(count):
        one, at = _parse(data, at)
        found.append(one)
    return found, at


def _encoded(command: Command) -> bytes:
    parts = [part if isinstance(part, bytes) else b"%d" % part for part in command]
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])
