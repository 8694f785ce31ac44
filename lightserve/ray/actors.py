"""The actors on the nodes: a replica keeps an engine running, a gateway an HTTP server, and a proxy HAProxy.

Ray restarts an actor that dies, elsewhere if its node is lost. An actor restarts its own process. When an actor is
killed, the kernel kills its process with it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import ray

from lightserve.cluster.proxy.haproxy_config import ProxySettings
from lightserve.config import HttpConfig, WorkerConfig
from lightserve.links.engines_file import write_engines_file
from lightserve.ray.gateway_metrics import read_metrics
from lightserve.ray.messages import Deployment, GatewayStatus, GatewayUrls, Persisted, pack, unpack
from lightserve.ray.node_folder import (
    free_port,
    free_ports,
    make_folder,
    write_flags,
    write_json,
    write_keys,
)
from lightserve.ray.supervised_process import SupervisedProcess, lightserve_command
from lightserve.utils.net import tcp_address

OF_PROXY = ("host", "port", "ssl_certfile", "ssl_keyfile")  # flags of HAProxy, if there is one


class ReplicaActor:
    def __init__(self, raw: bytes, role: str) -> None:
        deployment = unpack(raw, Deployment)
        self._role = role
        self._kv_ports = num_ranks(deployment) if role == "decode" else 0  # each rank receives KV
        self._folder = make_folder()
        write_keys(self._folder, deployment.keys)
        write_flags(self._folder / "engine.yaml", deployment.engine_flags)
        self._process = SupervisedProcess(self._command)

    def _command(self) -> list[str]:
        host = ray.util.get_node_ip_address()
        flags = ["--config", str(self._folder / "engine.yaml"), "--cluster_keys", str(self._folder)]
        port = free_ports(host, 1 + self._kv_ports)
        flags += ["--role", self._role, "--listen", tcp_address(host, port)]
        if self._kv_ports:
            flags += ["--kv_listen", tcp_address(host, port + 1)]
        return lightserve_command("engine", *flags)

    def status(self) -> tuple[str, bytes]:
        """The node, and the ProcessStatus."""
        return ray.get_runtime_context().get_node_id(), pack(self._process.status())

    def drain(self) -> None:
        self._process.drain()


def num_ranks(deployment: Deployment) -> int:
    """Of one replica."""
    flags = deployment.engine_flags
    return WorkerConfig(**{name: flags[name] for name in ("tp", "pp") if name in flags}).num_ranks


class GatewayActor:
    def __init__(self, raw: bytes) -> None:
        deployment = unpack(raw, Deployment)
        self._persisted = Persisted(deployment)
        self._flags = deployment.gateway_flags
        self._port = 0  # behind HAProxy, which serves HTTPS if clients want it
        if deployment.num_gateways > 1:
            self._flags = {name: value for name, value in self._flags.items() if name not in OF_PROXY}
        self._folder = make_folder()
        self._engines_file: Path = self._folder / "engines"
        write_engines_file(self._engines_file, [])
        write_keys(self._folder, deployment.keys)
        write_flags(self._folder / "gateway.yaml", self._flags)
        self._process = SupervisedProcess(self._command)

    def _command(self) -> list[str]:
        flags = ["--config", str(self._folder / "gateway.yaml"), "--cluster_keys", str(self._folder)]
        if self._persisted.deployment.num_gateways > 1:
            host = ray.util.get_node_ip_address()
            self._port = free_port(host, self._port)
            flags += ["--host", host, "--port", str(self._port)]
        return lightserve_command("serve", *flags, "--engines_file", str(self._engines_file))

    def use(self, raw: bytes) -> None:
        """Use these engines, and keep all of it for a controller that is restarted."""
        persisted = unpack(raw, Persisted)
        if persisted.engines != self._persisted.engines:
            write_engines_file(self._engines_file, list(persisted.engines.values()))
        self._persisted = persisted

    def persisted(self) -> bytes:
        return pack(self._persisted)

    def status(self) -> bytes:
        process, node = self._process.status(), ray.get_runtime_context().get_node_id()
        if process.state not in ("serving", "draining"):
            return pack(GatewayStatus(process, node=node))
        try:
            load, by_role, taking = read_metrics(process.address, self._key(), self._flags.get("ssl_certfile"))
        except OSError:  # it is busy, or has just ended
            return pack(GatewayStatus(process, node=node))
        return pack(GatewayStatus(process, load, taking, node, by_role))

    def drain(self) -> None:
        self._process.drain()

    def _key(self) -> str | None:
        keys = [*self._flags.get("admin_key", []), *self._flags.get("api_key", [])]
        return keys[0] if keys else None


class ProxyActor:
    """HAProxy, in front of the gateways."""

    def __init__(self, raw: bytes) -> None:
        deployment = unpack(raw, Deployment)
        settings = proxy_settings(deployment)
        if not settings.port:  # its restarts keep the port
            settings = msgspec.structs.replace(settings, port=free_port(settings.host))
        self._folder = make_folder()
        self._urls = [""] * deployment.num_gateways
        write_json(self._folder / "proxy.json", msgspec.to_builtins(settings))
        write_json(self._folder / "gateways.json", self._urls)
        self._process = SupervisedProcess(self._command)

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "lightserve.cluster.proxy.main", str(os.getpid()), str(self._folder)]

    def use(self, raw: bytes) -> None:
        """Send requests to these gateways."""
        new_urls = unpack(raw, GatewayUrls).urls
        urls = [old if new is None else new for old, new in zip(self._urls, new_urls, strict=True)]
        if urls != self._urls:
            write_json(self._folder / "gateways.json", urls)
            self._urls = urls

    def status(self) -> bytes:
        return pack(self._process.status())


def proxy_settings(deployment: Deployment) -> ProxySettings:
    flags, default = deployment.gateway_flags, HttpConfig()
    return ProxySettings(
        flags.get("host", default.host),
        flags.get("port", default.port),
        deployment.num_gateways,
        has_keys=bool(flags.get("api_key") or flags.get("admin_key")),
        certfile=flags.get("ssl_certfile"),
        keyfile=flags.get("ssl_keyfile"),
        root_path=flags.get("root_path", ""),
    )
