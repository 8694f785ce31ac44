"""Tickets of a decode engine: slots are reserved, filled and freed, whatever the order of what happens."""

from __future__ import annotations

import numpy as np
import pytest

from lightserve.io_struct import GenerationParams, KvMissing, KvReceived, KvTicket, KvWanted
from lightserve.router.kv_pool import KvPool
from lightserve.router.kv_tiers.incoming import IncomingKv
from lightserve.router.kv_tiers.tiers import ROOM_PER_REQ
from lightserve.router.req import Req

POOL = 1024


class Inbox:
    addresses = ("there",)

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)


class Decode:
    """The router of a decode engine, without its workers."""

    def __init__(self) -> None:
        self.pool, self.sent, self.inbox = KvPool(POOL), [], Inbox()  # type: ignore[var-annotated]
        self.incoming = IncomingKv(self.pool, self.sent.append)
        self.incoming.connect(self.inbox)  # type: ignore[arg-type]

    def offer(self, req_id: int, ticket: int, length: int = 300, first: int = 0) -> Req:
        prompt = np.arange(first, first + length, dtype=np.int32)
        req = Req(req_id, prompt, GenerationParams.of(max_new_tokens=4), 4, ())
        self.incoming.offer(req, KvTicket(ticket, 10.0, min_tokens=64))
        return req


@pytest.fixture
def decode() -> Decode:
    return Decode()


def test_slots_are_reserved_before_the_prompt_is_asked_for(decode: Decode) -> None:
    req = decode.offer(1, 7)

    assert decode.incoming.must_wait(req, 0)

    assert decode.sent == [KvWanted(1, 7, 0, 4, ("there",))]  # type: ignore[arg-type]
    (expect,) = decode.incoming.take_expects()
    assert len(expect.slots) == 256 == decode.pool.used
    assert decode.incoming.must_wait(req, 0)  # until they have come
    decode.incoming.finish(KvReceived(7, 4))
    assert not decode.incoming.must_wait(req, 0)
    assert decode.pool.cached_len(req) == 256
    assert decode.pool.used == 0


def test_what_has_come_is_used_and_the_rest_is_freed_and_reported(decode: Decode) -> None:
    req = decode.offer(1, 7)
    decode.incoming.must_wait(req, 0)

    decode.incoming.finish(KvReceived(7, 3))

    assert decode.pool.cached_len(req) == 192
    assert decode.pool.slots.num_used == 192
    assert decode.sent[-1] == KvMissing(1, 7)
    assert (decode.incoming.num_wanted, decode.incoming.num_received, decode.incoming.num_given_up) == (256, 192, 64)


@pytest.mark.parametrize("was_started", [True, False])
def test_tokens_of_a_cancelled_ticket_are_given_up_only_if_a_prefill_engine_had_the_prompt(
    decode: Decode, was_started: bool
) -> None:
    req = decode.offer(1, 7)
    decode.incoming.must_wait(req, 0)

    decode.incoming.cancel(1, 7, was_started)
    decode.incoming.finish(KvReceived(7, 0))

    assert decode.inbox.cancelled == [7]
    assert not decode.incoming.must_wait(req, 0)
    assert decode.incoming.num_given_up == (256 if was_started else 0)
    assert KvMissing(1, 7) not in decode.sent


def test_nothing_is_reserved_without_room_and_nothing_is_asked_for_if_little_is_missing(decode: Decode) -> None:
    crowded = decode.offer(1, 7, POOL - 2 * ROOM_PER_REQ)
    assert not decode.incoming.must_wait(crowded, 10)
    assert decode.sent == []
    tiny = decode.offer(3, 9, 60, first=9000)
    assert not decode.incoming.must_wait(tiny, 0)
    assert decode.sent[-1] == KvWanted(3, 9)


def test_a_request_that_comes_back_waits_for_its_new_ticket_only(decode: Decode) -> None:
    first = decode.offer(1, 7)
    decode.incoming.must_wait(first, 0)
    decode.incoming.drop(1)
    assert decode.inbox.cancelled == [7]
    again = decode.offer(1, 8, first=4000)
    assert decode.incoming.must_wait(again, 0)

    decode.incoming.finish(KvReceived(7, 0))  # the old one ends after that

    assert decode.incoming.must_wait(again, 0)
    assert KvMissing(1, 7) not in decode.sent  # it was not wanted any more
    decode.incoming.finish(KvReceived(8, 4))
    assert not decode.incoming.must_wait(again, 0)
    assert decode.pool.used == 0


def test_counters_never_decrease_when_all_kv_is_lost(decode: Decode) -> None:
    req = decode.offer(1, 7)
    decode.incoming.must_wait(req, 0)

    decode.pool.reset()
    decode.incoming.clear()
    decode.incoming.finish(KvReceived(7, 4))  # of workers that are gone

    assert (decode.incoming.num_wanted, decode.incoming.num_received, decode.incoming.num_given_up) == (256, 0, 256)
    assert not decode.incoming.must_wait(req, 0)
    assert decode.pool.slots.num_used == 0
