"""router <-> model worker, besides steps: profiles, adapters, KV in lower tiers and from other engines."""

from __future__ import annotations

from typing import Literal

import msgspec

from lightserve.messages.params import GrammarSpec


class CompileGrammar(msgspec.Struct, frozen=True):
    """Compile a grammar before a request with it enters."""

    grammar: GrammarSpec
    eos_ids: tuple[int, ...]


class ProfileCommand(msgspec.Struct, frozen=True):
    """Start a profile of this worker, or end it and write it to files."""

    prefix: str | None = None  # of the files' paths; None: start


class LoraLoad(msgspec.Struct, frozen=True):
    """Read an adapter into host memory. The adapters of ``dropped`` are not needed there any more."""

    lora_id: int  # never used again for other weights
    path: str  # the folder
    dropped: list[int] = []


class LoraLoaded(msgspec.Struct, frozen=True):
    """The reply to a LoraLoad."""

    error: str = ""  # why the adapter cannot be used
    digest: str = ""  # of its files


class ReleasedMemory(msgspec.Struct, frozen=True):
    """Free this memory, and take the rest again. No step is in flight, and nothing in the KV cache is needed."""

    kv: bool = False
    weights: bool = False  # move them to the host; a worker that cannot has failed, and keeps them


class MemoryChanged(msgspec.Struct, frozen=True):
    """The reply to a ReleasedMemory."""

    error: str = ""  # why it has failed
    keeps_graphs: bool = False  # CUDA graphs stay valid


NO_STORE = -1  # in the reply to a KvLookup: no tier has the block


class KvLookup(msgspec.Struct, frozen=True):
    """Which tier below host memory has each of these blocks? The reply is a list of their numbers, or NO_STORE."""

    keys: list[bytes]


class KvFetch(msgspec.Struct, frozen=True):
    """Read blocks of a tier below into host memory, after the KvStore ``after``.

    The router knows that one rank has made it; others may be behind.
    """

    after: int
    store: int
    keys: list[bytes]
    blocks: list[int]


class KvFetched(msgspec.Struct, frozen=True):
    """The reply to a KvFetch."""

    are_valid: list[bool]  # those that are now in host memory
    seconds: float = 0.0


class KvFlush(msgspec.Struct, frozen=True):
    """Write blocks of host memory to the tiers below, after the KvStore ``after``, as for KvFetch.

    Blocks that may be wrong are removed there first.
    """

    after: int
    keys: list[bytes]
    blocks: list[int]
    removed: list[bytes] = []


class KvFlushed(msgspec.Struct, frozen=True):
    """The reply to a KvFlush: a number for each tier."""

    written: list[int]
    errors: list[int]
    used_bytes: list[int]


class KvLoaded(msgspec.Struct, frozen=True):
    """A KvLoad has ended."""

    seconds: float  # that copying took
    is_valid: bool = True  # if not, the slots hold anything


class KvReceived(msgspec.Struct, frozen=True, array_like=True):
    """A KvRecv has ended: so many of its first blocks have come, and nothing writes to its slots any more.

    Blocks of KV groups follow those of all tokens.
    """

    transfer_id: int
    num_blocks: int


class ProfileResult(msgspec.Struct, frozen=True):
    """The reply to a ProfileCommand."""

    paths: list[str] = []  # files that were written
    error: str = ""  # what went wrong
    num_unread: int = 0  # files on other nodes, which the router reads


class ProfileChunk(msgspec.Struct, frozen=True):
    """The next piece of what a rank on another node has recorded. Without data there is no more."""

    data: bytes = b""  # by zlib
    kind: Literal["worker", "device"] = "worker"  # of the file
