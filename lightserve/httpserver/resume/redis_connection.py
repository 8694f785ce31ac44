"""A connection to Redis or Valkey for the event loop: sends some commands at once and returns their replies."""

from __future__ import annotations

import asyncio
import ssl

from lightserve.httpserver.resume.resp import Command, RedisError, Reply, ReplyParser, encode_command
from lightserve.utils.net import RedisAddress

READ_BYTES = 2**20


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
