"""Which attention group gets a request, if data-parallel attention divides the ranks into several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.router.req import Req
from lightserve.router.scheduler.group import GroupScheduler

MAX_LOAD_FACTOR = 1.25  # of the mean number of requests: beyond it a group gets none, whatever it has cached


class GroupLoad(NamedTuple):
    """What a group has, when a request is to be placed."""

    open_requests: int
    kv_tokens: int  # that its requests use, and the prompts that wait
    cached_tokens: int  # of the request's prompt
    unused_tokens: int = 0  # in the prefix cache, that no request uses


def load_of(group: GroupScheduler, req: Req) -> GroupLoad:
    open_requests = len(group.batch) + len(group.queue) + group.queue.num_blocked
    cached = group.pool.cached_len(req) if req.shares_prefix else 0
    kv_tokens = group.pool.used + group.queue.num_tokens
    return GroupLoad(open_requests, kv_tokens, cached, group.pool.cached_tokens)


def choose_group(loads: Sequence[GroupLoad]) -> int:
    """The group that gets a request: of those that have the most of its prompt cached, the one with the fewest tokens.

    All groups wait for the one with the most tokens, so none may have many more requests than the others. Cached tokens
    count in whole blocks: most prompts have a few first tokens in common. Idle groups take turns, by what they cache.
    """
    most_requests = MAX_LOAD_FACTOR * (sum(load.open_requests for load in loads) + 1) / len(loads)
    may_take = [load.open_requests < most_requests for load in loads]
    return min(
        (group for group, is_free in enumerate(may_take) if is_free),
        key=lambda group: (
            -(loads[group].cached_tokens // BLOCK_TOKENS),
            loads[group].kv_tokens,
            loads[group].open_requests,
            loads[group].unused_tokens,
        ),
    )
