"""A connection to Redis or Valkey for the event loop: sends some commands at once and returns their replies.

RESP is their protocol: commands as bytes, and replies from bytes that come in pieces.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightserve.utils.net import RedisAddress

Command = Sequence[bytes | int]
Reply = Any  # bytes, int, None, a RedisError or a list of them
READ_BYTES = 2**20


class RedisError(Exception):
    """Redis refuses a command. The connection is fine."""


def encode_command(command: Command) -> bytes:
    parts = [argument if isinstance(argument, bytes) else b"%d" % argument for argument in command]
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in parts])


class _OpenList(NamedTuple):
    """A list that is not complete."""

    items: list[Reply]
    size: int  # when it is


class _IncompleteError(Exception):
    """The rest has not come yet."""


class ReplyParser:
    """What it has parsed it does not parse again, however many pieces a reply comes in."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0  # of the first byte that is not parsed
        self._open: list[_OpenList] = []  # the innermost is the last

    def parse(self, data: bytes) -> list[Reply]:
        """The replies that are complete with these bytes."""
        self._data += data
        replies: list[Reply] = []
        try:
            while True:
                self._add(self._parse_value(), replies)
        except _IncompleteError:
            del self._data[: self._at]
            self._at = 0
        return replies

    def _add(self, value: Reply, replies: list[Reply]) -> None:
        """The next value belongs to the innermost list that is open. A list that it completes is a value too."""
        if isinstance(value, _OpenList):
            self._open.append(value)
            return
        while self._open:
            items, size = self._open[-1]
            items.append(value)
            if len(items) < size:
                return
            value = self._open.pop().items
        replies.append(value)

    def _parse_value(self) -> Reply | _OpenList:
        end = self._data.find(b"\r\n", self._at)
        if end < 0:
            raise _IncompleteError
        kind, text, after = self._data[self._at : self._at + 1], bytes(self._data[self._at + 1 : end]), end + 2
        if kind == b"$":
            return self._parse_bytes(_number(text), after)
        self._at = after
        if kind == b"*":
            return _begin_list(_number(text))
        if kind == b":":
            return _number(text)
        if kind == b"-":
            return RedisError(text.decode(errors="replace"))
        if kind == b"+":
            return text
        raise ConnectionError("the reply is none of Redis")

    def _parse_bytes(self, count: int, begin: int) -> bytes | None:
        if count < 0:
            self._at = begin
            return None
        if len(self._data) < begin + count + 2:
            raise _IncompleteError
        self._at = begin + count + 2
        return bytes(self._data[begin : begin + count])


def _begin_list(count: int) -> _OpenList | list[Reply] | None:
    if count < 0:
        return None
    return _OpenList([], count) if count else []


def _number(text: bytes) -> int:
    if not text.lstrip(b"-").isdigit():
        raise ConnectionError("the reply is none of Redis")
    return int(text)


class RedisConnection:
    """Any OSError leaves it unusable: close it. It is for one caller at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = ReplyParser()

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
        self._writer.write(b"".join([encode_command(command) for command in commands]))
        await self._writer.drain()
        replies: list[Reply] = []
        while len(replies) < len(commands):
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise ConnectionError("Redis closed the connection")
            replies += self._parser.parse(data)
        return replies

    def close(self) -> None:
        self._writer.transport.abort()
