"""Ended requests whose tokens later ones begin with, as the steps of a beam search do.

The workers keep the tokens and slots with which such a request entered. A later request names it as its parent, and the
step has only what follows. The router compares what the workers keep with what the request needs, so it does not matter
whether the prefix cache has given it the same slots.

After the workers died, later requests enter with all their tokens, and can be parents again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.int_arrays import Int32Array
from lightserve.messages.step import ForkPrefix, NewReq
from lightserve.router.kv.radix_cache import common_len
from lightserve.router.req import Req


class ForkPoint(NamedTuple):
    token_ids: Int32Array  # of its prompt
    slots: Int32Array  # of these tokens
    salt: str
    kv_keys: list[bytes]  # of its first blocks, if evicted KV is stored


class ForkPoints:
    def __init__(self) -> None:
        self._fork_points: dict[int, ForkPoint] = {}  # by id
        self._ended: set[int] = set()  # of these, requests that the workers free and keep with the next step
        self._retained: set[int] = set()  # requests that the workers keep after the last planned step
        self._released: list[int] = []  # of these, those that they drop with the next step

    def __len__(self) -> int:
        return len(self._fork_points)

    def __iter__(self) -> Iterator[int]:
        """Their ids."""
        return iter(self._fork_points)

    @property
    def has_releases(self) -> bool:
        return bool(self._released)

    def add(self, req: Req, is_in_workers: bool) -> None:
        """The request ends now. It still has its slots if it ``is_in_workers``."""
        prompt_len = len(req.prompt_ids)
        keys = req.kv_keys[: prompt_len // BLOCK_TOKENS]
        self._fork_points[req.req_id] = ForkPoint(req.prompt_ids, req.slots[:prompt_len].copy(), req.salt, keys)
        if is_in_workers:
            self._ended.add(req.req_id)

    def tokens_of(self, req_id: int) -> Int32Array | None:
        """The prompt of a parent; None: it is not known."""
        parent = self._fork_points.get(req_id)
        return None if parent is None else parent.token_ids

    def give_keys(self, req: Req) -> None:
        """A request has the keys of the blocks with which its parent began: to hash 100,000 tokens takes 2 ms."""
        parent = None if req.parent is None else self._fork_points.get(req.parent)
        if parent is not None and parent.kv_keys and parent.salt == req.salt:
            req.kv_keys = parent.kv_keys[: common_len(parent.token_ids, req.prompt_ids) // BLOCK_TOKENS]

    def as_new(self, req: Req, group_slots: tuple[Int32Array, ...] = ()) -> NewReq:
        """The message by which a request enters the workers, without what they keep of its parent."""
        new = req.as_new(group_slots)
        if req.parent not in self._ended and req.parent not in self._retained:
            return new
        assert req.parent is not None
        token_ids, slots, *_ = self._fork_points[req.parent]
        # workers that keep no tokens read the last one, so it is always sent
        num_tokens = min(common_len(token_ids, new.token_ids), len(new.token_ids) - 1)
        num_slots = common_len(slots, new.cached_slots)
        return msgspec.structs.replace(
            new,
            token_ids=new.token_ids[num_tokens:],
            cached_slots=new.cached_slots[num_slots:],
            parent=ForkPrefix(req.parent, num_tokens, num_slots),
        )

    def release(self, req_ids: Iterable[int]) -> None:
        """No request will name these as its parent any more. Some may not have ended as expected."""
        for req_id in req_ids:
            self._fork_points.pop(req_id, None)
            self._ended.discard(req_id)
            if req_id in self._retained:
                self._retained.remove(req_id)
                self._released.append(req_id)

    def take_retained_and_released(self, free: Iterable[int]) -> tuple[list[int], list[int]]:
        """What the workers keep of the requests that they free with the next step, and what they drop with it."""
        retained, released = [req_id for req_id in free if req_id in self._ended], self._released
        self._retained.update(retained)
        self._ended.clear()
        self._released = []
        return retained, released

    def lose_workers(self) -> None:
        """The workers died. Only the tokens are left, which requests may still begin with."""
        self._ended.clear()
        self._retained.clear()
        self._released = []

    def clear(self) -> None:
        """The workers have freed all requests and keep none."""
        self.lose_workers()
        self._fork_points.clear()
