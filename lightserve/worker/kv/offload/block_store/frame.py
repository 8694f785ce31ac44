"""How a block is stored: a header that says what it is, then its bytes.

The header has the identity of the KV and the key of the block, so that a block never stands for another one, and a hash
of the bytes, so that a damaged block is not used.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

MAGIC = b"LSKVBLK1"
IDENTITY_BYTES = 32
KEY_BYTES = 32
HASH_BYTES = 32
_HEADER = struct.Struct(f"<8s{IDENTITY_BYTES}s{KEY_BYTES}sQ{HASH_BYTES}s")
HEADER_BYTES = _HEADER.size


class BlockError(Exception):
    """A block cannot be read or written, or is not what it should be. It is computed again."""


def identity_of(*parts: object) -> bytes:
    """Of KV that was computed in the same way and has the same layout. A key says which tokens it is of."""
    return blake2b(repr(parts).encode(), digest_size=IDENTITY_BYTES).digest()


def header_of(identity: bytes, key: bytes, data: memoryview) -> bytes:
    return _HEADER.pack(MAGIC, identity, key, len(data), _hash(identity, key, data))


def check_block(header: bytes, identity: bytes, key: bytes, data: memoryview) -> None:
    """Raise BlockError unless ``data`` is the whole block of this key."""
    if len(header) != HEADER_BYTES:
        raise BlockError(f"the header has {len(header)} bytes, not {HEADER_BYTES}")
    if header != header_of(identity, key, data):
        raise BlockError("the header does not fit the content")


def _hash(identity: bytes, key: bytes, data: memoryview) -> bytes:
    """8 MB take 10 ms on one core; several blocks are checked at once."""
    digest = blake2b(identity + key, digest_size=HASH_BYTES)
    digest.update(data)
    return digest.digest()
