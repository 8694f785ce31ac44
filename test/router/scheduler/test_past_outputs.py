"""Drafts may come from the outputs of requests that have ended: whose outputs, and how many."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from lightserve.messages.int_arrays import int32s
from lightserve.messages.params import GenerationParams
from lightserve.messages.step import NewReq
from lightserve.router.req import Req
from lightserve.router.scheduler.past_outputs import MAX_SALTS, PastOutputs

IDS = count()


def ended(output: list[int], salt: str = "a", **options: Any) -> Req:
    req = make(salt, **options)
    req.continue_from(output, now_s=0.0)
    return req


def make(salt: str = "a", keeps_kv_cached: bool = True, **params: Any) -> Req:
    wanted = GenerationParams.of(max_new_tokens=100, **params)
    return Req(next(IDS), int32s([1, 2, 3]), wanted, 100, (), salt=salt, keeps_kv_cached=keeps_kv_cached)


def predicted(past: PastOutputs, req: Req) -> tuple[int, ...]:
    new: NewReq = past.predict(req, req.as_new())
    return new.sampling.prediction_ids


def test_a_request_sees_outputs_of_its_salt_with_the_newest_first() -> None:
    past = PastOutputs(10)
    for output, salt in (([5, 6], "a"), ([7, 8], "b"), ([9, 10, 11], "a")):
        past.add(ended(output, salt))

    assert predicted(past, make("a")) == (9, 10, 11, 5, 6)
    assert predicted(past, make("b")) == (7, 8)
    assert predicted(past, make("c")) == ()


@pytest.mark.parametrize(
    ("fields", "ids"),
    [({"prediction_ids": (4, 5)}, (4, 5)), ({"speculative": False}, ()), ({"keeps_kv_cached": False}, ())],
)
def test_a_request_with_a_prediction_or_without_drafts_or_cache_sees_none(
    fields: dict[str, Any], ids: tuple[int, ...]
) -> None:
    past = PastOutputs(10)
    past.add(ended([5, 6]))

    assert predicted(past, make(**fields)) == ids


def test_outputs_of_private_requests_and_single_tokens_are_not_kept() -> None:
    past = PastOutputs(10)
    past.add(ended([5, 6], keeps_kv_cached=False))
    past.add(ended([7]))

    assert predicted(past, make()) == ()


def test_the_oldest_outputs_make_room() -> None:
    few, short, none = PastOutputs(2), PastOutputs(10, max_tokens=5), PastOutputs(0)
    for past in (few, short, none):
        for first in range(10, 50, 10):
            past.add(ended([first, first + 1]))

    assert predicted(few, make()) == predicted(short, make()) == (40, 41, 30, 31)
    assert predicted(none, make()) == ()


def test_one_long_output_is_cut() -> None:
    past = PastOutputs(10, max_tokens=5)
    past.add(ended(list(range(10, 30))))

    assert predicted(past, make()) == (10, 11, 12, 13, 14)


def test_the_salt_that_was_used_least_recently_makes_room() -> None:
    past = PastOutputs(10)
    for number in range(MAX_SALTS):
        past.add(ended([5, 6], str(number)))
    predicted(past, make("0"))
    past.add(ended([5, 6], "new"))

    assert predicted(past, make("1")) == ()
    assert predicted(past, make("0")) == predicted(past, make("new")) == (5, 6)
