"""The slots of a KV group that cached tokens may lose: each is free, held by requests, kept by a cached token, or both.

A slot that no request holds stays with its token in the prefix cache until another token needs it; the slot that was
freed first goes first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightserve.router.kv.slots import Slots, TokenSlots

NONE = -1  # in place of a slot
MIN_POPPED = 64  # entries of the queue that are looked at together


class GroupSlots:
    """``tokens`` are slots of the pool of all tokens, which name the tokens of the prefix cache."""

    def __init__(self, size: int, num_tokens: int) -> None:
        self._slots = TokenSlots(size)
        self._holders = np.zeros(size, dtype=np.int32)  # requests that hold each slot
        self._token: Slots = np.full(size, NONE, dtype=np.int32)  # cached token of each slot
        self._slot_of: Slots = np.full(num_tokens, NONE, dtype=np.int32)  # the reverse
        self._unheld = SlotQueue(size)  # slots of cached tokens that no request holds
        self.num_evicted = 0  # slots that cached tokens have lost to requests

    @property
    def size(self) -> int:
        return self._slots.size

    @property
    def available(self) -> int:
        return self._slots.num_free + len(self._unheld)

    @property
    def used(self) -> int:
        """Slots that requests hold."""
        return self.size - self.available

    @property
    def num_unheld(self) -> int:
        """Slots of cached tokens that no request holds."""
        return len(self._unheld)

    def has_slot(self, tokens: Slots) -> npt.NDArray[np.bool_]:
        """Which of these cached tokens have a slot."""
        has_slot: npt.NDArray[np.bool_] = self._slot_of[tokens] != NONE
        return has_slot

    def slots_of(self, tokens: Slots) -> Slots:
        """The slots of these cached tokens; NONE where a token has lost it."""
        slots: Slots = self._slot_of[tokens]
        return slots

    def alloc(self, count: int) -> Slots:
        """Slots that one request holds. The caller has checked that ``count`` are available."""
        short = count - self._slots.num_free
        if short > 0:
            evicted = self._unheld.pop(short)
            self._slot_of[self._token[evicted]] = NONE
            self._token[evicted] = NONE
            self._slots.free(evicted)
            self.num_evicted += len(evicted)
        new = self._slots.alloc(count)
        self._holders[new] = 1
        return new

    def hold(self, tokens: Slots) -> Slots:
        """The slots of these cached tokens, which have them. One more request holds them from now on."""
        held: Slots = self._slot_of[tokens]
        self._unheld.remove(held)
        self._holders[held] += 1
        return held

    def free(self, released: Slots) -> None:
        """A request does not hold these slots any more. A slot that several requests release is given as often."""
        if not len(released):
            return
        if (self._holders[released] == 1).all():  # as usual: then no slot is given twice
            self._holders[released], unheld = 0, released
        else:
            np.subtract.at(self._holders, released, 1)
            unheld = np.unique(released[self._holders[released] == 0])
        is_cached = self._token[unheld] != NONE
        self._unheld.push(unheld[is_cached])
        self._slots.free(unheld[~is_cached])

    def num_holders(self, slot: int) -> int:
        """Requests that hold this slot."""
        return self._holders.item(slot)

    def add_cached(self, tokens: Slots, given: Slots) -> bool:
        """These tokens are in the prefix cache, and have their KV in these slots. A token keeps the slot it has.

        Returns whether all of them have got the given slots.
        """
        is_new = (self._slot_of[tokens] == NONE) & (self._token[given] == NONE)
        self._slot_of[tokens[is_new]] = given[is_new]
        self._token[given[is_new]] = tokens[is_new]
        return bool(is_new.all())

    def remove_cached(self, tokens: Slots) -> None:
        """These tokens are not in the prefix cache any more, if they were. Requests that hold their slots keep them."""
        slots = self._slot_of[tokens]
        slots = slots[slots != NONE]
        self._slot_of[tokens] = NONE
        self._token[slots] = NONE
        unheld = slots[self._holders[slots] == 0]
        self._unheld.remove(unheld)
        self._slots.free(unheld)

    def invalidate(self, slots: Slots) -> None:
        """Cached tokens lose these slots: the steps that should compute them have failed.

        A slot may be given twice: a step can take one that the step before it filled.
        """
        self.forget(np.unique(slots))

    def forget(self, slots: Slots) -> None:
        """Cached tokens lose these slots, which differ."""
        tokens = self._token[slots]
        self.remove_cached(tokens[tokens != NONE])


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
