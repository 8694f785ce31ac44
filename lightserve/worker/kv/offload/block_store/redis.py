"""Blocks of KV in a Redis or Valkey server, which several servers can share.

A client of a few lines: it sends and receives the memory of a block itself, where a client library would copy it.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from lightserve.utils.net import RedisAddress, parse_redis
from lightserve.worker.kv.offload.block_store.frame import HEADER_BYTES, BlockError, check_block, header_of

TIMEOUT_S = 2.0  # of one read or write
RETRY_S = 5.0  # a server that failed is left alone for so long
PREFIX = b"lightserve:kv:"
MAX_LINE = 512

T = TypeVar("T")


class Connection:
    """Of one thread. Any error closes it."""

    def __init__(self, address: RedisAddress) -> None:
        self._socket = _connect(address)
        if address.has_tls:
            context = ssl.create_default_context()
            self._socket = context.wrap_socket(self._socket, server_hostname=address.host)
        self._file = self._socket.makefile("rb")
        for command in address.login():
            self.send(*command)
            self.read_line()

    def send(self, *parts: bytes | memoryview, joined: int = 1) -> None:
        """A command. Its last ``joined`` parts are one argument."""
        count = len(parts) - joined + 1
        buffers: list[bytes | memoryview] = [b"*%d\r\n" % count]
        for argument in parts[: count - 1]:
            buffers += [b"$%d\r\n" % len(argument), argument, b"\r\n"]
        last = parts[count - 1 :]
        buffers += [b"$%d\r\n" % sum(map(len, last)), *last, b"\r\n"]
        self._send_all(buffers)

    def read_line(self) -> bytes:
        """A reply of one line, with its type."""
        line = self._file.readline(MAX_LINE)
        if not line.endswith(b"\r\n"):
            raise OSError("the connection ended, or the reply is none of Redis")
        if line.startswith(b"-"):
            raise OSError(line[1:-2].decode(errors="replace"))
        return line[:-2]

    def read_exactly(self, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = self._file.readinto(into[done:])
            if not count:
                raise OSError("the connection ended")
            done += count

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _send_all(self, buffers: list[bytes | memoryview]) -> None:
        """Memory of blocks is sent as it is. All else is small, and joined into as few packets as can be."""
        small = bytearray()
        for buffer in buffers:
            if isinstance(buffer, bytes):
                small += buffer
            else:
                self._socket.sendall(small)
                self._socket.sendall(buffer)
                small = bytearray()
        self._socket.sendall(small)


def _connect(address: RedisAddress) -> socket.socket:
    if address.socket_path is not None:
        unix = socket.socket(socket.AF_UNIX)
        unix.settimeout(TIMEOUT_S)
        unix.connect(address.socket_path)
        return unix
    tcp = socket.create_connection((address.host, address.port), TIMEOUT_S)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return tcp


class RedisStore:
    name = "remote"
    used_bytes = 0  # others write there too

    def __init__(self, url: str, identity: bytes) -> None:
        self._address = parse_redis(url)
        self._identity = identity
        self._own = threading.local()
        self._failed_s = float("-inf")

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        def ask(connection: Connection) -> list[bool]:
            for key in keys:
                connection.send(b"EXISTS", self._name(key))
            return [connection.read_line() == b":1" for _ in keys]

        try:
            return self._call(ask)
        except BlockError:  # it is down: nothing is found
            return [False] * len(keys)

    def get(self, key: bytes, into: memoryview) -> None:
        header = bytearray(HEADER_BYTES)

        def read(connection: Connection) -> bool:
            connection.send(b"GET", self._name(key))
            size = connection.read_line()
            if size == b"$-1":
                return False
            if size != b"$%d" % (HEADER_BYTES + len(into)):
                connection.close()  # to skip what comes takes longer
                self._own.connection = None
                self.remove(key)
                return False
            connection.read_exactly(memoryview(header))
            connection.read_exactly(into)
            return connection.read_line() == b""

        if not self._call(read):
            raise BlockError(f"{self._address.name}: the block {key.hex()[:16]} is not there, or has another size")
        try:
            check_block(bytes(header), self._identity, key, into)
        except BlockError:
            self.remove(key)
            raise

    def put(self, key: bytes, data: memoryview) -> bool:
        def write(connection: Connection) -> bool:
            connection.send(b"EXISTS", self._name(key))
            if connection.read_line() == b":1":
                return False
            header = header_of(self._identity, key, data)
            connection.send(b"SET", self._name(key), header, data, joined=2)
            return connection.read_line() == b"+OK"

        return self._call(write)

    def remove(self, key: bytes) -> None:
        def delete(connection: Connection) -> None:
            connection.send(b"DEL", self._name(key))
            connection.read_line()

        with suppress(BlockError):
            self._call(delete)

    def _name(self, key: bytes) -> bytes:
        return PREFIX + self._identity.hex().encode() + b":" + key.hex().encode()

    def _call(self, command: Callable[[Connection], T]) -> T:
        """A server that fails is left alone for a while, so that nobody waits for it again and again."""
        if time.monotonic() - self._failed_s < RETRY_S:
            raise BlockError(f"{self._address.name}: it failed less than {RETRY_S:.0f} s ago")
        connection: Connection | None = getattr(self._own, "connection", None)
        try:
            if connection is None:
                connection = self._own.connection = Connection(self._address)
            return command(connection)
        except OSError as error:
            self._failed_s = time.monotonic()
            if connection is not None:
                connection.close()
                self._own.connection = None
            raise BlockError(f"{self._address.name}: {error}") from error
