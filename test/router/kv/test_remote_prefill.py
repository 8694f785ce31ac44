"""Transfers of a decode engine: slots are reserved, filled and freed, whatever the order of what happens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lightserve.messages.cluster import KvCancel, KvTransferParams, KvTransferTimeout, RemotePrefillRequest
from lightserve.messages.control import SlidingWindowKv
from lightserve.messages.params import GenerationParams
from lightserve.messages.worker_calls import KvReceived
from lightserve.router.crash_isolation import CrashIsolation
from lightserve.router.kv.group_pool import KvGroupPool
from lightserve.router.kv.pool import KvPool
from lightserve.router.kv.remote_prefill import GRACE_S, RemoteKvSource
from lightserve.router.kv.sliding_window import SlidingWindowPool
from lightserve.router.kv.source import Activity, KvTransfers, LoadContext
from lightserve.router.policy import Fifo
from lightserve.router.req import Req
from lightserve.router.req_queue import ReqQueue
from lightserve.router.scheduler.batch import RunningBatch
from lightserve.router.scheduler.lora_slots import LoraSlots

POOL = 1024
TIMEOUT_S = 10.0


class FakeReceiver:
    addresses = ("there",)

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def cancel(self, transfer_id: int) -> None:
        self.cancelled.append(transfer_id)


class Decode:
    """The router of a decode engine, without its workers."""

    def __init__(self, groups: Sequence[KvGroupPool] = ()) -> None:
        self.pool, self.sent, self.receiver = KvPool(POOL, groups), [], FakeReceiver()  # type: ignore[var-annotated]
        RunningBatch(self.pool, CrashIsolation(), LoraSlots(0), 4)  # groups look at it
        self.remote_kv = RemoteKvSource(self.pool, self.sent.append)
        self.remote_kv.use_receiver(self.receiver)  # type: ignore[arg-type]
        self.queue = ReqQueue(Fifo())

    def offer(self, req_id: int, transfer_id: int, length: int = 300, first: int = 0) -> Req:
        prompt = np.arange(first, first + length, dtype=np.int32)
        req = Req(req_id, prompt, GenerationParams.of(max_new_tokens=4), 4, ())
        req.kv_transfer_params = KvTransferParams(transfer_id, TIMEOUT_S, min_tokens=64)
        self.queue.add(req)
        return req

    def must_wait(self, req: Req, has_room: bool = True, now_s: float = 0.0) -> bool:
        """As admission does it."""
        wait = self.remote_kv.wait_of(req, LoadContext(now_s, lambda tokens: has_room))
        if wait is not None:
            self.queue.block(req, wait)
        return wait is not None

    def drop(self, req: Req) -> None:
        self.remote_kv.drop(req)
        self.queue.remove(req)


@pytest.fixture
def decode() -> Decode:
    return Decode()


def test_slots_are_reserved_before_the_prompt_is_asked_for(decode: Decode) -> None:
    req = decode.offer(1, 7)

    assert decode.must_wait(req)

    assert decode.sent == [RemotePrefillRequest(1, 7, 0, 4, ("there",))]  # type: ignore[arg-type]
    decode.remote_kv.take(transfers := KvTransfers(), Activity.WAITING)
    (recv,) = transfers.recvs
    assert len(recv.slots) == 256 == decode.pool.used
    assert not decode.queue.is_ready(req)  # until they have come
    assert decode.remote_kv.num_waiting == 1
    decode.remote_kv.finish(KvReceived(7, 4))
    assert decode.queue.is_ready(req)
    assert not decode.must_wait(req)
    assert decode.pool.cached_len(req) == 256
    assert decode.pool.used == 0


def test_what_has_come_is_used_and_the_rest_is_freed_and_reported(decode: Decode) -> None:
    req = decode.offer(1, 7)
    decode.must_wait(req)

    decode.remote_kv.finish(KvReceived(7, 3))

    assert decode.pool.cached_len(req) == 192
    assert decode.pool.slots.num_used == 192
    assert decode.sent[-1] == KvTransferTimeout(1, 7)
    assert (decode.remote_kv.num_wanted, decode.remote_kv.num_received, decode.remote_kv.num_given_up) == (256, 192, 64)


@pytest.mark.parametrize("was_started", [True, False])
def test_tokens_of_a_cancelled_transfer_are_given_up_only_if_a_prefill_engine_had_the_prompt(
    decode: Decode, was_started: bool
) -> None:
    req = decode.offer(1, 7)
    decode.must_wait(req)

    decode.remote_kv.cancel(KvCancel(1, 7, was_started))
    decode.remote_kv.finish(KvReceived(7, 0))

    assert decode.receiver.cancelled == [7]
    assert not decode.must_wait(req)
    assert decode.remote_kv.num_given_up == (256 if was_started else 0)
    assert KvTransferTimeout(1, 7) not in decode.sent


def windowed() -> tuple[Decode, SlidingWindowPool]:
    group = SlidingWindowPool(SlidingWindowKv(400, window=100, kept_tokens=163), POOL)
    return Decode([group]), group


def test_a_window_comes_with_the_last_blocks_of_a_prompt_except_for_what_the_next_token_does_not_reach() -> None:
    decode, group = windowed()
    req = decode.offer(1, 7)
    assert decode.must_wait(req)
    decode.remote_kv.take(transfers := KvTransfers(), Activity.WAITING)
    (recv,) = transfers.recvs
    assert [len(slots) for slots in (recv.slots, *recv.group_slots)] == [256, 128]
    assert group.used == 128

    decode.remote_kv.finish(KvReceived(7, 6))

    prefix = decode.pool.cached_prefix(req)
    assert prefix.usable_len == 256
    assert group.slots.has_slot(prefix.slots).tolist() == [False] * 157 + [True] * 99
    assert group.slots.slots_of(prefix.slots)[157:].tolist() == recv.group_slots[0][29:].tolist()
    assert group.used == decode.pool.used == 0


def test_without_its_window_a_prompt_is_computed_and_its_slots_are_freed() -> None:
    decode, group = windowed()
    req = decode.offer(1, 7)
    decode.must_wait(req)

    decode.remote_kv.finish(KvReceived(7, 5))  # the last block of the window is missing

    assert decode.pool.cached_len(req) == 0
    assert group.used == decode.pool.used == 0
    assert group.slots.available == 400
    assert decode.sent[-1] == KvTransferTimeout(1, 7)


def test_a_transfer_waits_until_its_window_has_room() -> None:
    decode, group = windowed()
    group.slots.alloc(300)

    assert not decode.must_wait(decode.offer(1, 7))

    assert decode.sent == []


def test_nothing_is_reserved_without_room_and_nothing_is_asked_for_if_little_is_missing(decode: Decode) -> None:
    crowded = decode.offer(1, 7)
    assert not decode.must_wait(crowded, has_room=False)
    assert decode.sent == []
    tiny = decode.offer(3, 9, 60, first=9000)
    assert not decode.must_wait(tiny)
    assert decode.sent[-1] == RemotePrefillRequest(3, 9)


def test_a_request_that_comes_back_waits_for_its_new_transfer_only(decode: Decode) -> None:
    first = decode.offer(1, 7)
    decode.must_wait(first)
    decode.drop(first)
    assert decode.receiver.cancelled == [7]
    again = decode.offer(1, 8, first=4000)
    assert decode.must_wait(again)

    decode.remote_kv.finish(KvReceived(7, 0))  # the old one ends after that

    assert not decode.queue.is_ready(again)
    assert KvTransferTimeout(1, 7) not in decode.sent  # it was not wanted any more
    decode.remote_kv.finish(KvReceived(8, 4))
    assert decode.queue.is_ready(again)
    assert decode.pool.used == 0


def test_counters_never_decrease_when_all_kv_is_lost(decode: Decode) -> None:
    req = decode.offer(1, 7)
    decode.must_wait(req)

    decode.pool.reset()
    decode.queue.end_waits()
    decode.remote_kv.finish(KvReceived(7, 4))  # of workers that are gone

    assert (decode.remote_kv.num_wanted, decode.remote_kv.num_received, decode.remote_kv.num_given_up) == (256, 0, 256)
    assert not decode.must_wait(req)
    assert decode.pool.slots.num_used == 0


def test_requests_with_the_same_prefix_wait_for_one_transfer(decode: Decode) -> None:
    first, other, different = decode.offer(1, 7), decode.offer(2, 8, 290), decode.offer(3, 9, first=5000)

    assert decode.must_wait(first)
    assert decode.must_wait(other)
    assert decode.must_wait(different)

    assert [message.transfer_id for message in decode.sent] == [7, 9]
    assert decode.remote_kv.num_waiting == 3
    decode.remote_kv.finish(KvReceived(7, 4))
    assert decode.queue.is_ready(first)
    assert decode.queue.is_ready(other)
    assert not decode.queue.is_ready(different)


def test_a_request_computes_its_prompt_if_the_workers_never_end_its_transfer(decode: Decode) -> None:
    req = decode.offer(1, 7)
    decode.must_wait(req)
    assert decode.queue.next_deadline_s() == TIMEOUT_S + GRACE_S

    decode.queue.end_late_waits(TIMEOUT_S + GRACE_S)

    assert decode.queue.is_ready(req)
    assert not decode.must_wait(req, now_s=TIMEOUT_S + GRACE_S)
    assert decode.receiver.cancelled == [7]
    assert decode.sent[-1] == KvTransferTimeout(1, 7)
    assert decode.pool.used == 256  # a worker may still write there
    decode.remote_kv.finish(KvReceived(7, 0))
    assert decode.sent[-1] == KvTransferTimeout(1, 7)
    assert decode.pool.used == 0
