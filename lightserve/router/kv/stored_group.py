"""What slower memory stores of a KV group, in blocks of tokens: see tiers/group_blocks.py."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from lightserve.router.kv.group_slots import GroupSlots
from lightserve.router.kv.slots import Slots

Bools = npt.NDArray[np.bool_]


class StoredKvGroup(ABC):
    """The part of KvGroupPool that tiers use. ``tokens`` are slots of the pool of all tokens."""

    slots: GroupSlots

    def align(self, tokens: int) -> None:  # noqa: B027  most groups need not
        """Prefixes are stored in blocks of so many tokens."""

    @property
    @abstractmethod
    def blocks_before(self) -> int:
        """Whole blocks before the end of a prefix that a request needs to continue it there."""

    @abstractmethod
    def has_blocks(self, tokens: Slots) -> Bools:
        """Of cached tokens ``[blocks, tokens]``: which blocks have all that is stored of them."""

    @abstractmethod
    def block_slots(self, tokens: Slots) -> Slots:
        """The slots that are stored of a block of cached tokens, which has them."""

    @abstractmethod
    def can_load(self, num_blocks: int, step_tokens: int) -> bool:
        """Whether so many blocks fit beside what running requests will need. ``step_tokens``: the most of a step."""

    @abstractmethod
    def start_load(self, num_blocks: int) -> Slots:
        """Slots for the stored part of so many blocks, which fit. They are taken until ``finish_load``."""

    def finish_load(self, tokens: Slots, slots: Slots, was_sent: bool = False) -> None:
        """These slots hold what was stored of cached tokens ``[blocks, tokens]``; without tokens, they hold nothing.

        ``was_sent``: by another engine, as ``KvGroupPool.sent_slots`` says.
        """
        if len(tokens):
            self._add_loaded(tokens, slots, was_sent)
        self.slots.free(slots)

    @abstractmethod
    def _add_loaded(self, tokens: Slots, slots: Slots, was_sent: bool) -> None:
        """The cached tokens of these blocks get the slots."""
