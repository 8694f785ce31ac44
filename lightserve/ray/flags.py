"""The flags of ``lightserve deploy``: its own, those of engines and those of the gateway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from lightserve.config import ROLES, ClusterConfig, HttpConfig, Role, ServerConfig, missing_role
from lightserve.config.commands import (
    ENGINE_HTTP,
    GATEWAY_LAUNCH,
    GATEWAY_ROUTER,
    GATEWAY_WORKER,
    OF_ADAPTERS,
    SET_BY_DEPLOY,
)
from lightserve.config.option import changed_options
from lightserve.errors import OptionError
from lightserve.ray.messages import Deployment, ReplicaGroup
from lightserve.ray.placement import Node
from lightserve.server.keys import with_keys
from lightserve.utils.net import is_local

MAX_GATEWAYS = 64
OF_ROLES = ("roles", "role", "kv_listen")  # of SET_BY_DEPLOY; --roles of deploy is another flag than a server's
ENGINE_KV = ("cluster_tls", "kv_transport")
GATEWAY_CLUSTER = ("cluster_policy", "min_remote_prefill_tokens")
KEY_FILES = ("api_key_file", "admin_key_file")  # their keys go to the gateway's node, not the files


def parse_replicas(text: str) -> tuple[int, int]:
    """``3`` or ``MIN:MAX``."""
    return parse_count("replicas", text)


def parse_count(name: str, text: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) > 2 or not all(number.isdecimal() for number in parts):
        raise OptionError(f"{name}={text!r}: must be a number, or MIN:MAX as 2:8")
    least, most = int(parts[0]), int(parts[-1])
    if not 1 <= least <= most:
        raise OptionError(f"{name}={text!r}: must be at least 1, and MIN not above MAX")
    return least, most


def parse_roles(text: str) -> list[ReplicaGroup]:
    """``prefill=1:2,decode=2:4``: what --replicas says, for each role."""
    groups: list[ReplicaGroup] = []
    for entry in text.split(","):
        role, equals, count = (piece.strip() for piece in entry.partition("="))
        if not equals:
            raise OptionError(f"roles={text!r}: {entry.strip()!r} has no number; write prefill=1:2,decode=2:4")
        if role not in ROLES:
            raise OptionError(f"roles={text!r}: {role!r} is none; a role is one of {', '.join(ROLES)}")
        if role in (group.role for group in groups):
            raise OptionError(f"roles={text!r}: {role} is there twice")
        groups.append(ReplicaGroup(*parse_count(f"roles={text!r}: {role}", count), role))
    if missing := missing_role([group.role for group in groups]):
        raise OptionError(
            f"roles={text!r}: no replica is {missing}, so no KV would be sent; use --replicas without roles"
        )
    return groups


def engine_flags(config: ServerConfig) -> dict[str, Any]:
    return {
        **_set(config.worker),
        **_set(config.router),
        **_set(config.launch),
        **_set(config.http, ENGINE_HTTP),
        **_set(config.cluster, ENGINE_KV),
    }


def gateway_flags(config: ServerConfig) -> dict[str, Any]:
    """With the API keys of this machine's files and environment."""
    http = _set(with_keys(config).http)
    http = {name: value for name, value in http.items() if name not in KEY_FILES and name != "weights_dir"}
    return {
        **http,
        **_set(config.worker, GATEWAY_WORKER),
        **_set(config.router, GATEWAY_ROUTER),
        **_set(config.launch, GATEWAY_LAUNCH),
        **_set(config.cluster, GATEWAY_CLUSTER),
    }


def proxied_hosts(http: HttpConfig) -> dict[str, Any]:
    """The names in Host that gateways allow behind the proxy: it is reached at --host, they are on other addresses."""
    by_default = ["localhost"] if is_local(http.host) else ["*"]
    return {"allowed_hosts": http.allowed_hosts or by_default}


def _set(options: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The options that differ from their defaults, of ``names`` only."""
    return {name: value for name, value in changed_options(options).items() if names is None or name in names}


def _check_replica(config: ServerConfig, role: Role) -> None:
    """Refuse features that exclude each other here, and not on the node of a replica that is started with them."""
    cluster = ClusterConfig(listen="tcp://node:1", cluster_keys="", role=role, **_set(config.cluster, ENGINE_KV))
    replace(config, http=HttpConfig(**_set(config.http, ENGINE_HTTP)), cluster=cluster)  # it reads the table


def check(config: ServerConfig, has_roles: bool) -> None:
    given = _set(config.cluster)
    for name in SET_BY_DEPLOY:
        if name in given:
            flag = "--roles prefill=1,decode=2" if name in OF_ROLES else "--replicas"
            raise OptionError(f"{name}: not with lightserve deploy, which sets it; use {flag}")
    for name in (*ENGINE_KV, "min_remote_prefill_tokens"):
        if name in given and not has_roles:
            raise OptionError(f"{name}: replicas without roles send no KV; set --roles prefill=1,decode=2 too")
    for name in _set(config.worker, OF_ADAPTERS):
        raise OptionError(f"{name}: lightserve deploy places no adapters on nodes; use --engines with a gateway")
    transport = config.cluster.kv_transport
    if transport != "sockets" and not config.cluster.cluster_tls:
        raise OptionError(
            f"kv_transport={transport}: replicas tell each other where to read over TLS; set --cluster_tls"
        )
    _check_replica(config, "prefill" if has_roles else "normal")
    if config.http.ssl_ca_certs is not None:
        raise OptionError("ssl_ca_certs: lightserve deploy has no client certificate for the gateway's metrics")


def bundle_of(config: ServerConfig, nodes: Sequence[Node], cpus: float | None) -> dict[str, float]:
    """The resources of a replica. It computes on GPUs if the cluster has any and --device does not say cpu."""
    ranks = config.worker.tp * getattr(config.worker, "pp", 1)
    has_gpus = any(node.total.get("GPU") for node in nodes) and config.worker.device != "cpu"
    if has_gpus:
        return {"GPU": float(ranks), "CPU": 1.0 if cpus is None else cpus}
    return {"CPU": float(ranks) if cpus is None else cpus}


def make_deployment(
    config: ServerConfig, name: str, replicas: str | None, gateways: int = 1, roles: str | None = None
) -> Deployment:
    if replicas is not None and roles is not None:
        raise OptionError("replicas and roles exclude each other: --roles has the numbers of replicas too")
    check(config, roles is not None)
    if not 1 <= gateways <= MAX_GATEWAYS:
        raise OptionError(f"gateways={gateways}: must be at least 1 and at most {MAX_GATEWAYS}")
    if not name or "/" in name:
        raise OptionError(f"name={name!r}: must not be empty and must not have a /")
    same = [ReplicaGroup(*parse_replicas("1" if replicas is None else replicas))]
    groups = same if roles is None else parse_roles(roles)
    flags = gateway_flags(config) | (proxied_hosts(config.http) if gateways > 1 else {})
    return Deployment(name, 1, engine_flags(config), flags, {}, {}, groups, num_gateways=gateways)


def with_resources(deployment: Deployment, bundle: dict[str, float]) -> Deployment:
    return msgspec.structs.replace(deployment, bundle=bundle)


def with_scaling(deployment: Deployment, target_queue: float, scale_down_s: float) -> Deployment:
    if target_queue <= 0 or scale_down_s < 0:
        raise OptionError("target_queue must be above 0, and scale_down_s at least 0")
    return msgspec.structs.replace(deployment, target_queue=target_queue, scale_down_s=scale_down_s)
