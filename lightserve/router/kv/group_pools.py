"""The pools of an engine's KV groups, beside its pool of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.control import KvGroupSize, SlidingWindowKv
from lightserve.messages.int_arrays import NO_INT32, Int32Array, Int64Array
from lightserve.router.kv.group_pool import UNLIMITED, KvGroupPool, RunningReqs
from lightserve.router.kv.sliding_window import SlidingWindowPool
from lightserve.router.kv.slots import Slots
from lightserve.router.kv.state_pool import StatePool
from lightserve.router.req import Req


class KvGroupPools(tuple[KvGroupPool, ...]):
    """By the number of their KV group. All of them take part in what a request does: see KvGroupPool."""

    __slots__ = ()

    def bind(self, running: RunningReqs) -> None:
        """Called once: these are the requests that will run."""
        for group in self:
            group.bind(running)

    def reset(self) -> None:
        for group in self:
            group.reset()

    @property
    def available(self) -> int:
        """How many tokens the next step can compute."""
        return min((group.available for group in self), default=UNLIMITED)

    @property
    def max_chunk(self) -> int:
        """The most tokens of one request that fit into a step while no other request runs."""
        return min((group.max_chunk for group in self), default=UNLIMITED)

    def fits(self, req: Req, step_tokens: int) -> bool:
        """Whether all have room for this request too. ``step_tokens``: the most of a step."""
        return all(group.fits(req, step_tokens) for group in self)

    def usable_len(self, tokens: Slots) -> int:
        """How many tokens of a cached prefix a request can take: every group can continue from there."""
        usable, before = len(tokens), -1
        while usable != before:
            before = usable
            for group in self:
                usable = group.usable_len(tokens[:usable])
        return usable

    def keep_at(self, req: Req, length: int) -> int | None:
        """Another request waits for these first tokens of a running one.

        Returns how many must be planned before it can use them; None: any number is useful.
        """
        needed = (group.keep_at(req, length) for group in self)
        return next((tokens for tokens in needed if tokens is not None), None)

    def attach(self, req: Req, tokens: Slots, matched_len: int) -> None:
        for group in self:
            group.attach(req, tokens, matched_len)

    def enter(self, req: Req) -> None:
        """A request has a row of the running requests from now on."""
        for group in self:
            group.enter(req)

    def held_slots(self, req: Req) -> tuple[Slots, ...]:
        """The slots that a running request holds in each group. The workers are told when it enters them."""
        return tuple([group.held_slots(req) for group in self])

    def alloc(self, rows: Int64Array, counts: Int32Array, chunks: Sequence[tuple[Req, int]]) -> tuple[Slots, ...]:
        """What the workers must know of a step, by group."""
        for group in self:
            group.writes = group.alloc(rows, counts, chunks)
        return tuple([group.writes for group in self])

    @property
    def snapshots(self) -> Int32Array:
        """Of the step that ``alloc`` was called for last: see Step. One group at most has states."""
        return next((group.snapshots for group in self if len(group.snapshots)), NO_INT32)

    def end_step(self, rows: Int64Array, chunks: Sequence[tuple[Req, int]]) -> None:
        """A step with these decodes and chunks is planned."""
        for group in self:
            group.end_step(rows, chunks)

    def take_back(self, req: Req) -> None:
        for group in self:
            group.take_back(req)

    def release(self, req: Req) -> None:
        for group in self:
            group.release(req)

    def add_cached(self, req: Req, tokens: Slots, begin: int, is_leaving: bool) -> None:
        for group in self:
            group.add_cached(req, tokens, begin, is_leaving)

    def remove_cached(self, tokens: Slots) -> None:
        for group in self:
            group.remove_cached(tokens)

    def pin(self, tokens: Slots) -> None:
        """Never lose what continues this cached prefix."""
        usable = self.usable_len(tokens)
        for group in self if usable else ():
            group.pin(tokens[:usable])

    def unpin(self) -> None:
        for group in self:
            group.unpin()

    # slower memory; ``blocks`` are numbers of blocks of a prefix, by group, or nothing if no group gets any

    def can_load(self, blocks: Sequence[Sequence[int]], step_tokens: int) -> bool:
        """Whether there is room for these blocks. ``step_tokens``: the most of a step."""
        pairs = zip(self, blocks, strict=True)
        return all(not of_group or group.can_load(len(of_group), step_tokens) for group, of_group in pairs)

    def start_load(self, blocks: Sequence[Sequence[int]]) -> tuple[Slots, ...]:
        """Slots for these blocks, which fit."""
        return tuple([group.start_load(len(of_group)) for group, of_group in zip(self, blocks, strict=False)])

    def blocks_before(self, end: int) -> tuple[tuple[int, ...], ...]:
        """The blocks that each group needs to continue a prefix behind so many blocks."""
        return tuple([tuple(range(max(end - group.blocks_before, 0), end)) for group in self])

    def finish_load(
        self, blocks: Sequence[Sequence[int]], slots: Sequence[Slots], tokens: Slots, was_sent: bool = False
    ) -> None:
        """``tokens``: of the whole prefix, now cached; empty: what has come is not valid."""
        for group, of_group, group_slots in zip(self, blocks, slots, strict=False):
            loaded = tokens.reshape(-1, BLOCK_TOKENS)[list(of_group)] if len(tokens) else NO_INT32
            group.finish_load(loaded, group_slots, was_sent)

    def invalidate(self, slots: Sequence[Slots]) -> None:
        """``slots``: by group."""
        for group, of_group in zip(self, slots, strict=True):
            group.invalidate(of_group)


def make_group_pools(groups: Sequence[KvGroupSize], num_tokens: int) -> list[KvGroupPool]:
    """In the order of the groups, beside a pool of ``num_tokens``."""
    return [_make_pool(figures, num_tokens) for figures in groups]


def _make_pool(figures: KvGroupSize, num_tokens: int) -> KvGroupPool:
    if isinstance(figures, SlidingWindowKv):
        return SlidingWindowPool(figures, num_tokens)
    return StatePool(figures, num_tokens)
