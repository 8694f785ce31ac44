"""The pools of an engine's KV groups, as the workers describe them."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.messages.control import KvGroupSize, SlidingWindowKv
from lightserve.router.kv.group_pool import KvGroupPool
from lightserve.router.kv.sliding_window import SlidingWindowPool
from lightserve.router.kv.state_pool import StatePool


def make_group_pools(groups: Sequence[KvGroupSize], num_tokens: int) -> list[KvGroupPool]:
    """In the order of the groups, beside a pool of ``num_tokens``."""
    return [_make_pool(figures, num_tokens) for figures in groups]


def _make_pool(figures: KvGroupSize, num_tokens: int) -> KvGroupPool:
    if isinstance(figures, SlidingWindowKv):
        return SlidingWindowPool(figures, num_tokens)
    return StatePool(figures, num_tokens)
