"""The nodes process of node 0: it connects launcher and router with the ranks of other nodes (--nnodes)."""

from __future__ import annotations

import asyncio
import socket

import zmq
from zmq.utils import z85

from lightserve.cluster.nodes.first_node import FirstNode
from lightserve.cluster.nodes.properties import node_properties
from lightserve.ipc.process import ChildConfig, LauncherConnection, run_child
from lightserve.links.curve import AllowedKeys, RateLimitedLog, first_node_socket, log_failed_handshakes
from lightserve.links.keys import NODE_SECRET, read_node_key
from lightserve.messages.control import Ready
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)
STRANGER = f"it has another {NODE_SECRET}, or is no node of LightServe"


async def main(child_config: ChildConfig, launcher: LauncherConnection) -> None:
    cluster = child_config.config.cluster
    secret = read_node_key(cluster.cluster_keys or "")
    log = RateLimitedLog(logger)
    allowed_keys = AllowedKeys(frozenset([z85.decode(zmq.curve_public(secret))]), log, NODE_SECRET)
    from_nodes = first_node_socket(cluster.master_addr or "", cluster.master_port, secret)
    ranks = socket.socket(fileno=child_config.listen_fd)
    ranks.setblocking(False)
    first_node = FirstNode(child_config, from_nodes, ranks, node_properties(child_config.config))
    launcher.send(Ready())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(allowed_keys.run())
        tasks.create_task(log_failed_handshakes(from_nodes, log, STRANGER))
        tasks.create_task(first_node.run())


if __name__ == "__main__":
    run_child("nodes", main)
