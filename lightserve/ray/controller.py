"""The controller of a deployment: an actor that keeps the wanted number of replicas, and the gateway's list of them.

    operator ──Deployment──▶ controller ──▶ replica actors ──▶ lightserve engine
                                  ├───────▶ gateway actors ──▶ lightserve serve --engines_file
                                  └───────▶ proxy actor    ──▶ HAProxy, if there are several gateways

It is not on the path of a request: while it is away, gateways serve with the engines that they have. Ray restarts it,
and it finds the actors again by their names.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lightserve.ray import cluster
from lightserve.ray.actors import GatewayActor, ProxyActor, ReplicaActor
from lightserve.ray.autoscaling import Autoscaler
from lightserve.ray.gateway_group import GatewayGroup
from lightserve.ray.messages import (
    NORMAL,
    Deployment,
    DeploymentStatus,
    GroupStatus,
    Persisted,
    ProcessStatus,
    ReplicaStatus,
    pack,
    unpack,
)
from lightserve.ray.placement import place_replicas, why_no_room
from lightserve.ray.polled_actor import PolledActor
from lightserve.ray.replica_changes import GroupView, ReplicaView, group_changes
from lightserve.ray.replica_name import parse_replica_name, replica_name
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

TICK_S = 0.5
STUCK_S = 10.0  # without a place, although Ray knew all that was free
STARTING = ProcessStatus("starting")


@dataclass(slots=True, eq=False)
class _Replica:
    name: str  # of its actor
    role: str
    version: int
    polled: PolledActor
    node: str = ""
    process: ProcessStatus = field(default=STARTING)
    is_draining: bool = False
    must_leave: bool = False  # the operator has drained it
    waits_since_s: float = 0.0  # for a node
    no_room: str = ""  # why it still waits for one

    @property
    def short_name(self) -> str:
        return self.name.rpartition("/")[2]


class Controller:
    def __init__(self, raw: bytes) -> None:
        self._lock = threading.RLock()  # calls of Ray and the thread
        self._deployment = unpack(raw, Deployment)
        self._replicas: dict[str, _Replica] = {}
        self._drained_nodes: set[str] = set()
        self._is_ending = False
        self._next_number = 0
        self._find_actors(raw)
        self._autoscalers: dict[str, Autoscaler] = {}  # by role
        self._set_limits()
        threading.Thread(target=self._run, name="controller", daemon=True).start()

    # from operators

    def apply(self, raw: bytes) -> None:
        """Use another Deployment. Replicas with older flags are replaced one by one."""
        with self._lock:
            self._deployment = unpack(raw, Deployment)
            self._set_limits()

    def deployment(self) -> bytes:
        return pack(self._deployment)

    def status(self) -> bytes:
        with self._lock:
            gateway = self._gateways.status()
            taking = set(gateway.taking)
            replicas = [
                ReplicaStatus(
                    *(replica.short_name, replica.version, replica.node, _shown(replica)),
                    takes_requests=_address(replica) in taking and not replica.is_draining,
                    role=replica.role,
                )
                for replica in self._replicas.values()
            ]
            groups = [
                GroupStatus(role, scaler.wanted, scaler.group.min_replicas, scaler.group.max_replicas)
                for role, scaler in self._autoscalers.items()
            ]
            return pack(
                DeploymentStatus(
                    self._deployment.name,
                    self._deployment.version,
                    groups,
                    gateway,
                    replicas,
                    sorted(self._drained_nodes),
                    self._gateways.statuses,
                )
            )

    def drain(self, target: str) -> int:
        """Replace a replica, or all replicas of a node, which gets no new ones. Returns how many."""
        with self._lock:
            by_name = [replica for replica in self._replicas.values() if replica.short_name == target]
            found_nodes = [node.id for node in cluster.nodes() if target in (node.id, node.id[: len(target)])]
            if not by_name and len(found_nodes) != 1:
                return -1
            for replica in by_name:
                replica.must_leave = True
            if not by_name:
                self._drained_nodes.add(found_nodes[0])
            return len(by_name) or sum(replica.node == found_nodes[0] for replica in self._replicas.values())

    def resume(self, node: str) -> bool:
        """Use a drained node again."""
        with self._lock:
            resumed = [node_id for node_id in self._drained_nodes if node_id.startswith(node)]
            self._drained_nodes.difference_update(resumed)
            return bool(resumed)

    def end(self) -> None:
        """Drain the gateways, then end everything but this actor. ``status`` shows when nothing is left."""
        with self._lock:
            self._is_ending = True
            self._gateways.drain()

    # the loop

    def _find_actors(self, raw: bytes) -> None:
        """At the first start there are none. After a restart, gateways' actors have kept what the last one knew."""
        name, engines = self._deployment.name, {}
        self._gateways = GatewayGroup(self._deployment, raw, (GatewayActor, ProxyActor))
        if (persisted := self._gateways.persisted()) is not None:
            self._deployment, engines, self._drained_nodes = (
                persisted.deployment,
                persisted.engines,
                set(persisted.drained_nodes),
            )
        for actor_name in cluster.actor_names(f"{name}/replica-"):
            actor = cluster.get_actor(actor_name)
            role, version, number = parse_replica_name(actor_name)
            if actor is not None:
                process = ProcessStatus("starting", engines.get(actor_name, ""))
                self._replicas[actor_name] = _Replica(actor_name, role, version, PolledActor(actor), process=process)
                self._next_number = max(self._next_number, number + 1)

    def _set_limits(self) -> None:
        """Those of the deployment, in the order of its roles."""
        old, self._autoscalers = self._autoscalers, {}
        for group in self._deployment.groups:
            running = sum(replica.role == group.role for replica in self._replicas.values())
            scaler = old.get(group.role) or Autoscaler(self._deployment, group, running)
            scaler.change(self._deployment, group)
            self._autoscalers[group.role] = scaler

    def _run(self) -> None:
        while True:
            begin_s = time.monotonic()
            try:
                with self._lock:
                    self._tick(begin_s)
            except Exception:  # of Ray, whose head may be away: the next tick tries again
                logger.exception("the controller failed to look after its replicas")
            time.sleep(TICK_S)

    def _tick(self, now_s: float) -> None:
        self._poll()
        if self._is_ending:
            self._end_step()
            return
        engines = {replica.name: _address(replica) for replica in self._replicas.values() if _address(replica)}
        self._gateways.use(Persisted(self._deployment, engines, sorted(self._drained_nodes)))
        self._remove_ended()
        for view in self._views():
            if view.role in self._autoscalers:
                serving = sum(replica.takes_requests and not replica.is_draining for replica in view.replicas)
                self._autoscalers[view.role].update(self._gateways.load(view.role), now_s, serving)
        self._change()

    def _poll(self) -> None:
        self._gateways.poll()
        for replica in self._replicas.values():
            answer = replica.polled.poll()
            if answer is not None:
                replica.node, replica.process = answer[0], unpack(answer[1], ProcessStatus)
                replica.is_draining |= replica.process.state in ("draining", "stopped")

    def _remove_ended(self) -> None:
        for replica in list(self._replicas.values()):
            if replica.is_draining and (replica.process.state == "stopped" or replica.polled.is_lost):
                cluster.end_actor(replica.name, replica.polled.actor)
                del self._replicas[replica.name]
                logger.info("%s has ended", replica.short_name)
                for remaining in self._replicas.values():
                    remaining.waits_since_s = time.monotonic()

    def _change(self) -> None:
        nodes, bundle = cluster.nodes(without=self._drained_nodes), self._deployment.bundle
        used = [(replica.node, replica.role) for replica in self._replicas.values()]
        groups = self._views()
        for view in (view for group in groups for view in group.replicas):
            self._replicas[view.replica].no_room = why_no_room(nodes, bundle) if view.is_stuck else ""
        most = sum(group.missing + 1 for group in groups)
        room = sum(node is not None for node in place_replicas(nodes, bundle, [NORMAL] * most, used))
        changes = group_changes(groups, room)
        roles = [role for role, change in changes.items() for _ in range(change.start)]
        for role, node in zip(roles, place_replicas(nodes, bundle, roles, used), strict=True):
            if node is not None or not self._drained_nodes:  # Ray could choose a drained node
                self._start(role, node)
        for name in (name for change in changes.values() for name in change.drain):
            self._replicas[name].is_draining = True
            self._replicas[name].polled.actor.drain.remote()
            logger.info("%s drains", self._replicas[name].short_name)

    def _views(self) -> list[GroupView]:
        """Wanted roles first, then those that are left from an earlier deployment."""
        taking = set(self._gateways.status().taking)
        roles = dict.fromkeys((*self._autoscalers, *(replica.role for replica in self._replicas.values())))
        views = []
        for role in roles:
            wanted = self._autoscalers[role].wanted if role in self._autoscalers else 0
            replicas = [self._view(replica, taking) for replica in self._replicas.values() if replica.role == role]
            views.append(GroupView(role, wanted, replicas))
        return views

    def _view(self, replica: _Replica, taking: set[str]) -> ReplicaView:
        is_wanted = replica.role in self._autoscalers
        must_leave = replica.must_leave or replica.node in self._drained_nodes or not is_wanted
        is_current = replica.version == self._deployment.version and not must_leave
        is_late = not replica.node and time.monotonic() - replica.waits_since_s > STUCK_S
        is_stuck = is_late and not cluster.is_placed(replica.name)
        return ReplicaView(replica.name, is_current, _address(replica) in taking, replica.is_draining, is_stuck)

    def _start(self, role: str, node: str | None) -> None:
        deployment = self._deployment
        name = f"{deployment.name}/{replica_name(role, deployment.version, self._next_number)}"
        self._next_number += 1
        actor = cluster.start_replica(ReplicaActor, name, (pack(deployment), role), deployment.bundle, node)
        self._replicas[name] = _Replica(
            name, role, deployment.version, PolledActor(actor), waits_since_s=time.monotonic()
        )
        logger.info("%s starts", name)

    def _end_step(self) -> None:
        """Replicas end after the gateways, which finish their requests."""
        if not self._gateways.have_ended():
            return
        for replica in self._replicas.values():
            cluster.end_actor(replica.name, replica.polled.actor)
        self._replicas.clear()


def _address(replica: _Replica) -> str:
    """Where its engine listens. A lost one may still serve: the gateway itself knows better than Ray."""
    return replica.process.address if replica.process.state != "stopped" else ""


def _shown(replica: _Replica) -> ProcessStatus:
    if replica.polled.is_lost:
        return msgspec.structs.replace(replica.process, state="lost", reason="Ray restarts it")
    if replica.no_room:
        return msgspec.structs.replace(replica.process, reason=replica.no_room)
    return replica.process


def new_version(old: Deployment, new: Deployment) -> Deployment:
    """Keeps the keys. The version changes with what replicas are made of."""
    same: tuple[Any, Any] = (old.engine_flags, old.bundle)
    is_same = same == (new.engine_flags, new.bundle)
    return msgspec.structs.replace(new, keys=old.keys, version=old.version if is_same else old.version + 1)
