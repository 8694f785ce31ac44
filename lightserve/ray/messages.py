"""What goes through Ray's calls: flags, addresses, states. Always as msgpack bytes, never a request or a token."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)
State = Literal["starting", "serving", "failed", "draining", "stopped", "lost"]


class Deployment(msgspec.Struct, frozen=True):
    """What the operator wants."""

    name: str
    version: int  # of the flags: replicas of an older one are replaced
    engine_flags: dict[str, Any]  # as in a file of --config
    gateway_flags: dict[str, Any]
    keys: dict[str, bytes]  # files of --cluster_keys
    bundle: dict[str, float]  # resources of a replica
    min_replicas: int
    max_replicas: int
    target_queue: float = 4.0  # requests that may wait for each replica before one is added
    scale_down_s: float = 300.0  # that the load must fit into fewer replicas before one is drained
    num_gateways: int = 1  # more than one: HAProxy is in front of them
    owner: str = ""  # the application of Ray Serve that made it


class Kept(msgspec.Struct, frozen=True):
    """What the actors of gateways keep for a controller that is restarted."""

    deployment: Deployment
    engines: dict[str, str] = {}  # address by replica
    drained_nodes: list[str] = []


class ProcessStatus(msgspec.Struct, frozen=True):
    """One process that an actor keeps running."""

    state: State
    address: str = ""  # of an engine; of a gateway or HAProxy, its URL
    reason: str = ""  # why it failed
    restarts: int = 0
    exit_code: int | None = None  # of its last end


class Load(msgspec.Struct, frozen=True):
    """All requests of the gateway, as it says in /metrics."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0  # mean over engines; 1 is full


class GatewayStatus(msgspec.Struct, frozen=True):
    process: ProcessStatus
    load: Load = Load()
    taking: list[str] = []  # addresses of engines that get new requests
    node: str = ""  # Ray's id of it


class GatewayUrls(msgspec.Struct, frozen=True):
    """For HAProxy, in the order of the gateways. "": it does not serve now. None: as before."""

    urls: list[str | None]


class ReplicaStatus(msgspec.Struct, frozen=True):
    """A replica as the controller sees it."""

    replica: str
    version: int
    node: str  # Ray's id of it; "": not placed yet
    process: ProcessStatus
    takes_requests: bool


class DeploymentStatus(msgspec.Struct, frozen=True):
    name: str
    version: int
    wanted: int
    min_replicas: int
    max_replicas: int
    gateway: GatewayStatus  # with several, their sum: its process is HAProxy
    replicas: list[ReplicaStatus]
    drained_nodes: list[str]
    gateways: list[GatewayStatus] = []

    def progress(self) -> str:
        """How many replicas of the newest flags serve, and why one has no node."""
        current = [one for one in self.replicas if one.version == self.version]
        no_room = next((f": {one.process.reason}" for one in current if not one.node and one.process.reason), "")
        return f"{sum(one.takes_requests for one in current)} of {self.wanted} replicas serve{no_room}"


def pack(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def unpack(raw: bytes, kind: type[S]) -> S:
    return msgspec.msgpack.decode(raw, type=kind)
