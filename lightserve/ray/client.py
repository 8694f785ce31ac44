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
    found = cluster.get_actor(f"{name}/controller")
    if found is None:
        raise ServerError(
            f"there is no deployment {name!r} in this Ray cluster; `lightserve deploy` makes one (--name)"
        )
    return found


def status(name: str) -> DeploymentStatus:
    return unpack(cluster.call(controller_of(name).status.remote()), DeploymentStatus)


def owner_of(name: str) -> str | None:
    found = cluster.get_actor(f"{name}/controller")
    return None if found is None else unpack(cluster.call(found.deployment.remote()), Deployment).owner


def apply(deployment: Deployment) -> bool:
    """Make a new deployment, or change the one of this name. Returns whether it is new."""
    found = cluster.get_actor(f"{deployment.name}/controller")
    if found is None:
        made = msgspec.structs.replace(deployment, keys=_new_keys())
        cluster.call(cluster.start_controller(Controller, made.name, pack(made)).status.remote())
        return True
    old = unpack(cluster.call(found.deployment.remote()), Deployment)
    check_change(old, deployment)
    cluster.call(found.apply.remote(pack(new_version(old, deployment))))
    return False


def check_change(old: Deployment, new: Deployment) -> None:
    """Refuse what cannot change while it serves."""
    for name in SAME_IN_ALL:
        values = old.engine_flags.get(name), new.engine_flags.get(name)
        if values[0] != values[1]:
            found = f"deployment {old.name!r} has {name}={values[0]}, not {values[1]}"
            raise OptionError(f"{found}: replicas of both cannot serve together; undeploy it, or choose another --name")
    if old.num_gateways != new.num_gateways:
        found = f"deployment {old.name!r} has gateways={old.num_gateways}, not {new.num_gateways}"
        raise OptionError(f"{found}: their number cannot change while they serve; undeploy it first")
    if old.gateway_flags != new.gateway_flags:
        names = sorted(set(old.gateway_flags) | set(new.gateway_flags))
        changed = [one for one in names if old.gateway_flags.get(one) != new.gateway_flags.get(one)]
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
        found = status(name)
        current = found.current
        are_serving = all(found.serving(group.role) >= group.wanted for group in found.groups)
        processes = [found.gateway.process, *(one.process for one in found.gateways)]
        is_up = all(one.state == "serving" for one in processes) and all(one.taking for one in found.gateways)
        if is_up and are_serving and len(found.replicas) == len(current):
            return found
        failed = [one for one in current if one.process.state == "failed"]
        for one in failed:
            if one.process.exit_code == EXIT_CONFIG_ERROR and not found.serving(one.role):
                raise CannotStartError(f"replicas do not start: {one.process.reason}")
        for process in processes:
            if process.exit_code == EXIT_CONFIG_ERROR and process.state == "failed":
                raise CannotStartError(f"the gateway does not start: {process.reason}")
        line = found.progress()
        if line != shown:
            show(line)
            shown = line
        if time.monotonic() > end_s:
            reasons = "; ".join(one.process.reason for one in failed)
            raise ServerError(
                f"after {timeout_s:g} s {line}{f' ({reasons})' if reasons else ''}; see lightserve status"
            )
        time.sleep(WAIT_S)


def drain(name: str, target: str) -> int:
    found: int = cluster.call(controller_of(name).drain.remote(target))
    if found < 0:
        raise OptionError(f"{target!r} is neither a replica nor the beginning of a node's id; see lightserve status")
    return found


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
