"""The actors on the nodes: a replica keeps an engine running, a gateway keeps the HTTP server running.

Ray restarts an actor that dies, elsewhere if its node is lost. An actor restarts its own process. When an actor is
killed, the kernel kills its process with it.
"""

from __future__ import annotations

import ssl
import urllib.request
from pathlib import Path

import ray
from prometheus_client.parser import text_string_to_metric_families

from lightserve.cluster.tcp.engines_file import write_engines_file
from lightserve.ray.kept_process import KeptProcess
from lightserve.ray.messages import Deployment, GatewayStatus, Kept, Load, pack, unpack
from lightserve.ray.node_folder import free_port, make_folder, tcp_address, write_flags, write_keys

METRICS_S = 5.0  # until /metrics must have answered


class ReplicaActor:
    def __init__(self, raw: bytes) -> None:
        deployment = unpack(raw, Deployment)
        self._folder = make_folder()
        write_keys(self._folder, deployment.keys)
        write_flags(self._folder / "engine.yaml", deployment.engine_flags)
        self._process = KeptProcess(self._command)

    def _command(self) -> list[str]:
        host = ray.util.get_node_ip_address()
        flags = ["--config", str(self._folder / "engine.yaml"), "--cluster_keys", str(self._folder)]
        return ["engine", *flags, "--listen", tcp_address(host, free_port(host))]

    def status(self) -> tuple[str, bytes]:
        """The node, and the ProcessStatus."""
        return ray.get_runtime_context().get_node_id(), pack(self._process.status())

    def drain(self) -> None:
        self._process.drain()


class GatewayActor:
    def __init__(self, raw: bytes) -> None:
        deployment = unpack(raw, Deployment)
        self._kept = Kept(deployment)
        self._flags = deployment.gateway_flags
        self._folder = make_folder()
        self._engines_file: Path = self._folder / "engines"
        write_engines_file(self._engines_file, [])
        write_keys(self._folder, deployment.keys)
        write_flags(self._folder / "gateway.yaml", deployment.gateway_flags)
        self._process = KeptProcess(self._command)

    def _command(self) -> list[str]:
        flags = ["--config", str(self._folder / "gateway.yaml"), "--cluster_keys", str(self._folder)]
        return ["serve", *flags, "--engines_file", str(self._engines_file)]

    def use(self, raw: bytes) -> None:
        """Use these engines, and keep all of it for a controller that is restarted."""
        kept = unpack(raw, Kept)
        if kept.engines != self._kept.engines:
            write_engines_file(self._engines_file, list(kept.engines.values()))
        self._kept = kept

    def kept(self) -> bytes:
        return pack(self._kept)

    def status(self) -> bytes:
        process = self._process.status()
        if process.state not in ("serving", "draining"):
            return pack(GatewayStatus(process))
        try:
            load, taking = read_metrics(process.address, self._key(), self._flags.get("ssl_certfile"))
        except OSError:  # it is busy, or has just ended
            return pack(GatewayStatus(process))
        return pack(GatewayStatus(process, load, taking))

    def drain(self) -> None:
        self._process.drain()

    def _key(self) -> str | None:
        keys = [*self._flags.get("admin_key", []), *self._flags.get("api_key", [])]
        return keys[0] if keys else None


def read_metrics(url: str, key: str | None, certificate: str | None) -> tuple[Load, list[str]]:
    """The load, and the engines that get requests. Raises OSError."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    context = None if certificate is None else _trusting(certificate)
    request = urllib.request.Request(f"{url}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=METRICS_S, context=context) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    taking = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = sample.value
            if sample.name == "lightserve_engine_takes_requests" and sample.value:
                taking.append(sample.labels["address"])
    running, waiting, kv_usage = (
        found.get(f"lightserve_{name}", 0.0)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )
    return Load(running, waiting, kv_usage), taking


def _trusting(certificate: str) -> ssl.SSLContext:
    """The gateway on this node, which has this certificate. Its name is not that of the node's address."""
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context
