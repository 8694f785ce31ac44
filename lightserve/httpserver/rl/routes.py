"""The routes of --enable_rl, for trainers that use the server as a rollout engine: see docs/rl.md.

Those of ``admin_routes`` need an admin key where one is set.
"""

from __future__ import annotations

from fastapi import APIRouter

from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.rl.generate_routes import add_generate
from lightserve.httpserver.rl.info import add_info, add_loads
from lightserve.httpserver.rl.pause_routes import add_pause
from lightserve.httpserver.rl.sleep_routes import add_sleep
from lightserve.httpserver.rl.weights import add_weights


def admin_routes(context: ServerContext) -> APIRouter:
    """Without the flag: none."""
    router = APIRouter(tags=["reinforcement learning"])
    if context.config.enable_rl:
        add_info(router, context)
        add_weights(router, context)
        add_pause(router, context)
        add_sleep(router, context)
    return router


def routes(context: ServerContext) -> APIRouter:
    """Those of clients that generate. Without the flag: none."""
    router = APIRouter(tags=["reinforcement learning"])
    if context.config.enable_rl:
        add_generate(router, context)
        add_loads(router, context)
    return router
