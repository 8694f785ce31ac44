"""node 0 <-> the other nodes of a server (--nnodes), over TCP."""

from __future__ import annotations

import msgspec

from lightserve.messages.cluster import Heartbeat

NODE_PROTOCOL = 3  # increase it when one of these messages changes


class NodeHello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a node. The first fields stay as they are in all versions, so that every node 0 can read it.

    A node that has other ``properties`` than node 0 is refused: versions, digests of the model, flags.
    """

    protocol: int
    node: int
    properties: dict[str, str] = {}


class NodeAccepted(msgspec.Struct, frozen=True, tag=True):
    """The reply to NodeHello."""


class NodeRefused(msgspec.Struct, frozen=True, tag=True):
    """The other reply to NodeHello."""

    reason: str
    may_retry: bool = False


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """Start a rank; the stream is its control connection. The end of the stream kills it, and RankExited ends it."""

    rank: int
    generation: int  # how many times the ranks were replaced
    # on node 0, where the ranks find each other; a node replaces it by a port of its own. None: all are on this node
    store_port: int | None
    engine: int = 0  # of --dp
    max_total_token_num: int | None = None  # None: as in the node's own flags
    max_windowed_token_num: int | None = None
    max_state_rows: int | None = None
    has_images: bool = False  # requests may have some: the rank reads their embeddings from node 0


class ConnectRank(msgspec.Struct, frozen=True, tag=True):
    """Connect to the socket of a rank, for the router."""

    rank: int
    generation: int
    engine: int = 0


class ConnectStore(msgspec.Struct, frozen=True, tag=True):
    """Connect to the store of node 0, where the ranks of an engine find each other."""

    engine: int = 0


class ConnectArena(msgspec.Struct, frozen=True, tag=True):
    """Connect to the embeddings of images on node 0, those of an engine: see ipc/arena.py."""

    engine: int = 0


class OpenStream(msgspec.Struct, frozen=True, tag=True):
    """A new stream of bytes in both directions."""

    stream: int  # even if node 0 opens it, else odd
    target: StartRank | ConnectRank | ConnectStore | ConnectArena


class StreamData(msgspec.Struct, frozen=True, tag=True):
    stream: int
    data: bytes


class StreamEnd(msgspec.Struct, frozen=True, tag=True):
    """No more data comes from this side."""

    stream: int


StreamMessage = OpenStream | StreamData | StreamEnd

ToFirstNode = NodeHello | StreamMessage | Heartbeat

ToNode = NodeAccepted | NodeRefused | StreamMessage | Heartbeat
