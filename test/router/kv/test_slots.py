from __future__ import annotations

import random

import numpy as np
import pytest

from lightserve.router.kv.slots import TokenSlots


@pytest.mark.parametrize("seed", range(10))
def test_a_slot_has_one_owner_after_any_sequence_of_allocations(seed: int) -> None:
    rng = random.Random(seed)
    slots = TokenSlots(97)
    owned: list[np.ndarray] = []

    for _ in range(500):
        if owned and rng.random() < 0.5:
            slots.free(owned.pop(rng.randrange(len(owned))))
        elif count := rng.randint(0, slots.num_free):
            owned.append(slots.alloc(count))

        held = [slot for part in owned for slot in part.tolist()]
        assert len(set(held)) == len(held)
        assert all(0 <= slot < 97 for slot in held)
        assert slots.num_used == len(held)
        assert slots.num_free == 97 - len(held)


def test_fresh_slots_are_an_ascending_run() -> None:
    slots = TokenSlots(10)

    assert slots.alloc(3).tolist() == [0, 1, 2]
    assert slots.alloc(2).tolist() == [3, 4]


def test_an_allocation_that_does_not_fit_is_refused_and_takes_nothing() -> None:
    slots = TokenSlots(4)
    slots.alloc(3)

    with pytest.raises(ValueError, match="2 KV slots wanted, 1 of 4 free"):
        slots.alloc(2)

    assert slots.num_free == 1


@pytest.mark.parametrize("freed", [[0, 0], [3], [0, 1, 1]])
def test_a_slot_freed_twice_is_refused(freed: list[int]) -> None:
    slots = TokenSlots(4)
    slots.alloc(2)

    with pytest.raises(ValueError, match="freed twice"):
        slots.free(np.array(freed, dtype=np.int32))

    assert slots.num_used == 2
