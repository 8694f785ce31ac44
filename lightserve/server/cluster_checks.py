"""Checks of a gateway (--engines) and of an engine (--listen): each has a part of a server's flags."""

from __future__ import annotations

from importlib.util import find_spec

from lightserve.config import ClusterConfig, ServerConfig
from lightserve.errors import OptionError, ServerError
from lightserve.links.engines_file import read_engines_file
from lightserve.links.keys import read_engine_keys, read_gateway_keys, read_node_key
from lightserve.links.kv_secret import read_kv_certificate, read_kv_secret
from lightserve.utils import net
from lightserve.utils.extras import install_command
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)


def check_cluster(config: ServerConfig) -> None:
    cluster = config.cluster
    if not cluster.has_dispatcher and cluster.cluster_policy != "prefix":
        raise OptionError(f"cluster_policy={cluster.cluster_policy}: there is one engine; set --dp to 2 or more")
    if not cluster.has_dispatcher and cluster.min_remote_prefill_tokens != ClusterConfig().min_remote_prefill_tokens:
        raise OptionError(
            f"min_remote_prefill_tokens={cluster.min_remote_prefill_tokens}: "
            "set it where requests are divided, with --roles or --engines"
        )
    _check_kv_flags(cluster)
    if config.cluster.is_gateway:
        _check_gateway(config)
    elif config.cluster.listen is not None:
        if config.cluster.is_disaggregated:
            _check_kv(config)
        if not config.is_other_node:
            _check_engine(config)


def _check_kv_flags(cluster: ClusterConfig) -> None:
    """Of roles, and of the way of KV between engines."""
    if cluster.role != "normal" and cluster.listen is None:
        remedy = "use --roles" if cluster.dp > 1 else "start `lightserve engine --listen`, or use --dp and --roles"
        raise OptionError(f"role={cluster.role}: for an engine of a gateway; {remedy}")
    if cluster.kv_transport != "sockets":
        _check_transport(cluster)
    if cluster.cluster_tls and cluster.role == "normal":
        raise OptionError("cluster_tls: it encrypts KV between machines, and needs --role; other links always are")


def _check_transport(cluster: ClusterConfig) -> None:
    name = cluster.kv_transport
    if not cluster.is_disaggregated:
        raise OptionError(f"kv_transport={name}: engines without roles send no KV; set --roles or --role")
    is_local = (cluster.kv_listen or "").startswith("unix://")
    if cluster.role == "decode" and not is_local and not cluster.cluster_tls:
        raise OptionError(f"kv_transport={name}: engines tell each other where to read over TLS; set --cluster_tls")
    if find_spec(name) is None:  # both packages are called like their transport
        raise OptionError(f"kv_transport={name}: it is not installed; run: {install_command(name)}")


def check_nodes(config: ServerConfig) -> None:
    """Node 0 must be able to listen, and all nodes need the key."""
    cluster = config.cluster
    if cluster.nnodes > 1 and cluster.roles:
        raise OptionError("roles: KV of --dp stays on one node; start engines with --listen and --role")
    if cluster.nnodes == 1:
        if cluster.master_addr is not None:  # LightLLM takes it on one machine too
            logger.warning("master_addr=%s has no effect: there is one node (--nnodes)", cluster.master_addr)
        return
    read_node_key(cluster.cluster_keys or "")
    host, port = cluster.master_addr or "", cluster.master_port
    try:
        net.interface_to(host)
        if cluster.node_rank == 0:
            net.bind(host, port).close()
    except ServerError as error:
        address = f"master_addr={host}, master_port={port}"
        cause = getattr(error.__cause__, "strerror", None) or error
        role = "node 0 cannot listen there" if cluster.node_rank == 0 else "node 0 cannot be reached there"
        raise OptionError(f"{address}: {role} ({cause}); use an address of node 0 that all nodes reach") from error
    if config.worker.attention_tp > config.ranks_per_node and cluster.node_rank == 0:
        logger.warning(
            "tp=%d: %d of these ranks are on each node, and every layer waits for the network twice; "
            "--pp %d --tp %d keeps them together",
            *(config.worker.tp, config.ranks_per_node, cluster.nnodes, config.ranks_per_node),
        )


def _check_gateway(config: ServerConfig) -> None:
    keys = read_gateway_keys(config.cluster.cluster_keys or "")
    path = config.cluster.engines_file
    for address in config.cluster.engine_addresses if path is None else read_engines_file(path):
        if keys.key_of(address) is None:
            raise OptionError(f"engines: {config.cluster.cluster_keys}/engines.allowed has no key for {address}")


def _check_kv(config: ServerConfig) -> None:
    """Of every node of an engine with a role."""
    cluster = config.cluster
    read_kv_secret(cluster.cluster_keys or "")
    if cluster.cluster_tls:
        read_kv_certificate(cluster.cluster_keys or "")
    if cluster.kv_listen is None or cluster.kv_listen.startswith("unix://"):
        return
    host, _ = net.parse_tcp(cluster.kv_listen)
    try:
        net.bind(host, 0).close()
    except ServerError as error:
        cause = getattr(error.__cause__, "strerror", None) or error
        remedy = "; each node has a --kv_listen of its own, or none" if cluster.nnodes > 1 else ""
        raise OptionError(
            f"kv_listen={cluster.kv_listen}: this machine cannot listen there ({cause}){remedy}"
        ) from error


def _check_engine(config: ServerConfig) -> None:
    read_engine_keys(config.cluster.cluster_keys or "")
    try:
        net.bind(*net.parse_tcp(config.cluster.listen or "")).close()
    except ServerError as error:
        cause = getattr(error.__cause__, "strerror", None) or error
        raise OptionError(f"listen={config.cluster.listen}: this engine cannot listen there ({cause})") from error
