"""A deployment of LightServe as an application of Ray Serve: Serve starts and ends it, and shows its state.

Serve's proxy carries no token. It answers every request but that of the state with a redirect to the gateway.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import msgspec
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from lightserve.config import ServerConfig
from lightserve.config.parse import parse_server
from lightserve.errors import OptionError
from lightserve.ray import client, cluster
from lightserve.ray.flags import bundle_of, make_deployment, with_scaling
from lightserve.ray.messages import Deployment

START_S, END_S = 1800.0, 60.0
OWN = ("name", "replicas", "roles", "gateways", "cpus_per_replica", "target_queue", "scale_down_s")


class Ingress:
    def __init__(self, args: dict[str, str]) -> None:
        self._name = args.get("name", "lightserve")
        self._owner = secrets.token_hex(8)
        config, made = parse(args)
        cpus = float(args["cpus_per_replica"]) if "cpus_per_replica" in args else None
        bundle = bundle_of(config, cluster.nodes(), cpus)
        client.apply(msgspec.structs.replace(made, bundle=bundle, owner=self._owner))
        client.wait_until_serving(self._name, START_S, print)

    async def __call__(self, request: Request) -> Response:
        status = await asyncio.to_thread(client.status, self._name)
        if request.url.path == "/":
            return JSONResponse(msgspec.to_builtins(status))
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"{status.gateway.process.address}{request.url.path}{query}", 307)

    def __del__(self) -> None:
        """Serve ends the application, unless a newer one has taken the deployment over."""
        if hasattr(self, "_owner") and client.owner_of(self._name) == self._owner:
            client.undeploy(self._name, END_S)


def server_flags(args: dict[str, str]) -> list[str]:
    return [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in args.items() if name not in OWN]


def parse(args: dict[str, str]) -> tuple[ServerConfig, Deployment]:
    """All but the resources of a replica, which depend on the cluster."""
    config = parse_server(server_flags(args), "lightserve.ray:app")
    replicas, roles = (str(args[name]) if name in args else None for name in ("replicas", "roles"))
    made = make_deployment(config, args.get("name", "lightserve"), replicas, int(args.get("gateways", "1")), roles)
    target, down_s = args.get("target_queue", made.target_queue), args.get("scale_down_s", made.scale_down_s)
    return config, with_scaling(made, float(target), float(down_s))


def build(args: dict[str, str]) -> Any:
    if not args.get("model_dir"):
        raise OptionError("model_dir is missing: serve run lightserve.ray:app model_dir=DIR replicas=2")
    parse(args)  # wrong flags are found before Serve starts anything
    options: dict[str, Any] = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
    timeouts = {"graceful_shutdown_timeout_s": END_S * 2}
    return serve.deployment(name="lightserve", **options, **timeouts)(Ingress).bind(dict(args))
