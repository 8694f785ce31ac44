"""What ``lightserve deploy``, ``status``, ``drain`` and ``undeploy`` do, from any machine that reaches the cluster."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lightserve.errors import OptionError, ServerError
from lightserve.ipc.process import EXIT_CONFIG_ERROR
from lightserve.links.keys import generate
from lightserve.ray import cluster
from lightserve.ray.controller import Controller, new_version
from lightserve.ray.messages import Deployment, DeploymentStatus, pack, unpack
from lightserve.ray.placement import Node, place_gateways, plan_lines

WAIT_S = 0.25
# these decide what a token is: two replicas that differ in one of them cannot serve together
SAME_IN_ALL = (
    "model_dir",
    "data_type",
    "kv_dtype",
    "quantization",
    "quantization_config",
    "merge_lora",
    "max_req_total_len",
    "load_format",
)


class CannotStartError(ServerError):
    """The operator must change a flag, a file or a port."""


def controller_of(name: str) -> Any:
    controller = cluster.get_actor(f"{name}/controller")
    if controller is None:
        raise ServerError(
            f"there is no deployment {name!r} in this Ray cluster; `lightserve deploy` makes one (--name)"
        )
    return controller


def status(name: str) -> DeploymentStatus:
    return unpack(cluster.call(controller_of(name).status.remote()), DeploymentStatus)


def owner_of(name: str) -> str | None:
    controller = cluster.get_actor(f"{name}/controller")
    return None if controller is None else unpack(cluster.call(controller.deployment.remote()), Deployment).owner


def apply(deployment: Deployment) -> bool:
    """Make a new deployment, or change the one of this name. Returns whether it is new."""
    controller = cluster.get_actor(f"{deployment.name}/controller")
    if controller is None:
        made = msgspec.structs.replace(deployment, keys=_new_keys())
        cluster.call(cluster.start_controller(Controller, made.name, pack(made)).status.remote())
        return True
    old = unpack(cluster.call(controller.deployment.remote()), Deployment)
    check_change(old, deployment)
    cluster.call(controller.apply.remote(pack(new_version(old, deployment))))
    return False


def check_change(old: Deployment, new: Deployment) -> None:
    """Refuse what cannot change while it serves."""
    for name in SAME_IN_ALL:
        values = old.engine_flags.get(name), new.engine_flags.get(name)
        if values[0] != values[1]:
            conflict = f"deployment {old.name!r} has {name}={values[0]}, not {values[1]}"
            raise OptionError(
                f"{conflict}: replicas of both cannot serve together; undeploy it, or choose another --name"
            )
    if old.num_gateways != new.num_gateways:
        conflict = f"deployment {old.name!r} has gateways={old.num_gateways}, not {new.num_gateways}"
        raise OptionError(f"{conflict}: their number cannot change while they serve; undeploy it first")
    if old.gateway_flags != new.gateway_flags:
        names = sorted(set(old.gateway_flags) | set(new.gateway_flags))
        changed = [flag for flag in names if old.gateway_flags.get(flag) != new.gateway_flags.get(flag)]
        raise OptionError(
            f"deployment {old.name!r} has other values of {', '.join(changed)}: these belong to the gateway, which is "
            "not replaced while it serves; undeploy it first"
        )


def _new_keys() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return {path.name: path.read_bytes() for path in generate(Path(folder) / "keys")}


def wait_until_serving(name: str, timeout_s: float, show: Callable[[str], None]) -> DeploymentStatus:
    """Until as many replicas as wanted have the newest flags and take requests. Raises a ServerError."""
    end_s, shown = time.monotonic() + timeout_s, ""
    while True:
        deployment = status(name)
        current = deployment.current
        are_serving = all(deployment.serving(group.role) >= group.wanted for group in deployment.groups)
        processes = [deployment.gateway.process, *(gateway.process for gateway in deployment.gateways)]
        is_up = all(process.state == "serving" for process in processes) and all(
            gateway.taking for gateway in deployment.gateways
        )
        if is_up and are_serving and len(deployment.replicas) == len(current):
            return deployment
        failed = [replica for replica in current if replica.process.state == "failed"]
        for replica in failed:
            if replica.process.exit_code == EXIT_CONFIG_ERROR and not deployment.serving(replica.role):
                raise CannotStartError(f"replicas do not start: {replica.process.reason}")
        for process in processes:
            if process.exit_code == EXIT_CONFIG_ERROR and process.state == "failed":
                raise CannotStartError(f"the gateway does not start: {process.reason}")
        line = deployment.progress()
        if line != shown:
            show(line)
            shown = line
        if time.monotonic() > end_s:
            reasons = "; ".join(replica.process.reason for replica in failed)
            raise ServerError(
                f"after {timeout_s:g} s {line}{f' ({reasons})' if reasons else ''}; see lightserve status"
            )
        time.sleep(WAIT_S)


def drain(name: str, target: str) -> int:
    count: int = cluster.call(controller_of(name).drain.remote(target))
    if count < 0:
        raise OptionError(f"{target!r} is neither a replica nor the beginning of a node's id; see lightserve status")
    return count


def resume(name: str, node: str) -> None:
    if not cluster.call(controller_of(name).resume.remote(node)):
        raise OptionError(f"node {node!r} is not drained; see lightserve status")


def undeploy(name: str, timeout_s: float) -> None:
    """Let running requests finish, then end all."""
    controller = controller_of(name)
    cluster.call(controller.end.remote())
    end_s = time.monotonic() + timeout_s
    while unpack(cluster.call(controller.status.remote()), DeploymentStatus).replicas and time.monotonic() < end_s:
        time.sleep(WAIT_S)
    # the controller before replicas: it would start new ones
    for prefix in ("proxy", "gateway", "controller", "replica-"):
        for left in cluster.actor_names(f"{name}/{prefix}"):
            actor = cluster.get_actor(left)
            if actor is not None:
                cluster.end_actor(left, actor)


def dry_run(nodes: list[Node], deployment: Deployment) -> list[str]:
    lines = [f"gateway: head node, {_url(deployment)}"]
    if deployment.num_gateways > 1:
        places = enumerate(place_gateways(nodes, deployment.num_gateways))
        lines = [f"HAProxy: head node, {_url(deployment)}"]
        lines += [f"gateway {number}: {f'node {node[:8]}' if node else 'head node'}" for number, node in places]
    roles = [group.role for group in deployment.groups for _ in range(group.min_replicas)]
    return [*lines, *plan_lines(nodes, deployment.bundle, roles)]


def _url(deployment: Deployment) -> str:
    flags = deployment.gateway_flags
    return f"{flags.get('host', '127.0.0.1')}, port {flags.get('port', 8000)}"
