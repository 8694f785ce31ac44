"""Requests get the drafts that their acceptance is worth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lightserve.messages.int_arrays import int32s, int64s
from lightserve.messages.step import DraftColumns
from lightserve.router.req_columns import FIRST_ACCEPTANCE, ReqColumns
from lightserve.router.scheduler.draft_policy import LONGEST_PAUSE, draft_cost, drafts_worth, observe_drafts

MOST = 8
ROW = np.array([2])


def observe(columns: ReqColumns, proposed: int, accepted: int, cost: float) -> None:
    observe_drafts(columns, ROW, DraftColumns(int64s([70]), int32s([proposed]), int32s([accepted])), cost)


def worth(columns: ReqColumns, cost: float) -> int:
    return int(drafts_worth(columns, ROW, np.array([MOST]), cost).item())


def decodes_and_drafts(columns: ReqColumns, cost: float, decodes: int) -> int:
    """Drafts of so many decodes of a request that never gets one accepted."""
    drafts = 0
    for _ in range(decodes):
        count = worth(columns, cost)
        drafts += count
        if count:
            observe(columns, count, 0, cost)
    return drafts


@pytest.mark.parametrize(("decodes", "least", "most"), [(1, 0.02, 0.05), (64, 0.1, 0.3), (1000, 0.7, 0.9)])
def test_drafts_cost_more_beside_many_decodes(decodes: int, least: float, most: float) -> None:
    assert least < draft_cost(decodes, 256.0) < most


def test_without_a_cost_every_request_has_all_drafts() -> None:
    columns = ReqColumns(4)
    observe(columns, MOST, 0, draft_cost(4, 0.0))

    assert worth(columns, draft_cost(4, 0.0)) == MOST


@pytest.mark.parametrize("cost", [0.03, 0.1, 0.4, 0.8])
def test_a_request_that_never_repeats_itself_loses_little(cost: float) -> None:
    """In the time of 20 decodes it finds out, and then it loses less than one in a hundred."""
    columns = ReqColumns(4)

    begin = decodes_and_drafts(columns, cost, 50)
    decodes_and_drafts(columns, cost, 500)
    later = decodes_and_drafts(columns, cost, 2000)

    assert begin * cost < 5
    assert later * cost < 0.01 * 2000


@pytest.mark.parametrize("cost", [0.03, 0.1, 0.4])
def test_all_drafts_come_back_when_a_request_begins_to_repeat_itself(cost: float) -> None:
    columns = ReqColumns(4)
    decodes_and_drafts(columns, cost, 1000)

    counts = []
    for _ in range(LONGEST_PAUSE + 40):
        counts.append(worth(columns, cost))
        if counts[-1]:
            observe(columns, counts[-1], counts[-1], cost)

    assert counts[-1] == MOST
    assert 0 not in counts[LONGEST_PAUSE + 1 :]


def test_a_cheap_draft_is_worth_more_than_an_expensive_one() -> None:
    columns = ReqColumns(4)
    columns.acceptance[:] = 0.52

    assert [worth(columns, cost) for cost in (0.03, 0.2, 0.6)] == [4, 2, 1]


def test_a_draft_that_is_never_accepted_is_not_tried_though_those_before_it_are_good() -> None:
    columns = ReqColumns(4)

    counts = []
    for _ in range(400):
        counts.append(worth(columns, 0.1))
        observe(columns, counts[-1], min(counts[-1], 2), 0.1)

    assert counts[20:].count(2) > 0.95 * len(counts[20:])


def test_what_is_no_longer_tried_is_tried_again_some_day() -> None:
    columns = ReqColumns(4)
    for _ in range(30):
        observe(columns, MOST, 2, 0.1)

    counts = []
    for _ in range(600):
        counts.append(worth(columns, 0.1))
        observe(columns, counts[-1], counts[-1], 0.1)

    assert counts[0] == 2
    assert counts[-1] == MOST


def test_requests_that_are_never_drafted_well_say_nothing_of_the_others() -> None:
    columns, rows = ReqColumns(4), np.array([0, 1])
    for _ in range(200):
        observe_drafts(columns, rows, DraftColumns(int64s([7, 8]), int32s([4, 4]), int32s([4, 0])), 0.1)

    assert drafts_worth(columns, rows, np.array([4, 4]), 0.1)[0] == 4


@pytest.mark.parametrize("seed", range(20))
def test_no_other_drafts_give_more_tokens_in_the_time(seed: int) -> None:
    rng = np.random.default_rng([seed, *np.random.default_rng().integers(2**31, size=1)])
    columns, rows = ReqColumns(5), np.array([3, 0, 4])
    columns.acceptance[rows] = rng.random(3)
    allowed, cost = rng.integers(0, 4, size=3), rng.uniform(0.03, 0.9)

    def tokens_over_time(counts: tuple[int, ...]) -> float:
        chances = [columns.acceptance[row] ** j for row, k in zip(rows, counts, strict=True) for j in range(1, k + 1)]
        return float((3 + sum(chances)) / (1 + cost * len(chances) / 3))

    counts = drafts_worth(columns, rows, allowed, cost)

    is_tried = columns.draft_pause[rows] > 0
    assert (counts[is_tried] == 1).all()
    best = max(map(tokens_over_time, itertools.product(*(range(most + 1) for most in allowed))))
    assert tokens_over_time(tuple(np.where(is_tried, 0, counts))) == pytest.approx(best)


def test_a_step_without_a_proposal_says_nothing_of_the_drafts_that_are_proposed() -> None:
    columns = ReqColumns(4)

    for _ in range(20):
        observe(columns, 0, 0, 0.03)
        columns.draft_pause[ROW] = 0

    assert columns.acceptance[ROW] == FIRST_ACCEPTANCE
    assert worth(columns, 0.03) == 1  # tried: a step would compute what nobody proposes
    columns.draft_pause[ROW] = 0
    assert drafts_worth(columns, ROW, np.array([MOST]), 0.03, leaves_out=True).item() > 1


@pytest.mark.parametrize("cost", [0.03, 0.1, 0.4, 0.8])
def test_a_request_without_proposals_tries_as_often_as_it_costs_little(cost: float) -> None:
    """Not more and more seldom: refused drafts say that others would be refused, missing ones do not."""
    columns = ReqColumns(4)

    counts = []
    for _ in range(1000):
        counts.append(worth(columns, cost))
        if counts[-1]:
            observe(columns, 0, 0, cost)

    later = counts[-300:]
    assert sum(later) * cost < 0.02 * len(later)
    assert sum(later) >= len(later) // LONGEST_PAUSE
    assert abs(sum(later) - sum(counts[-600:-300])) <= 1


def test_a_draft_that_is_left_out_is_tried_in_every_step() -> None:
    """A CPU computes no draft that nobody proposes, so the router hears nothing of it."""
    columns = ReqColumns(4)
    columns.acceptance[:] = 0.0

    counts = [drafts_worth(columns, ROW, np.array([MOST]), 0.4, leaves_out=True).item() for _ in range(30)]
    observe(columns, 1, 0, 0.4)

    assert counts == [1] * 30
    assert drafts_worth(columns, ROW, np.array([MOST]), 0.4, leaves_out=True).item() == 0


@pytest.mark.parametrize("is_proposed", [True, False], ids=["refused", "missing"])
@pytest.mark.parametrize("weight_read_tokens", [1.5, 256.0], ids=["cpu", "gpu"])
@pytest.mark.parametrize("count", [1, 4, 64, 256])
def test_drafts_that_are_never_accepted_cost_less_than_a_fiftieth(
    count: int, weight_read_tokens: float, is_proposed: bool
) -> None:
    """Time is counted in steps without drafts. Each token of the step takes its share, as draft_cost says."""
    columns, rows = ReqColumns(count), np.arange(count)
    cost, ids, none = draft_cost(count, weight_read_tokens), np.arange(count), np.zeros(count, dtype=np.int64)
    seconds = []

    for _ in range(1000):
        drafts = drafts_worth(columns, rows, np.full(count, 4), cost)
        seconds.append(1 + cost * drafts.sum() / count)
        has_drafts = drafts > 0
        proposed = drafts if is_proposed else none
        result = DraftColumns(int64s(ids[has_drafts]), int32s([*proposed[has_drafts]]), int32s([*none[has_drafts]]))
        observe_drafts(columns, rows[has_drafts], result, cost)

    assert np.mean(seconds[300:]) < 1.02
    assert np.sum(seconds[:300]) < 300 + 20  # what it takes to learn that
