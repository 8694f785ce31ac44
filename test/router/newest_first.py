"""A scheduling policy of another package, for --router_policy test.router.newest_first:NewestFirst."""

from __future__ import annotations

from lightserve.router.policy import Policy
from lightserve.router.req import Req
from lightserve.utils.logger import init_logger

logger = init_logger("lightserve.newest_first")


class NewestFirst(Policy):
    name = "newest_first"

    def rank(self, req: Req) -> float:
        logger.info("ranked %d", req.req_id)
        return -req.arrived_s


class NoPolicy:
    pass


def raises() -> Policy:
    raise RuntimeError("not today")
