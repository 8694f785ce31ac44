"""What goes through Ray's calls: flags, addresses, states. Always as msgpack bytes, never a request or a token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)
NORMAL = "normal"  # the role of replicas without one
State = Literal["starting", "serving", "failed", "draining", "stopped", "lost"]


class ReplicaGroup(msgspec.Struct, frozen=True):
    """Replicas of one role: as many as their load needs."""

    min_replicas: int
    max_replicas: int
    role: str = NORMAL


class Deployment(msgspec.Struct, frozen=True):
    """What the operator wants."""

    name: str
    version: int  # of the flags: replicas of an older one are replaced
    engine_flags: dict[str, Any]  # as in a file of --config
    gateway_flags: dict[str, Any]
    keys: dict[str, bytes]  # files of --cluster_keys
    bundle: dict[str, float]  # resources of a replica
    groups: list[ReplicaGroup]
    target_queue: float = 4.0  # requests that may wait for each replica before one is added
    scale_down_s: float = 300.0  # that the load must fit into fewer replicas before one is drained
    num_gateways: int = 1  # more than one: HAProxy is in front of them
    owner: str = ""  # the application of Ray Serve that made it


class Persisted(msgspec.Struct, frozen=True):
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
    """Requests of the gateway, as it says in /metrics: all of them, or those of one role."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0  # mean over engines; 1 is full
    local_prefill_tokens: float = 0.0  # so far, that decode engines computed because prefill engines had long queues


class GatewayStatus(msgspec.Struct, frozen=True):
    process: ProcessStatus
    load: Load = Load()
    taking: list[str] = []  # addresses of engines that get new requests
    node: str = ""  # Ray's id of it
    by_role: dict[str, Load] = {}


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
    role: str = NORMAL


class GroupStatus(msgspec.Struct, frozen=True):
    role: str
    wanted: int
    min_replicas: int
    max_replicas: int

    @property
    def limits(self) -> str:
        """For people; "": their number is fixed."""
        is_fixed = self.min_replicas == self.max_replicas
        return "" if is_fixed else f" ({self.min_replicas}:{self.max_replicas})"


class DeploymentStatus(msgspec.Struct, frozen=True):
    name: str
    version: int
    groups: list[GroupStatus]
    gateway: GatewayStatus  # with several, their sum: its process is HAProxy
    replicas: list[ReplicaStatus]
    drained_nodes: list[str]
    gateways: list[GatewayStatus] = []

    @property
    def wanted(self) -> int:
        return sum(group.wanted for group in self.groups)

    @property
    def current(self) -> list[ReplicaStatus]:
        """Replicas of the newest flags and of a role that is wanted. All others are replaced."""
        roles = {group.role for group in self.groups}
        return [replica for replica in self.replicas if replica.version == self.version and replica.role in roles]

    def serving(self, role: str) -> int:
        """Replicas of the newest flags that take requests."""
        return sum(replica.takes_requests for replica in self.current if replica.role == role)

    def progress(self) -> str:
        """How many replicas of the newest flags serve, and why one has no node."""
        counts = [f"{self.serving(group.role)} of {group.wanted}" for group in self.groups]
        no_room = next(
            (f": {replica.process.reason}" for replica in self.current if not replica.node and replica.process.reason),
            "",
        )
        return f"{self.by_role(counts)} serve{no_room}"

    def by_role(self, counts: Iterable[str]) -> str:
        """Numbers of replicas of each group, for people."""
        roles = [group.role for group in self.groups]
        if roles == [NORMAL]:
            return f"{next(iter(counts))} replicas"
        return f"{' and '.join(f'{count} {role}' for count, role in zip(counts, roles, strict=True))} replicas"


def pack(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def unpack(raw: bytes, kind: type[S]) -> S:
    return msgspec.msgpack.decode(raw, type=kind)
