"""The gateways of a deployment and HAProxy in front of them, as the controller sees them.

One gateway needs no HAProxy. The first one is on the head node, as HAProxy is, the others on other nodes.
"""

from __future__ import annotations

from lightserve.errors import ServerError
from lightserve.ray import cluster
from lightserve.ray.gateway_load import taken_by_all, total_by_role, total_load, url_for_proxy
from lightserve.ray.messages import (
    NORMAL,
    Deployment,
    GatewayStatus,
    GatewayUrls,
    Load,
    Persisted,
    ProcessStatus,
    pack,
    unpack,
)
from lightserve.ray.placement import place_gateways
from lightserve.ray.polled_actor import PolledActor

KEPT_S = 20.0  # until an actor must have answered
STARTING = ProcessStatus("starting")


class GatewayGroup:
    """Finds the actors, or starts them: ``classes`` are those of a gateway and of the proxy."""

    def __init__(self, deployment: Deployment, raw: bytes, classes: tuple[type, type]) -> None:
        names = cluster.gateway_names(deployment.name, deployment.num_gateways)
        actors = [cluster.get_actor(name) for name in names]
        places = place_gateways(cluster.nodes(), len(names))
        self._were_there = [actor for actor in actors if actor is not None]
        self._gateways = [
            PolledActor(actor or cluster.start_gateway(classes[0], name, raw, node))
            for name, actor, node in zip(names, actors, places, strict=True)
        ]
        self.statuses = [GatewayStatus(STARTING)] * len(names)
        self._proxy: PolledActor | None = None
        self._proxy_process = STARTING
        if len(names) > 1:
            proxy = cluster.get_actor(f"{deployment.name}/proxy")
            self._proxy = PolledActor(proxy or cluster.start_proxy(classes[1], deployment.name, raw))

    def persisted(self) -> Persisted | None:
        """What the last controller knew. A gateway's actor that was restarted meanwhile knows less than the others."""
        asked = [actor.persisted.remote() for actor in self._were_there]
        answers = []
        for ref in asked:
            try:
                answers.append(unpack(cluster.call(ref, KEPT_S), Persisted))
            except ServerError:  # its node is lost
                if ref is asked[-1] and not answers:
                    raise
        return max(answers, key=lambda persisted: (persisted.deployment.version, len(persisted.engines)), default=None)

    def poll(self) -> None:
        for number, gateway in enumerate(self._gateways):
            raw = gateway.poll()
            if raw is not None:
                self.statuses[number] = unpack(raw, GatewayStatus)
        if self._proxy is not None:
            raw = self._proxy.poll()
            if raw is not None:
                self._proxy_process = unpack(raw, ProcessStatus)
            self._proxy.actor.use.remote(pack(GatewayUrls([url_for_proxy(status) for status in self.statuses])))

    def use(self, persisted: Persisted) -> None:
        raw = pack(persisted)
        for gateway in self._gateways:
            gateway.actor.use.remote(raw)

    def drain(self) -> None:
        for gateway in self._gateways:
            gateway.actor.drain.remote()

    def have_ended(self) -> bool:
        """After ``drain``."""
        pairs = zip(self._gateways, self.statuses, strict=True)
        return all(gateway.is_lost or status.process.state == "stopped" for gateway, status in pairs)

    def status(self) -> GatewayStatus:
        """Of all together."""
        if self._proxy is None:
            return self.statuses[0]
        taking, by_role = taken_by_all(self.statuses), total_by_role(self.statuses)
        return GatewayStatus(self._proxy_process, total_load(self.statuses), taking, by_role=by_role)

    def load(self, role: str) -> Load:
        """Of the replicas of a role. Without roles, requests that wait for any replica are counted too."""
        status = self.status()
        return status.load if role == NORMAL and set(status.by_role) <= {NORMAL} else status.by_role.get(role, Load())
