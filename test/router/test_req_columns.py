"""Steps of decodes are planned and reported in columns: what is done for single requests is rare."""

from __future__ import annotations

import numpy as np
import pytest

from lightserve.messages.control import SlidingWindowKv
from lightserve.messages.int_arrays import BLOCK, GrowingArray, Heads, Int32Array, Tails, int32s
from lightserve.messages.step import TokenColumns
from lightserve.router.kv.pool import KvPool
from lightserve.router.scheduler import GroupScheduler, Scheduler, SchedulerLimits
from test.router.scheduler.test_scheduler import endless, windows_of

OTHER = 50  # a token that ends no request
NUM_REQS = 64
WINDOWED = SlidingWindowKv(size=20_000, window=30, kept_tokens=40)


def decode(scheduler: Scheduler, steps: int) -> None:
    """All requests that a step computes get a token."""
    for _ in range(steps):
        step = scheduler.next_step()
        assert step is not None
        scheduler.complete_step()
        scheduler.process_plain(TokenColumns.of([(row.req_id, [OTHER]) for row in step.rows]))


@pytest.mark.parametrize(("windowed", "num_stages"), [(None, 1), (WINDOWED, 1), (None, 2)])
def test_a_step_of_decodes_looks_at_few_requests(
    windowed: SlidingWindowKv | None, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SchedulerLimits(NUM_REQS, batch_max_tokens=1024, chunk_size=1024, num_stages=num_stages)
    scheduler = Scheduler(GroupScheduler(KvPool(100_000, windows_of(windowed, 100_000)), limits))
    for req_id in range(NUM_REQS):
        req = endless(req_id)
        req.continue_from([OTHER], 0.0)
        scheduler.add(req)
    decode(scheduler, 60)
    extended: list[GrowingArray] = []
    extend = GrowingArray.extend

    def counted(array: GrowingArray, values: Int32Array) -> None:
        extended.append(array)
        extend(array, values)

    monkeypatch.setattr(GrowingArray, "extend", counted)

    decode(scheduler, steps := 120)

    computed = steps * NUM_REQS / num_stages
    assert 0 < len(extended) < computed / 10  # arrays of single requests


def test_tails_know_their_last_values() -> None:
    tails = Tails(3)
    tails.append(np.array([0, 2]), int32s([5, 6]))
    tails.append(np.array([2]), int32s([7]))

    values, has_values = tails.last(np.array([2, 1, 0]))

    assert has_values.tolist() == [True, False, True]
    assert values[has_values].tolist() == [7, 5]


def test_heads_give_the_values_of_every_array_in_their_order() -> None:
    arrays = [np.arange(1000 * row, 1000 * row + 200, dtype=np.int32) for row in range(40)]
    heads, taken = Heads(len(arrays)), [list[int]() for _ in arrays]
    rng = np.random.default_rng(0)

    for _ in range(200):
        rows = np.flatnonzero(rng.random(len(arrays)) < 0.7)
        for row in heads.empty(rows).tolist():
            heads.fill(row, arrays[row][len(taken[row]) :])
        for row, value in zip(rows.tolist(), heads.take(rows).tolist(), strict=True):
            taken[row].append(value)

    assert all(values == array[: len(values)].tolist() for values, array in zip(taken, arrays, strict=True))
    assert min(map(len, taken)) > BLOCK
    heads.clear(3)
    assert heads.empty(np.array([2, 3])).tolist() == [3]
