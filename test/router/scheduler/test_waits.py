"""What waiting requests wait for, in the whole scheduler: none of them hides those that could run."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.cluster import KvTransferParams, KvTransferTimeout, RemotePrefillRequest
from lightserve.messages.control import CpuKvSize
from lightserve.messages.step import Step, Token, TokenOut
from lightserve.messages.worker_calls import KvLoaded, KvReceived
from lightserve.router.kv.pool import KvPool
from lightserve.router.kv.radix_cache import Ids, common_len
from lightserve.router.kv.remote_prefill import RemoteKvSource
from lightserve.router.kv.tiers.storage import LOOKUP_S
from lightserve.router.kv.tiers.tiers import KvTiers
from lightserve.router.policy import LOOK_AHEAD, make_policy
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, LoraSlots, Scheduler, SchedulerLimits, waits
from test.cpu_time import growth
from test.router.processing import process_tokens
from test.router.scheduler.test_scheduler import make_req

LIMITS = SchedulerLimits(max_running=256, batch_max_tokens=8192, chunk_size=2048)
OTHER = 50  # a token that ends no request


def prompt(req_id: int, length: int) -> list[int]:
    return [1000 + req_id, *range(length - 1)]


def finish(scheduler: Scheduler, step: Step | None) -> None:
    """The step is back with a token of each request whose prompt is computed."""
    assert step is not None
    reqs = [scheduler.only_group.batch.find(row.req_id) for row in step.rows]
    done = [req.req_id for req in reqs if req is not None and req.in_flight]
    process_tokens(scheduler, [TokenOut(req_id, Token(OTHER)) for req_id in done])


class Decode:
    """The router of a decode engine. No transfer ends before the test says so."""

    addresses = ("there",)

    def __init__(self, num_slots: int, limits: SchedulerLimits = LIMITS) -> None:
        self.scheduler = Scheduler(GroupScheduler(KvPool(num_slots), limits, make_policy("fifo")))
        self.sent: list[RemotePrefillRequest | KvTransferTimeout] = []
        self.remote_kv = RemoteKvSource(self.scheduler.only_group.pool, self.sent.append)
        self.scheduler.only_group.add_source(self.remote_kv)
        self.remote_kv.use_receiver(self)  # type: ignore[arg-type]

    def cancel(self, transfer_id: int) -> None:
        """Nothing to do."""

    def add(self, req: Req, is_remote: bool = True) -> Req:
        if is_remote:
            req.kv_transfer_params = KvTransferParams(req.req_id, 120.0, min_tokens=BLOCK_TOKENS)
        self.scheduler.add(req)
        return req

    def step(self) -> None:
        step = self.scheduler.next_step()
        if step is not None:
            finish(self.scheduler, step)

    @property
    def wanted(self) -> list[int]:
        """The requests whose prompts were asked for."""
        return [
            message.req_id for message in self.sent if isinstance(message, RemotePrefillRequest) and message.num_blocks
        ]


def test_any_number_of_requests_may_wait_for_transfers_and_a_short_one_passes() -> None:
    decode = Decode(1_000_000)
    count = 2 * LOOK_AHEAD
    for req_id in range(count):
        decode.add(make_req(req_id, prompt(req_id, 640)))
    short = decode.add(make_req(count, [1, 2, 3]), is_remote=False)

    decode.step()

    assert decode.wanted == list(range(count))
    assert short.num_admissions == 1
    assert (decode.scheduler.num_waiting, decode.scheduler.num_blocked) == (0, count)


def test_requests_without_a_slot_for_their_adapters_do_not_hide_those_of_the_base_model() -> None:
    loras = LoraSlots(8)
    count = 8 + 2 * LOOK_AHEAD
    loras.loaded = set(range(count))
    scheduler = Scheduler(GroupScheduler(KvPool(1_000_000), LIMITS, make_policy("fifo"), loras=loras))
    for req_id in range(count):
        scheduler.add(make_req(req_id, prompt(req_id, 20), 200, lora_id=req_id, salt=f"lora {req_id}"))
    base = [make_req(req_id, prompt(req_id, 20), 200) for req_id in range(count, count + 20)]
    for req in base:
        scheduler.add(req)

    finish(scheduler, scheduler.next_step())

    assert scheduler.num_running == 8 + len(base)
    assert (scheduler.num_waiting, scheduler.num_blocked) == (0, 2 * LOOK_AHEAD)


def test_the_slot_of_an_adapter_that_ends_goes_to_the_first_that_waits_and_to_all_of_its_requests() -> None:
    loras = LoraSlots(1)
    loras.loaded = set(range(4))
    scheduler = Scheduler(GroupScheduler(KvPool(10_000), LIMITS, make_policy("fifo"), loras=loras))
    for req_id, lora_id in enumerate([0, 1, 2, 1, 3]):
        scheduler.add(make_req(req_id, prompt(req_id, 20), 1, lora_id=lora_id, salt=f"lora {lora_id}"))

    admitted = []
    while (step := scheduler.next_step()) is not None and step.rows:
        admitted.append([new.req_id for new in step.new])
        finish(scheduler, step)

    assert admitted == [[0], [1, 3], [2], [4]]


def test_an_adapter_slot_is_not_kept_for_a_request_that_waits_for_something_else() -> None:
    """Nothing else would happen: the engine would idle until the transfer ends."""
    decode = Decode(10_000)
    loras = decode.scheduler.only_group.loras
    loras.count, loras.loaded = 1, {0, 1}
    loras.clear()
    blocker = make_req(0, prompt(0, 20), 1, lora_id=0, salt="lora 0")
    decode.add(blocker, is_remote=False)
    decode.step()
    decode.scheduler.abort(0)
    for req_id in (1, 2):
        req = make_req(req_id, prompt(req_id, 640), lora_id=req_id - 1, salt=f"lora {req_id - 1}")
        decode.add(req, is_remote=req_id == 1)

    step = decode.scheduler.next_step()

    assert step is not None
    assert [new.req_id for new in step.new] == [2]


class Lost:
    """A tier that never replies, and the replies."""

    def lookup(self, command: object) -> Any:
        return self

    def add_done_callback(self, callback: object) -> None:
        """It is never called."""

    fetch = flush = lookup


def test_aborted_requests_leave_no_deadlines_and_hide_none() -> None:
    scheduler = Scheduler(GroupScheduler(KvPool(100_000), LIMITS))
    tiers = KvTiers(scheduler.only_group.pool, CpuKvSize(100, 65_536, ("remote",)))
    scheduler.only_group.add_source(tiers)
    tiers.storage.connect(Lost(), lambda: None)
    for req_id in range(100):
        scheduler.add(make_req(req_id, prompt(req_id, 640)))
        scheduler.next_step(now_s=100.0)
        scheduler.abort(req_id)
    assert scheduler.only_group.queue.next_deadline_s() is None

    scheduler.add(make_req(1000, prompt(1000, 640)))
    assert scheduler.next_step(now_s=105.0) is None

    assert scheduler.only_group.queue.next_deadline_s() == 105.0 + LOOKUP_S
    assert scheduler.next_step(now_s=105.0 + LOOKUP_S) is not None


def test_requests_that_wait_for_a_prefix_compare_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def counted(a: Ids, b: Ids) -> int:
        compared.append(len(a))
        return common_len(a, b)

    monkeypatch.setattr(waits, "common_len", counted)
    scheduler = Scheduler(
        GroupScheduler(KvPool(100_000), SchedulerLimits(max_running=256, batch_max_tokens=256, chunk_size=256))
    )
    shared = list(range(4000))
    followers = [make_req(req_id, [*shared, req_id]) for req_id in range(1, 65)]
    for req in (make_req(0, shared), *followers):
        scheduler.add(req)

    while scheduler.num_running < 65:
        finish(scheduler, scheduler.next_step())

    assert len(compared) == len(followers)
    assert {req.cached_len for req in followers} >= {len(shared)}


def test_requests_that_wait_for_a_prefix_start_as_soon_as_it_is_planned() -> None:
    """Long before the rest of that prompt is computed."""
    scheduler = Scheduler(
        GroupScheduler(KvPool(100_000), SchedulerLimits(max_running=8, batch_max_tokens=256, chunk_size=256))
    )
    shared = list(range(500))
    long = make_req(0, [*shared, *range(10_000, 14_000)])
    follower = make_req(1, [*shared, 7])
    for req in (long, follower):
        scheduler.add(req)

    for _ in range(3):
        finish(scheduler, scheduler.next_step())

    assert long.is_prefilling
    assert follower.cached_len >= 500 - waits.MIN_PENDING_PREFIX_TOKENS


def test_a_request_that_waits_for_a_prefix_starts_if_the_other_one_is_aborted() -> None:
    scheduler = Scheduler(
        GroupScheduler(KvPool(100_000), SchedulerLimits(max_running=8, batch_max_tokens=256, chunk_size=256))
    )
    for req_id in range(2):
        scheduler.add(make_req(req_id, [*range(4000), req_id]))
    finish(scheduler, scheduler.next_step())
    assert scheduler.num_blocked == 1

    scheduler.abort(0)
    step = scheduler.next_step()

    assert step is not None
    assert [new.req_id for new in step.new] == [1]


def decoding(num_blocked: int) -> Scheduler:
    """A decode engine with some streams, and requests that wait for transfers, adapters, a prefix and a release."""
    decode = Decode(4_000_000, SchedulerLimits(max_running=4096, batch_max_tokens=8192, chunk_size=2048))
    scheduler = decode.scheduler
    scheduler.only_group.loras.count, scheduler.only_group.loras.loaded = 1, set(range(num_blocked))
    scheduler.only_group.loras.clear()
    for req_id in range(8):
        lora_id = 0 if req_id == 0 else None
        decode.add(make_req(req_id, prompt(req_id, 20), 100_000, lora_id=lora_id), is_remote=False)
    for req_id in range(8, 8 + num_blocked):
        lora_id = req_id % 50 + 1 if req_id % 2 else None
        req = make_req(req_id, prompt(req_id, 200), lora_id=lora_id, salt=f"lora {lora_id}")
        if req_id % 3:
            decode.add(req, is_remote=lora_id is None)
        else:
            scheduler.defer(req)
    for _ in range(3):
        decode.step()
    return scheduler


def test_the_cost_of_a_step_does_not_grow_with_the_number_of_blocked_requests() -> None:
    schedulers = {count: decoding(count) for count in (4_000, 1_000)}
    assert schedulers[4_000].num_blocked > 3_000

    def plan(count: int) -> None:
        for _ in range(50):
            finish(schedulers[count], schedulers[count].next_step())

    assert growth(plan, 4_000) < 2


# memory


def test_streams_are_not_preempted_for_the_slots_of_transfers() -> None:
    decode = Decode(16_384, SchedulerLimits(max_running=64, batch_max_tokens=8192, chunk_size=2048))
    streams = [decode.add(make_req(req_id, prompt(req_id, 512), 1024), is_remote=False) for req_id in range(8)]
    for _ in range(20):
        decode.step()
    for req_id in range(100, 104):
        decode.add(make_req(req_id, prompt(req_id, 4097), 1024))

    while decode.scheduler.num_running:
        decode.step()

    assert decode.scheduler.num_preemptions == 0
    assert {stream.output_len for stream in streams} == {1024}
    assert decode.wanted  # there was room for one of them


def test_a_request_waits_for_the_slots_that_transfers_hold() -> None:
    """It would be preempted soon, or the streams would."""
    decode = Decode(1_000)
    decode.add(make_req(0, prompt(0, 600), 4))
    decode.step()
    other = decode.add(make_req(1, prompt(1, 300), 300), is_remote=False)
    decode.step()
    assert decode.scheduler.only_group.pool.loading_tokens == 576
    assert other.num_admissions == 0

    decode.remote_kv.finish(KvReceived(0, 9))
    decode.scheduler.abort(0)
    decode.step()

    assert decode.scheduler.only_group.pool.loading_tokens == 0
    assert other.num_admissions == 1


def test_requests_are_admitted_beside_pinned_prompts_only_if_all_fit() -> None:
    scheduler = Scheduler(
        GroupScheduler(KvPool(1_000), SchedulerLimits(max_running=8, batch_max_tokens=512, chunk_size=512))
    )
    pinned = make_req(-1, prompt(-1, 400), 1)
    scheduler.add(pinned)
    finish(scheduler, scheduler.next_step())
    assert scheduler.only_group.pool.pin(pinned.prompt_ids, pinned.salt) == 400
    reqs = [make_req(req_id, prompt(req_id, 100), 150) for req_id in range(4)]
    for req in reqs:
        scheduler.add(req)

    while scheduler.num_running or scheduler.num_waiting:
        finish(scheduler, scheduler.next_step())

    assert scheduler.num_preemptions == 0
    assert {req.output_len for req in reqs} == {150}


# requests that wait for room


def full_engine(num_slots: int, max_running: int = 2) -> Decode:
    """All seats are taken."""
    decode = Decode(num_slots, SchedulerLimits(max_running=max_running, batch_max_tokens=512, chunk_size=512))
    for req_id in range(max_running):
        decode.add(make_req(req_id, prompt(req_id, 20), 60), is_remote=False)
    decode.step()
    assert decode.scheduler.num_running == max_running
    return decode


def test_a_full_engine_asks_for_the_prompts_of_requests_that_wait_for_a_seat() -> None:
    decode = full_engine(10_000)
    waiting = decode.add(make_req(10, prompt(10, 640), 50))

    decode.step()

    assert decode.wanted == [10]
    decode.remote_kv.finish(KvReceived(10, 9))
    assert decode.scheduler.num_waiting == 1
    decode.scheduler.abort(0)
    decode.step()
    assert waiting.cached_len == 9 * BLOCK_TOKENS


def test_prompts_are_asked_for_in_order_and_leave_room_for_those_before_them() -> None:
    """Half of 4,000 slots less 160 of the streams. The first request needs 100 + 1,000, so the third has no room."""
    decode = full_engine(4_000)
    decode.add(make_req(10, prompt(10, 100), 1000), is_remote=False)
    decode.add(make_req(11, prompt(11, 400), 100))
    decode.add(make_req(12, prompt(12, 400), 100))
    decode.add(make_req(13, prompt(13, 100), 10))

    decode.step()

    assert decode.wanted == [11]
    decode.scheduler.abort(10)
    decode.step()
    assert decode.wanted == [11, 12, 13]


def test_a_full_engine_loads_the_prefixes_of_waiting_requests_one_after_the_other() -> None:
    scheduler = Scheduler(
        GroupScheduler(KvPool(4_000), SchedulerLimits(max_running=1, batch_max_tokens=512, chunk_size=512))
    )
    tiers = KvTiers(scheduler.only_group.pool, CpuKvSize(100, BLOCK_TOKENS * 100))
    scheduler.only_group.add_source(tiers)
    scheduler.add(make_req(0, prompt(0, 20), 200))
    finish(scheduler, scheduler.next_step())
    waiting = [make_req(req_id, prompt(req_id, 300), 4) for req_id in (1, 2)]
    for req in waiting:
        for key in tiers.offload_queue.keys_of(req, 256):
            tiers.offload_queue.host.put(key)
        scheduler.add(req)

    loads = [scheduler.next_step().loads for _ in range(2)]  # type: ignore[union-attr]

    assert [len(load) for load in loads] == [1, 0]
    tiers.finish(loads[0][0].load_id, KvLoaded(0.01))
    assert scheduler.only_group.pool.cached_len(waiting[0]) == 256
    (second,) = scheduler.next_step().loads  # type: ignore[union-attr]
    tiers.finish(second.load_id, KvLoaded(0.01))
    assert scheduler.only_group.pool.cached_len(waiting[1]) == 256


def test_a_step_hashes_one_waiting_prompt_to_find_that_nothing_is_to_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(
        GroupScheduler(KvPool(40_000), SchedulerLimits(max_running=1, batch_max_tokens=512, chunk_size=512))
    )
    tiers = KvTiers(scheduler.only_group.pool, CpuKvSize(100, BLOCK_TOKENS * 100))
    scheduler.only_group.add_source(tiers)
    for req_id in range(11):
        scheduler.add(make_req(req_id, prompt(req_id, 300), 200))
    finish(scheduler, scheduler.next_step())
    hashed: list[int] = []
    keys_of = tiers.offload_queue.keys_of

    def counted(req: Req, end: int) -> list[bytes]:
        hashed.append(req.req_id)
        return keys_of(req, end)

    monkeypatch.setattr(tiers.offload_queue, "keys_of", counted)

    counts = []
    for _ in range(12):
        finish(scheduler, scheduler.next_step())
        counts.append(len(hashed))

    assert counts == [*range(1, 10), 9, 9, 9]  # one was in the step before
