"""The seam of a KV group: layers whose memory is a pool of its own, because a cached token may lose it early.

The pool of all tokens has a slot for every token, and the prefix cache names tokens by these slots. A group's pool has
slots beside it, by rules of its own: one for each token in a sliding window, or one for each running request. A cached
prefix can be continued only where every group still has what the next token needs.

Slots are named by the plan, and workers run steps in order. So a slot can be freed, and given to another request, as
soon as the last step that reads it is planned.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lightserve.messages.int_arrays import NO_INT32, Int32Array, Int64Array
from lightserve.router.kv.group_slots import GroupSlots
from lightserve.router.kv.slots import Slots
from lightserve.router.kv.stored_group import StoredKvGroup
from lightserve.router.req import Req
from lightserve.router.req_columns import ReqColumns

UNLIMITED = 2**62


class RunningReqs(Protocol):
    """The requests that run: see RunningBatch."""

    columns: ReqColumns
    rows: Int64Array

    def at(self, rows: Int64Array) -> list[Req]: ...


class KvGroupPool(StoredKvGroup):
    """``tokens`` are slots of the pool of all tokens: the first tokens of a request or prefix, in their order.

    A request is attached on admission and enters the running requests. Steps then compute its next tokens, until it is
    released: it has ended or is preempted. A request that does not fit is released without having entered.
    """

    name: str  # in metrics

    def __init__(self, size: int, num_tokens: int) -> None:
        """``size``: slots of this pool; ``num_tokens``: of the pool of all tokens."""
        self._num_tokens = num_tokens
        self._evicted_before = 0  # the last reset
        self._pinned: Slots = NO_INT32  # slots that pinned prefixes hold
        self.slots = GroupSlots(size, num_tokens)
        self.writes: Slots = NO_INT32  # slots to which the step writes that is being planned
        self.snapshots: Int32Array = NO_INT32  # of that step: see Step
        self._clear()

    @property
    def size(self) -> int:
        """Slots."""
        return self.slots.size

    @property
    def used(self) -> int:
        """Slots that requests hold."""
        return self.slots.used

    @property
    def num_kept(self) -> int:
        """Slots of cached tokens that no request holds."""
        return self.slots.num_unheld

    @property
    def num_evicted(self) -> int:
        """Slots that cached tokens have lost so far because requests needed them."""
        return self._evicted_before + self.slots.num_evicted

    @property
    def available(self) -> int:
        """How many tokens the next step can compute."""
        return UNLIMITED

    @property
    def max_chunk(self) -> int:
        """The most tokens of one request that fit into a step while no other request runs."""
        return UNLIMITED

    @abstractmethod
    def bind(self, running: RunningReqs) -> None:
        """Called once, before any request is attached."""

    def reset(self) -> None:
        """All KV is lost. No request holds anything."""
        self._evicted_before += self.slots.num_evicted
        self.slots = GroupSlots(self.size, self._num_tokens)
        self._pinned = NO_INT32
        self._clear()

    @abstractmethod
    def _clear(self) -> None:
        """Forget what requests hold."""

    @abstractmethod
    def fits(self, req: Req, step_tokens: int) -> bool:
        """Whether all running requests and this one can run to their ends. ``step_tokens``: the most of a step."""

    @abstractmethod
    def usable_len(self, tokens: Slots) -> int:
        """How many tokens of this cached prefix a request can take, so that its next token can be computed."""

    @abstractmethod
    def attach(self, req: Req, tokens: Slots, matched_len: int) -> None:
        """A request takes this cached prefix, which is usable, and holds what its next token needs of it.

        ``matched_len``: its tokens that are cached, though it cannot use all of them.
        """

    def keep_at(self, req: Req, length: int) -> int | None:
        """Another request waits for these first tokens of a running one.

        Returns how many must be planned before it can use them; None: any number is useful.
        """
        return None

    @abstractmethod
    def enter(self, req: Req) -> None:
        """A request has a row of the running requests from now on. It may not be attached: it shares no prefix."""

    @abstractmethod
    def held_slots(self, req: Req) -> Slots:
        """The slots that a running request holds. The workers are told when it enters them."""

    @abstractmethod
    def alloc(self, rows: Int64Array, counts: Int32Array, chunks: Sequence[tuple[Req, int]]) -> Slots:
        """What the workers must know of a step that is being planned.

        ``rows`` are those of decodes, which get ``counts`` slots each in the pool of all tokens; empty: one. Chunks of
        requests follow, with their numbers of tokens.
        """

    @abstractmethod
    def end_step(self, rows: Int64Array, chunks: Sequence[tuple[Req, int]]) -> None:
        """The step is planned, and its prompts are cached. Requests free what their next tokens do not need."""

    def take_back(self, req: Req) -> None:
        """A request gives back what it has for tokens after its planned ones."""

    @abstractmethod
    def release(self, req: Req) -> None:
        """A request holds nothing any more."""

    @abstractmethod
    def add_cached(self, req: Req, tokens: Slots, begin: int, is_leaving: bool = False) -> None:
        """These first tokens of a request are cached: they get its slots, unless they have some.

        Those before ``begin`` were cached by others. Those after it may be too: then the request has computed them
        again. ``is_leaving``: the request is released next.
        """

    @abstractmethod
    def sent_slots(self, req: Req, end: int) -> Slots:
        """The slots of the last ``blocks_before`` blocks before ``end`` tokens of a running request, which has no more.

        Some first tokens that the next token does not need may have any slot.
        """

    def remove_cached(self, tokens: Slots) -> None:
        """These tokens are not in the prefix cache any more, if they were. Requests that hold their slots keep them."""
        self.slots.remove_cached(tokens)

    def pin(self, tokens: Slots) -> None:
        """Never lose what continues this cached prefix, which is usable, until ``unpin``."""
        self._pinned = np.concatenate((self._pinned, self.slots.hold(self._continuing(tokens))))

    def unpin(self) -> None:
        """Of all prefixes."""
        pinned, self._pinned = self._pinned, NO_INT32
        self.slots.free(pinned)

    @abstractmethod
    def _continuing(self, tokens: Slots) -> Slots:
        """The tokens of a usable prefix that the next token needs."""

    def invalidate(self, slots: Slots) -> None:
        """Cached tokens lose these slots, which ``alloc`` returned: the steps that should fill them have failed."""
        self.slots.invalidate(slots)
