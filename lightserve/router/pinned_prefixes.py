"""Pinned prefixes (--pinned_prefixes): the router computes each once, and the prefix cache never evicts it.

Every attention group has a prefix cache, so each computes and keeps all prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from lightserve.errors import OptionError
from lightserve.messages.control import EngineInfo, KvGroupSize, SlidingWindowKv
from lightserve.messages.int_arrays import Int32Array, int32s
from lightserve.messages.params import GenerationParams
from lightserve.messages.request import GenerateReq
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, Scheduler
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

MAX_SHARE = 0.5  # of the KV pool
LEAST_OWN = 2  # tokens that a request adds: one of its prompt, and one of output
ONE_TOKEN = GenerationParams.of(max_new_tokens=1, seed=0, temperature=0.0)


def check_room(prompts: Mapping[str, Sequence[int]], engine: EngineInfo) -> None:
    """Requests must have room beside the pinned prompts, also the longest one."""
    tokens, pool = sum(map(len, prompts.values())), engine.max_total_token_num
    if not tokens:
        return
    for group in engine.kv_groups:
        _check_group(prompts, group)
    name, longest = max(((name, len(ids)) for name, ids in prompts.items()), key=lambda pair: pair[1])
    if longest + LEAST_OWN > engine.max_req_total_len:
        raise OptionError(
            f"pinned_prefixes: {name!r} has {longest} tokens, and a request may have {engine.max_req_total_len} with "
            "its own prompt and output (--max_req_total_len)"
        )
    if tokens > MAX_SHARE * pool:
        raise OptionError(
            f"pinned_prefixes: {tokens} tokens would be pinned; the limit is {MAX_SHARE:.0%} of the KV pool of {pool} "
            "tokens; use shorter prompts, or more memory (--max_total_token_num)"
        )
    if tokens + engine.max_req_total_len > pool:
        raise OptionError(
            f"pinned_prefixes: {tokens} pinned tokens leave {pool - tokens} of the KV pool, and a request may have "
            f"{engine.max_req_total_len}; set --max_req_total_len to {pool - tokens} or less"
        )


def _check_group(prompts: Mapping[str, Sequence[int]], group: KvGroupSize) -> None:
    """What continues a pinned prompt stays in the pools of KV groups too, beside half of them and one request."""
    if isinstance(group, SlidingWindowKv):
        pinned = sum(min(len(ids), group.window - 1) for ids in prompts.values())
        least, flag = group.kept_tokens + 1, "max_windowed_token_num"
    else:
        pinned, least, flag = len(prompts), 2, "max_state_rows"
    limit = group.size - group.size // 2 - least
    if pinned > limit:
        raise OptionError(
            f"pinned_prefixes: they need {pinned} of {group.size} slots beside the KV pool; the limit is {limit}; use "
            f"fewer prompts, or more memory (--{flag})"
        )


class StaticPrompt(NamedTuple):
    """To be pinned in the prefix cache of this group."""

    group: GroupScheduler
    name: str
    token_ids: Int32Array


class PinnedPrefixes:
    """Makes requests of its own, with negative ids. The output processor tells nobody of them but this."""

    def __init__(self, scheduler: Scheduler, prompts: Mapping[str, Sequence[int]]) -> None:
        self._scheduler = scheduler
        self._prompts = {
            -1 - number: StaticPrompt(group, name, int32s(ids))
            for number, (group, (name, ids)) in enumerate(product(scheduler.groups, prompts.items()))
        }
        self._computing: set[int] = set()
        self._failed: set[int] = set()  # not tried again: it may be what made the workers die

    def compute(self, make_req: Callable[[GenerateReq], Req], now_s: float) -> None:
        """Queue what is neither pinned nor being computed: at the start, and when there is no KV of them."""
        for req_id, (group, _, token_ids) in self._prompts.items():
            if not group.pool.pinned_tokens and req_id not in self._computing | self._failed:
                self._computing.add(req_id)
                self._scheduler.add(make_req(GenerateReq(req_id, token_ids, ONE_TOKEN, now_s)), group)

    def recompute(self, make_req: Callable[[GenerateReq], Req], now_s: float) -> None:
        """Their KV is of no use any more: of other weights, or in memory that was freed. No step is in flight."""
        for req_id in self._computing:
            self._scheduler.abort(req_id)
        self._computing.clear()
        self._failed.clear()
        for group in self._scheduler.groups:
            group.pool.unpin()
        self.compute(make_req, now_s)

    def end(self, req: Req, has_failed: bool = False) -> None:
        """One of them has ended."""
        self._computing.discard(req.req_id)
        group, name, token_ids = self._prompts[req.req_id]
        if has_failed:
            self._failed.add(req.req_id)
            logger.error("the pinned prefix %r could not be computed: it is not pinned, and works as any other", name)
            return
        pinned = group.pool.pin(token_ids, req.salt)
        logger.info("pinned prefix %r: %d tokens pinned in the prefix cache", name, pinned)
