"""Results of several tokens a request, in columns, against the same tokens one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lightserve.ipc.codec import encode
from lightserve.ipc.worker_calls import RUN
from lightserve.messages.int_arrays import BLOCK, Tails
from lightserve.messages.step import NO_TOKENS, StepResult, Token, TokenColumns, TokenOut, joined_columns
from lightserve.router.scheduler import Scheduler
from test.router.processing import process_tokens
from test.router.scheduler.test_scheduler import EOS, make, make_req

ReqTokenIds = list[tuple[int, list[int]]]


def random_tokens(rng: random.Random, first_id: int, most: int) -> ReqTokenIds:
    return [(first_id + i, [rng.randrange(99) for _ in range(rng.randint(1, most))]) for i in range(rng.randrange(6))]


def outs_of(tokens: ReqTokenIds) -> list[TokenOut]:
    return [TokenOut(req_id, Token(token_id)) for req_id, token_ids in tokens for token_id in token_ids]


@pytest.mark.parametrize("most", [1, 4])
def test_columns_hold_the_tokens_of_every_request(most: int) -> None:
    rng = random.Random(most)
    for _ in range(100):
        parts = [random_tokens(rng, first_id, rng.choice([1, most])) for first_id in (0, 10, 20)]
        whole = [one for part in parts for one in part]
        columns = joined_columns([TokenColumns.of(part) for part in parts])
        is_chosen = np.array([rng.random() < 0.5 for _ in whole], dtype=np.bool_)

        assert len(columns) == len(whole)
        assert columns.outs() == outs_of(whole)
        assert columns.each_counts.tolist() == [len(token_ids) for _, token_ids in whole]
        assert columns.where(is_chosen).outs() == outs_of([one for one, c in zip(whole, is_chosen, strict=True) if c])
        assert RUN.decode_reply(encode(StepResult(plain=columns))).tokens == outs_of(whole)


def test_one_token_each_needs_no_counts() -> None:
    assert not len(joined_columns([TokenColumns.of([(1, [5])]), NO_TOKENS, TokenColumns.of([(2, [6])])]).counts)


def test_tails_take_any_number_of_values_for_each_row() -> None:
    rng = np.random.default_rng(0)
    tails, taken = Tails(40), [list[int]() for _ in range(40)]
    expected = [list[int]() for _ in range(40)]

    for number in range(200):
        rows = np.flatnonzero(rng.random(40) < 0.7)
        counts = rng.integers(1, BLOCK + 1 if number % 5 == 0 else 4, len(rows), dtype=np.int32)
        values = rng.integers(0, 99, int(counts.sum()), dtype=np.int32)
        for row in tails.full(rows, counts):
            taken[row] += tails.take(row).tolist()
        tails.append(rows, values, counts)
        for row, own in zip(rows.tolist(), np.split(values, np.cumsum(counts)[:-1]), strict=True):
            expected[row] += own.tolist()

    assert [values + tails.take(row).tolist() for row, values in enumerate(taken)] == expected


def decoding(*token_limits: int) -> Scheduler:
    """Requests 0, 1 ... that have one token, with a step in flight that samples the next."""
    scheduler = make(10_000, batch_max_tokens=256, chunk_size=256)
    for req_id, most in enumerate(token_limits):
        scheduler.add(make_req(req_id, [1, 2, 3 + req_id], most))
    scheduler.next_step()
    process_tokens(scheduler, [TokenOut(req_id, Token(50)) for req_id in range(len(token_limits))])
    scheduler.next_step()
    scheduler.complete_step()
    return scheduler


def test_requests_get_all_their_tokens_in_one_call_unless_one_may_end_them() -> None:
    scheduler = decoding(500, 500, 4, 500, 500)
    reqs = list(scheduler.only_group.batch)
    tokens = [(0, [51]), (1, [52, 53]), (2, [54, 55, 56]), (3, [57, EOS, 58]), (4, list(range(100, 101 + BLOCK)))]

    is_known = scheduler.process_plain(TokenColumns.of([*tokens, (9, [60, 61])]))
    for req_id, token_ids in tokens[2:]:
        scheduler.process_req([TokenOut(req_id, Token(token_id)) for token_id in token_ids])

    assert is_known.tolist() == [True, True, False, False, False, False]  # request 9 does not run
    assert [req.output_ids[1:] for req in reqs] == [[51], [52, 53], [54, 55, 56], [57, EOS], tokens[4][1]]
    assert [req.in_flight for req in reqs if req.finish_reason is None] == [0, 0, 0]
    assert scheduler.only_group.num_forced == 1 + 2 + 1 + BLOCK
    step = scheduler.next_step()
    assert step is not None
    assert {row.req_id: len(row.slots) for row in step.rows} == {0: 1, 1: 2, 4: 1 + BLOCK}


@pytest.mark.parametrize("ended", [0, 1])
@pytest.mark.parametrize("place", range(3))
def test_an_end_token_counts_for_its_request_wherever_it_is(ended: int, place: int) -> None:
    token_ids = [[51, 52, 53], [54, 55, 56]]
    token_ids[ended][place] = EOS

    is_known = decoding(50, 50).process_plain(TokenColumns.of(list(enumerate(token_ids))))

    assert is_known.tolist() == [ended == 1, ended == 0]


def test_a_request_without_a_step_in_flight_gets_no_tokens() -> None:
    scheduler = decoding(50)

    assert scheduler.process_plain(TokenColumns.of([(0, [51, 52])])).tolist() == [True]
    assert scheduler.process_plain(TokenColumns.of([(0, [53, 54])])).tolist() == [False]
    assert scheduler.process_req([TokenOut(0, Token(53))]) is None
