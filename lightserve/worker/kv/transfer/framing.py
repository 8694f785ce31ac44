"""The bytes between two transfer backends: a handshake, then frames. Nothing but fixed sizes is read before it is
checked.

    receiver ──magic, nonce──▶ sender ──magic, nonce, identity, MAC──▶ receiver ──MAC──▶ sender
    sender ──transfer, first block, number of blocks, pool, MAC, blocks──▶ receiver    (as often as it likes)

Over TCP both must know the secret of the cluster, and every frame has a MAC over its place in the connection, its
header and its blocks, or TLS protects them (``tls.py``). A unix socket is protected by the permissions of its folder:
there the secret is empty, and frames have no MAC.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Sequence
from hashlib import blake2b

from lightserve.worker.kv.transfer.base import Frame
from lightserve.worker.kv.transfer.pipe import KvTransferError, Pipe, read, send
from lightserve.worker.kv.transfer.transport import ReceiveTransport, SendTransport, SocketTransport

MAGIC = b"LSKVMOV2"
NONCE_BYTES = 32
IDENTITY_BYTES = 32
MAC_BYTES = 32
_HEADER = struct.Struct(f"<qIII{MAC_BYTES}s")


class FrameStream:
    """One direction of a connection after its handshake."""

    def __init__(self, pipe: Pipe, key: bytes) -> None:
        self.pipe = pipe
        transport = SocketTransport(pipe)
        self.sending: SendTransport = transport
        self.receiving: ReceiveTransport = transport
        self._key = key  # empty: frames have no MAC
        self._count = 0

    def send(self, frame: Frame, blocks: Sequence[memoryview]) -> None:
        header = _HEADER.pack(*frame, self._mac(frame, blocks))
        self.sending.send(header, blocks)

    def read_header(self) -> tuple[Frame, bytes]:
        """Waits until there is one."""
        data = memoryview(bytearray(_HEADER.size))
        while not (count := self.pipe.read_or_idle(data)):
            pass
        self.pipe.read_into([data[count:]])
        *frame, mac = _HEADER.unpack(data)
        return Frame(*frame), mac

    def read_blocks(self, blocks: Sequence[memoryview]) -> None:
        self.receiving.read(blocks)

    def skip(self, frame: Frame, block_bytes: int) -> None:
        """Drop the blocks of a frame. Its MAC is not checked: nothing of it is used."""
        self.receiving.skip(frame.num_blocks, block_bytes)
        self._count += 1

    def check(self, frame: Frame, blocks: Sequence[memoryview], mac: bytes) -> None:
        if not hmac.compare_digest(mac, self._mac(frame, blocks)):
            raise KvTransferError("a frame has a wrong MAC")

    def _mac(self, frame: Frame, blocks: Sequence[memoryview]) -> bytes:
        if not self._key:
            return bytes(MAC_BYTES)
        digest = blake2b(struct.pack("<QqIII", self._count, *frame), key=self._key, digest_size=MAC_BYTES)
        self._count += 1
        for block in blocks:
            digest.update(block)
        return digest.digest()


def greet_receiver(pipe: Pipe, secret: bytes, identity: bytes, has_macs: bool = True) -> FrameStream:
    """The sender's part of the handshake. Frames need no MACs in a pipe that protects its bytes."""
    nonce = _read_nonce(pipe)
    sender_nonce = os.urandom(NONCE_BYTES)
    send(pipe, MAGIC + sender_nonce + identity + _mac_of(secret, b"sender", nonce, sender_nonce, identity))
    if not hmac.compare_digest(read(pipe, MAC_BYTES), _mac_of(secret, b"receiver", nonce, sender_nonce, identity)):
        raise KvTransferError("the receiver has another kv.secret")
    return FrameStream(pipe, _session_key(secret, nonce, sender_nonce) if has_macs else b"")


def greet_sender(pipe: Pipe, secret: bytes, identity: bytes, has_macs: bool = True) -> FrameStream:
    """The receiver's part."""
    receiver_nonce = os.urandom(NONCE_BYTES)
    send(pipe, MAGIC + receiver_nonce)
    nonce = _read_nonce(pipe)
    sender_identity, mac = read(pipe, IDENTITY_BYTES), read(pipe, MAC_BYTES)
    if not hmac.compare_digest(mac, _mac_of(secret, b"sender", receiver_nonce, nonce, sender_identity)):
        raise KvTransferError("the sender has another kv.secret")
    if sender_identity != identity:
        raise KvTransferError("the sender has another model, KV layout, number of ranks or --kv_transport")
    send(pipe, _mac_of(secret, b"receiver", receiver_nonce, nonce, identity))
    return FrameStream(pipe, _session_key(secret, receiver_nonce, nonce) if has_macs else b"")


def _read_nonce(pipe: Pipe) -> bytes:
    greeting = read(pipe, len(MAGIC) + NONCE_BYTES)
    if not greeting.startswith(MAGIC):
        raise KvTransferError("the other side speaks another protocol")
    return greeting[len(MAGIC) :]


def _mac_of(secret: bytes, side: bytes, *parts: bytes) -> bytes:
    return blake2b(side + b"".join(parts), key=secret[:64], digest_size=MAC_BYTES).digest()


def _session_key(secret: bytes, *nonces: bytes) -> bytes:
    return _mac_of(secret, b"frames", *nonces) if secret else b""
