"""The bytes between two movers: a handshake, then frames. Nothing but fixed sizes is read before it is checked.

    receiver ──magic, nonce──▶ sender ──magic, nonce, identity, MAC──▶ receiver ──MAC──▶ sender
    sender ──ticket, first block, number of blocks, MAC, blocks──▶ receiver    (as often as it likes)

Over TCP both must know the secret of the cluster, and every frame has a MAC over its place in the connection, its
header and its blocks. Content is not encrypted. A unix socket is protected by the permissions of its folder: there the
secret is empty, and frames have no MAC.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Sequence
from hashlib import blake2b

from lightserve.worker.kv_mover.base import Frame

MAGIC = b"LSKVMOV1"
ENDED = "the connection ended"
NONCE_BYTES = 32
IDENTITY_BYTES = 32
MAC_BYTES = 32
_HEADER = struct.Struct(f"<qII{MAC_BYTES}s")
SKIP_BYTES = 1 << 20  # of one read that is dropped
MAX_BUFFERS = 512  # of one call; the kernel takes 1024


class WireError(Exception):
    """The other side is a stranger, computes other KV, or has closed the connection."""


class FrameStream:
    """One direction of a connection after its handshake."""

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        self.socket = sock
        self._key = key  # empty: frames have no MAC
        self._count = 0

    def send(self, frame: Frame, blocks: Sequence[memoryview]) -> None:
        header = _HEADER.pack(*frame, self._mac(frame, blocks))
        buffers = [memoryview(header), *blocks]
        for begin in range(0, len(buffers), MAX_BUFFERS):
            _send_all(self.socket, buffers[begin : begin + MAX_BUFFERS])

    def read_header(self) -> tuple[Frame, bytes]:
        """Waits until there is one."""
        data = memoryview(bytearray(_HEADER.size))
        while not (count := _read_or_idle(self.socket, data)):
            pass
        read_into(self.socket, [data[count:]])
        ticket, first, num_blocks, mac = _HEADER.unpack(data)
        return Frame(ticket, first, num_blocks), mac

    def read_blocks(self, blocks: Sequence[memoryview]) -> None:
        for begin in range(0, len(blocks), MAX_BUFFERS):
            read_into(self.socket, blocks[begin : begin + MAX_BUFFERS])

    def skip(self, size: int) -> None:
        """Drop the blocks of a frame. Its MAC is not checked: nothing of it is used."""
        spare = memoryview(bytearray(min(size, SKIP_BYTES)))
        while size:
            read_into(self.socket, [spare[:size]])
            size -= len(spare[:size])
        self._count += 1

    def check(self, frame: Frame, blocks: Sequence[memoryview], mac: bytes) -> None:
        if not hmac.compare_digest(mac, self._mac(frame, blocks)):
            raise WireError("a frame has a wrong MAC")

    def _mac(self, frame: Frame, blocks: Sequence[memoryview]) -> bytes:
        if not self._key:
            return bytes(MAC_BYTES)
        digest = blake2b(struct.pack("<QqII", self._count, *frame), key=self._key, digest_size=MAC_BYTES)
        self._count += 1
        for block in blocks:
            digest.update(block)
        return digest.digest()


def greet_receiver(sock: socket.socket, secret: bytes, identity: bytes) -> FrameStream:
    """The sender's part of the handshake."""
    nonce = _read_nonce(sock)
    own = os.urandom(NONCE_BYTES)
    sock.sendall(MAGIC + own + identity + _mac_of(secret, b"sender", nonce, own, identity))
    if not hmac.compare_digest(read_exactly(sock, MAC_BYTES), _mac_of(secret, b"receiver", nonce, own, identity)):
        raise WireError("the receiver has another kv.secret")
    return FrameStream(sock, _session_key(secret, nonce, own))


def greet_sender(sock: socket.socket, secret: bytes, identity: bytes) -> FrameStream:
    """The receiver's part."""
    own = os.urandom(NONCE_BYTES)
    sock.sendall(MAGIC + own)
    nonce = _read_nonce(sock)
    other, mac = read_exactly(sock, IDENTITY_BYTES), read_exactly(sock, MAC_BYTES)
    if not hmac.compare_digest(mac, _mac_of(secret, b"sender", own, nonce, other)):
        raise WireError("the sender has another kv.secret")
    if other != identity:
        raise WireError("the sender has another model, KV layout or number of ranks")
    sock.sendall(_mac_of(secret, b"receiver", own, nonce, identity))
    return FrameStream(sock, _session_key(secret, own, nonce))


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    read_into(sock, [memoryview(data)])
    return bytes(data)


def read_into(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    """In one call of the kernel, mostly: between two, this thread might wait for those that launch steps."""
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        count, *_ = sock.recvmsg_into(left, 0, socket.MSG_WAITALL)
        if not count:
            raise WireError(ENDED)
        left = _after(left, count)


def _send_all(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    left = list(buffers)
    while left:
        left = _after(left, sock.sendmsg(left))


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of these after so many bytes."""
    at = 0
    while at < len(buffers) and count >= len(buffers[at]):
        count -= len(buffers[at])
        at += 1
    left = buffers[at:]
    return [left[0][count:], *left[1:]] if left else []


def _read_or_idle(sock: socket.socket, into: memoryview) -> int:
    """Bytes that were read; 0: there are none yet."""
    try:
        count = sock.recv_into(into)
    except BlockingIOError:  # SO_RCVTIMEO
        return 0
    if not count:
        raise WireError(ENDED)
    return count


def _read_nonce(sock: socket.socket) -> bytes:
    greeting = read_exactly(sock, len(MAGIC) + NONCE_BYTES)
    if not greeting.startswith(MAGIC):
        raise WireError("the other side speaks another protocol")
    return greeting[len(MAGIC) :]


def _mac_of(secret: bytes, side: bytes, *parts: bytes) -> bytes:
    return blake2b(side + b"".join(parts), key=secret[:64], digest_size=MAC_BYTES).digest()


def _session_key(secret: bytes, *nonces: bytes) -> bytes:
    return _mac_of(secret, b"frames", *nonces) if secret else b""
