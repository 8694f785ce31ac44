"""Which adapters are on the device: slots, the order of their use, and requests that wait for one."""

from __future__ import annotations

from lightserve.messages.step import LoraPlace, Step, Token, TokenOut
from lightserve.router.kv.pool import KvPool
from lightserve.router.policy import make_policy
from lightserve.router.scheduler import GroupScheduler, LoraSlots, Scheduler, SchedulerLimits
from lightserve.router.scheduler.waits import MAX_PASSED_OVER
from test.router.processing import process_tokens
from test.router.scheduler.test_scheduler import make_req


def make(slots: int, loaded: int = 100) -> Scheduler:
    loras = LoraSlots(slots)
    loras.loaded = set(range(loaded))
    limits = SchedulerLimits(max_running=8, batch_max_tokens=64, chunk_size=64, token_ratio=0.0)
    return Scheduler(GroupScheduler(KvPool(2000), limits, make_policy("fifo"), loras=loras))


def add(scheduler: Scheduler, req_id: int, lora_id: int | None, new_tokens: int = 1) -> None:
    scheduler.add(make_req(req_id, [req_id + 1, 2, 3], new_tokens, lora_id=lora_id, salt=f"lora {lora_id}"))


def step_of(scheduler: Scheduler) -> Step:
    step = scheduler.next_step()
    assert step is not None
    return step


def finish(scheduler: Scheduler, step: Step) -> None:
    process_tokens(scheduler, [TokenOut(row.req_id, Token(50)) for row in step.rows])


def slots_of(step: Step) -> dict[int, int]:
    return {new.req_id: new.lora_slot for new in step.new}


def test_requests_of_one_adapter_share_a_slot_and_it_is_copied_once() -> None:
    scheduler = make(slots=2)
    for req_id, lora_id in enumerate([7, None, 7, 8]):
        add(scheduler, req_id, lora_id)

    step = step_of(scheduler)

    assert step.loras == [LoraPlace(0, 7), LoraPlace(1, 8)]
    assert slots_of(step) == {0: 0, 1: -1, 2: 0, 3: 1}


def test_an_adapter_stays_until_its_slot_is_needed_and_the_least_recently_used_goes() -> None:
    scheduler = make(slots=2)
    copies = []
    for req_id, lora_id in enumerate([7, 8, 7, 9, 7, 8]):
        add(scheduler, req_id, lora_id)
        step = step_of(scheduler)
        copies.append([place.lora_id for place in step.loras])
        finish(scheduler, step)

    assert copies == [[7], [8], [], [9], [], [8]]


def test_a_request_waits_while_all_slots_are_in_use_and_others_pass_it() -> None:
    scheduler = make(slots=1)
    add(scheduler, 0, 7, new_tokens=2)
    add(scheduler, 1, 8)
    add(scheduler, 2, None)
    add(scheduler, 3, 7)

    first = step_of(scheduler)
    finish(scheduler, first)
    finish(scheduler, step_of(scheduler))
    last = step_of(scheduler)

    assert set(slots_of(first)) == {0, 2, 3}
    assert slots_of(last) == {1: 0}
    assert last.loras == [LoraPlace(0, 8)]


def test_a_request_that_was_passed_often_is_not_passed_by_other_adapters() -> None:
    scheduler = make(slots=1)
    add(scheduler, 0, 7, new_tokens=400)
    add(scheduler, 1, 8)
    admitted = []
    for req_id in range(2, 2 + 2 * MAX_PASSED_OVER):
        add(scheduler, req_id, 7 if req_id % 2 else None)
        step = step_of(scheduler)
        admitted += list(slots_of(step))
        finish(scheduler, step)

    passed = [req_id for req_id in admitted if req_id > 1]
    assert 1 not in admitted
    assert all(req_id % 2 == 0 for req_id in passed if req_id > 2 + MAX_PASSED_OVER)  # without an adapter
    assert passed[-1] == 2 * MAX_PASSED_OVER


def test_an_adapter_that_is_not_in_host_memory_cannot_run() -> None:
    scheduler = make(slots=1, loaded=5)
    add(scheduler, 0, 7)

    assert scheduler.next_step() is None
    scheduler.only_group.loras.loaded.add(7)
    assert step_of(scheduler).loras == [LoraPlace(0, 7)]


def test_lost_workers_have_no_adapters() -> None:
    scheduler = make(slots=1)
    add(scheduler, 0, 7, new_tokens=5)
    finish(scheduler, step_of(scheduler))

    scheduler.recover_from_crash()

    assert step_of(scheduler).loras == [LoraPlace(0, 7)]


def test_an_adapter_is_needed_on_the_host_while_a_step_that_copies_it_is_in_flight() -> None:
    scheduler = make(slots=1)
    add(scheduler, 0, 7)
    step = step_of(scheduler)

    assert scheduler.needs_on_host(7)
    assert not scheduler.needs_on_host(8)
    finish(scheduler, step)
    assert not scheduler.needs_on_host(7)


def test_the_end_of_a_request_is_reported_wherever_it_is() -> None:
    scheduler = make(slots=1)
    left: list[int] = []
    scheduler.only_group.loras.on_leave = left.append
    for req_id in range(3):
        add(scheduler, req_id, 7 + req_id)

    finish(scheduler, step_of(scheduler))
    scheduler.abort(2)
    scheduler.drop(lambda req: req.lora_id == 8)

    assert left == [7, 9, 8]
