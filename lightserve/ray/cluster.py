"""Ray's interface as far as this package uses it: connect, nodes, named actors, placement groups."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from lightserve.errors import OptionError, ServerError
from lightserve.ray.placement import HEAD_RESOURCE, Node
from lightserve.utils.extras import install_command

try:
    import ray
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise OptionError(f"this command needs Ray; install it with: {install_command('ray')}") from error

NAMESPACE = "lightserve"
HEAD = {HEAD_RESOURCE: 0.001}
FOREVER: dict[str, Any] = {"namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
GATEWAY_BYTES = 1  # reserved for a gateway: every node has memory, and a placement group must reserve something
CALL_S = 60.0  # until an actor must have answered a command


def connect(address: str) -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ServerError(
            f"no Ray cluster at {address!r} ({reason}); start one with `ray start --head`, or set --ray_address"
        ) from error


def warning(cluster_nodes: Sequence[Node]) -> str:
    """What the operator of several machines should know; "": nothing."""
    if os.environ.get("RAY_AUTH_MODE") == "token" or len({node.name for node in cluster_nodes}) < 2:
        return ""
    return "who reaches Ray's ports can run code on all nodes; set RAY_AUTH_MODE=token, and see SECURITY.md"


def nodes(without: Iterable[str] = ()) -> list[Node]:
    """Nodes that are alive, with what is free there."""
    free = ray._private.state.available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in set(without)]
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], free.get(node["NodeID"], {}), node["Resources"])
        for node in alive
    ]


def get_actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def actor_names(prefix: str) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in named if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)]


def start_controller(controller: type, name: str, *args: Any) -> Any:
    """On the head node: it needs no resource, and nothing of a request passes through it."""
    options = FOREVER | {"resources": HEAD, "max_concurrency": 8}
    return ray.remote(controller).options(name=f"{name}/controller", **options).remote(*args)


def gateway_names(name: str, count: int) -> list[str]:
    return [f"{name}/gateway{f'-{number}' if number else ''}" for number in range(count)]


def start_gateway(gateway: type, name: str, raw: bytes, node: str | None) -> Any:
    """On ``node``, or elsewhere when that is lost; None: on the head node.

    A soft affinity to the node is not enough: any node may place an actor, and one that has not heard of ``node`` yet
    takes another. Placement groups are placed by the head, which knows all nodes.
    """
    options = FOREVER | {"max_concurrency": 4}
    if node is None:
        options["resources"] = HEAD
    else:
        options |= {"memory": GATEWAY_BYTES, "scheduling_strategy": _on_node(name, {"memory": GATEWAY_BYTES}, node)}
    return ray.remote(gateway).options(name=name, **options).remote(raw)


def start_proxy(proxy: type, name: str, raw: bytes) -> Any:
    options = FOREVER | {"resources": HEAD, "max_concurrency": 4}
    return ray.remote(proxy).options(name=f"{name}/proxy", **options).remote(raw)


def start_replica(replica: type, name: str, args: tuple[bytes, str], bundle: dict[str, float], node: str | None) -> Any:
    """An actor with a placement group of its own, on ``node`` if it still has room. Both have the same name."""
    options = FOREVER | {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "max_concurrency": 4,
        "scheduling_strategy": _on_node(name, bundle, node),
    }
    return ray.remote(replica).options(name=name, **options).remote(*args)


def _on_node(name: str, bundle: dict[str, float], node: str | None) -> PlacementGroupSchedulingStrategy:
    group = ray.util.placement_group(
        [bundle], strategy="STRICT_PACK", name=name, lifetime="detached", _soft_target_node_id=node
    )
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)


def end_actor(name: str, actor: Any) -> None:
    """With its placement group, if it has one."""
    ray.kill(actor)
    for group_id, group in ray.util.placement_group_table().items():  # by name Ray finds those of one namespace only
        if group["name"] == name and group["state"] != "REMOVED":
            ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))


def is_placed(name: str) -> bool:
    """Whether the placement group of a replica has its resources."""
    groups = ray.util.placement_group_table().values()
    return any(group["name"] == name and group["state"] == "CREATED" for group in groups)


def call(ref: Any, timeout_s: float = CALL_S) -> Any:
    """The result of an actor's method. Raises a ServerError if it does not come."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except (ray.exceptions.RayError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ServerError(f"an actor in the Ray cluster does not answer: {reason}") from error
