"""The second KV pool of a model with sliding windows: it holds the KV of the layers that attend to a window only.

A token has a slot here as well as in the pool of all tokens, but loses it earlier. A request holds the slots of its
last ``kept`` tokens. A slot that no request holds stays with its token in the prefix cache until another token needs
it; the slot that was let go first goes first. So a prefix cannot be continued everywhere: only where the tokens that
the next token's window reaches still have their slots.
"""

from __future__ import annotations

import numpy as np

from lightserve.messages.control import WindowedKv
from lightserve.messages.int_arrays import NO_INT32
from lightserve.router.kv.radix_cache import Ids, RadixCache
from lightserve.router.kv.slots import Slots, TokenSlots

NONE = -1  # in place of a slot
UNLIMITED = 2**62
MIN_POPPED = 64  # entries of the queue that are looked at together


class NoWindowedPool:
    """In place of a windowed pool, if all layers attend to all tokens: it never runs out, and no token loses a slot."""

    kept: int = 0  # a request holds the slots of so many last tokens

    @property
    def size(self) -> int:
        return 0

    @property
    def available(self) -> int:
        return UNLIMITED

    @property
    def used(self) -> int:
        return 0

    @property
    def max_chunk(self) -> int:
        """The most tokens of one request that fit into a step while no other request runs."""
        return UNLIMITED

    def prefix_len(self, cache: RadixCache, ids: Ids, salt: str) -> int:
        """How many of these tokens a request can take from the cache."""
        return cache.match_len(ids, salt)

    def usable_ids(self, cache: RadixCache, ids: Ids, salt: str) -> Ids:
        """Those of the tokens that a request can take from the cache, as far as windows decide that."""
        return ids

    def attach(self, tokens: Slots) -> tuple[int, Slots]:
        """A request takes this cached prefix. Returns where the slots begin that it holds from now on, and these."""
        return 0, NO_INT32

    def add_prefix(self, cache: RadixCache, ids: Ids, salt: str, begin: int, slots: Slots) -> None:
        """Cached tokens from ``begin`` on that have no slot take that of a request, which has ``slots`` for ``ids``."""

    def let_go(self, released: Slots) -> None:
        """A request does not hold these slots any more. A slot that several requests let go is given as often."""

    def remove_cached(self, tokens: Slots) -> None:
        """These tokens are not in the prefix cache any more, if they were. Requests that hold their slots keep them."""

    def invalidate(self, slots: Slots) -> None:
        """Cached tokens lose these slots: the steps that should compute them have failed."""


class WindowedPool(NoWindowedPool):
    """``tokens`` are slots of the pool of all tokens, which name the tokens of the prefix cache."""

    def __init__(self, figures: WindowedKv, num_tokens: int) -> None:
        self.slots = TokenSlots(figures.size)
        self.kept = figures.kept
        self.needed = max(figures.window - 1, 1)  # tokens before a token that its window reaches
        self._holders = np.zeros(figures.size, dtype=np.int32)  # requests that hold each slot
        self._token: Slots = np.full(figures.size, NONE, dtype=np.int32)  # cached token of each slot
        self._slot_of: Slots = np.full(num_tokens, NONE, dtype=np.int32)  # the reverse
        self._unheld = SlotQueue(figures.size)  # slots of cached tokens that no request holds

    @property
    def size(self) -> int:
        return self.slots.size

    @property
    def available(self) -> int:
        return self.slots.num_free + len(self._unheld)

    @property
    def used(self) -> int:
        return self.size - self.available

    @property
    def max_chunk(self) -> int:
        return self.size - self.kept

    @property
    def cached_slots(self) -> int:
        """Slots of cached tokens that no request holds."""
        return len(self._unheld)

    def alloc(self, count: int) -> Slots:
        """Slots that one request holds. The caller has checked that ``count`` are available."""
        short = count - self.slots.num_free
        if short > 0:
            evicted = self._unheld.pop(short)
            self._slot_of[self._token[evicted]] = NONE
            self._token[evicted] = NONE
            self.slots.free(evicted)
        new = self.slots.alloc(count)
        self._holders[new] = 1
        return new

    def hold(self, tokens: Slots) -> Slots:
        """The slots of these cached tokens, which have them. One more request holds them from now on."""
        held: Slots = self._slot_of[tokens]
        self._unheld.remove(held)
        self._holders[held] += 1
        return held

    def attach(self, tokens: Slots) -> tuple[int, Slots]:
        begin = max(len(tokens) - self.needed, 0)
        return begin, self.hold(tokens[begin:])

    def let_go(self, released: Slots) -> None:
        if not len(released):
            return
        if (self._holders[released] == 1).all():  # as usual: then no slot is given twice
            self._holders[released], unheld = 0, released
        else:
            np.subtract.at(self._holders, released, 1)
            unheld = np.unique(released[self._holders[released] == 0])
        is_cached = self._token[unheld] != NONE
        self._unheld.push(unheld[is_cached])
        self.slots.free(unheld[~is_cached])

    def add_prefix(self, cache: RadixCache, ids: Ids, salt: str, begin: int, slots: Slots) -> None:
        tokens = cache.find_slots(ids, salt)[begin:]
        self.add_cached(tokens, slots[begin : begin + len(tokens)])

    def add_cached(self, tokens: Slots, given: Slots) -> None:
        """These tokens are in the prefix cache, and have their KV in these slots. A token keeps the slot it has."""
        is_new = (self._slot_of[tokens] == NONE) & (self._token[given] == NONE)
        self._slot_of[tokens[is_new]] = given[is_new]
        self._token[given[is_new]] = tokens[is_new]

    def remove_cached(self, tokens: Slots) -> None:
        slots = self._slot_of[tokens]
        slots = slots[slots != NONE]
        self._slot_of[tokens] = NONE
        self._token[slots] = NONE
        unheld = slots[self._holders[slots] == 0]
        self._unheld.remove(unheld)
        self.slots.free(unheld)

    def invalidate(self, slots: Slots) -> None:
        """A slot may be given twice: a step can take one that the step before it filled."""
        tokens = self._token[np.unique(slots)]
        self.remove_cached(tokens[tokens != NONE])

    def prefix_len(self, cache: RadixCache, ids: Ids, salt: str) -> int:
        return self.usable_len(cache.find_slots(ids, salt))

    def usable_ids(self, cache: RadixCache, ids: Ids, salt: str) -> Ids:
        return ids[: self.prefix_len(cache, ids, salt)]

    def usable_len(self, tokens: Slots) -> int:
        """How many tokens of this cached prefix a request can take: its next token needs the slots before it."""
        lost = np.flatnonzero(self._slot_of[tokens] == NONE)
        begins = np.concatenate(([0], lost + 1))  # of the runs of tokens that have slots
        ends = np.append(lost, len(tokens))
        long_enough = np.flatnonzero(ends - begins >= self.needed)
        return int(ends[long_enough[-1]] if len(long_enough) else ends[0])


class SlotQueue:
    """Slots in the order in which they were pushed. A slot is in the queue once at most, and may leave it anywhere."""

    def __init__(self, size: int) -> None:
        self._entries: Slots = np.empty(2 * size, dtype=np.int32)  # slots; those that have left are still there
        self._place = np.full(size, NONE, dtype=np.int32)  # of each slot in the entries; NONE: it is not queued
        self._begin = self._end = 0  # of the entries in use
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def push(self, slots: Slots) -> None:
        if self._end + len(slots) > len(self._entries):
            self._compact()
        begin, self._end = self._end, self._end + len(slots)
        self._entries[begin : self._end] = slots
        self._place[slots] = np.arange(begin, self._end)
        self._len += len(slots)

    def remove(self, slots: Slots) -> None:
        """Those that are queued."""
        queued = slots[self._place[slots] != NONE]
        self._place[queued] = NONE
        self._len -= len(queued)

    def pop(self, count: int) -> Slots:
        """The oldest ``count`` slots, or all."""
        count = min(count, self._len)
        popped = [np.empty(0, dtype=np.int32)]
        while count > 0:
            end = min(self._begin + max(count, MIN_POPPED), self._end)
            at = self._live(self._begin, end)[:count]
            popped.append(self._entries[at])
            count -= len(at)
            self._begin = end if count else int(at[-1]) + 1
        slots = np.concatenate(popped)
        self.remove(slots)
        return slots

    def _live(self, begin: int, end: int) -> Slots:
        """The places between these where a queued slot is."""
        places: Slots = np.arange(begin, end, dtype=np.int32)
        live: Slots = places[self._place[self._entries[begin:end]] == places]
        return live

    def _compact(self) -> None:
        """Amortised: it makes room for as many pushed slots as there are slots in all."""
        slots = self._entries[self._live(self._begin, self._end)]
        self._begin, self._end = 0, len(slots)
        self._entries[: self._end] = slots
        self._place[slots] = np.arange(self._end)
