from __future__ import annotations

import random

import pytest
import torch

from lightserve.common import ops
from lightserve.common.ops.step import COUNTED, NO_REQ, NO_SLOT, StepReqs
from test.ops.cases import backends_of, device_of, ints

MAX_LEN = 700
FREE = -5  # in the table: the place has no slot
BACKENDS = [ops.REFERENCE, *backends_of(ops.locate_tokens)]


class Step:
    """A random step, and where its tokens are by the rules of the op."""

    def __init__(self, seed: int, requests: int, most: int, padding: int) -> None:
        rng = random.Random(seed)
        self.rows = rng.sample(range(requests + 3), requests)
        self.lengths = [rng.randrange(MAX_LEN) for _ in range(requests + 3)]  # of some rows: nobody may read them
        self.table = [[FREE] * MAX_LEN for _ in range(requests + 3)]
        self.starts, self.ready_len, self.b_ready_len, self.slot_len = [], [], [], []
        self.new_slots: list[int] = []
        self.token_reqs: list[int] = []
        self.places: list[tuple[int, int]] = []  # row and position of each token
        slots = iter(rng.sample(range(10_000, 10_000 + MAX_LEN * requests), MAX_LEN * requests))
        for place, row in enumerate(self.rows):
            count, ready = rng.randint(1, most), rng.randrange(MAX_LEN - 2 * most)
            held = ready + rng.randint(0, count)  # of rejected drafts
            needed = max(ready + count - held, 0)
            self.table[row][:held] = [next(slots) for _ in range(held)]
            new = [next(slots) for _ in range(rng.randint(needed, count))]
            self.starts.append(len(self.new_slots))
            self.new_slots += new + [NO_SLOT] * (count - len(new))
            self.token_reqs += [place] * count
            self.places += [(row, ready + i) for i in range(count)]
            self.b_ready_len.append(ready)
            self.slot_len.append(held)
            is_counted = rng.random() < 0.5
            self.ready_len.append(COUNTED if is_counted else ready)
            self.lengths[row] = ready if is_counted else self.lengths[row]
        self.new_slots += [999] * padding
        self.token_reqs += [NO_REQ] * padding

    def run(self, backend: str) -> tuple[ops.LocatedTokens, torch.Tensor]:
        device = device_of(backend)
        table = torch.tensor(self.table, dtype=torch.int32, device=device)
        new_slots, token_reqs, lengths = (ints(one, device) for one in (self.new_slots, self.token_reqs, self.lengths))
        reqs = StepReqs(*(ints(one, device) for one in (self.rows, self.starts, self.ready_len, self.slot_len)))
        return ops.locate_tokens.impls[backend](new_slots, token_reqs, reqs, lengths, table), table

    def expected_table(self) -> list[list[int]]:
        """With the new slots behind those that the requests had."""
        table = [list(slots) for slots in self.table]
        for start, row, held in zip(self.starts, self.rows, self.slot_len, strict=True):
            count = self.token_reqs.count(self.token_reqs[start])
            new = [slot for slot in self.new_slots[start : start + count] if slot != NO_SLOT]
            table[row][held : held + len(new)] = new
        return table


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("requests", "most", "padding"), [(1, 1, 0), (1, 4, 3), (7, 5, 0), (9, 1, 7), (30, 6, 1), (3, 300, 0)]
)
def test_tokens_follow_the_lengths_that_host_or_device_knows(
    backend: str, requests: int, most: int, padding: int
) -> None:
    step = Step(requests, requests, most, padding)
    table = step.expected_table()

    out, written = step.run(backend)

    assert out.b_ready_len.tolist() == step.b_ready_len
    assert out.positions.tolist() == [position for _, position in step.places] + [0] * padding
    assert out.slots.tolist() == [table[row][position] for row, position in step.places] + [999] * padding
    assert FREE not in out.slots.tolist()
    assert written.tolist() == table


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_whose_drafts_were_rejected_writes_to_their_slots_again(backend: str) -> None:
    device = device_of(backend)
    table = ints([10, 11, 12, 13, FREE, FREE], device)[None]
    reqs = StepReqs(ints([0], device), ints([0], device), ints([COUNTED], device), ints([4], device))

    out = ops.locate_tokens.impls[backend](
        ints([14, NO_SLOT, NO_SLOT], device), ints([0, 0, 0], device), reqs, ints([2], device), table
    )

    assert (out.positions.tolist(), out.slots.tolist()) == ([2, 3, 4], [12, 13, 14])
    assert table.tolist() == [[10, 11, 12, 13, 14, FREE]]
