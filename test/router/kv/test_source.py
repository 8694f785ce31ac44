"""A place that KV comes from is one object: neither the scheduler nor admission knows which one it is."""

from __future__ import annotations

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.cluster import KvTarget
from lightserve.messages.step import KvRecv, Step
from lightserve.router.kv.pool import KvPool, PrefixLoad
from lightserve.router.kv.source import Activity, KvSource, KvTransfers, LoadContext
from lightserve.router.req import Req
from lightserve.router.req_queue import Wait
from lightserve.router.scheduler import Scheduler
from test.router.processing import process_tokens
from test.router.scheduler.test_scheduler import make, make_req

LENGTH = 3 * BLOCK_TOKENS


class Remote(KvSource):
    """Brings the first blocks of every prompt with the next step."""

    def __init__(self, pool: KvPool, blocks: int = 2) -> None:
        self.asked: list[int] = []
        self.admitted: list[int] = []
        self.dropped: list[int] = []
        self.activities: list[Activity] = []
        self._pool = pool
        self._tokens = blocks * BLOCK_TOKENS
        self._waits: dict[int, tuple[PrefixLoad, Wait]] = {}  # by request
        self._recvs: list[KvRecv] = []

    def wait_of(self, req: Req, context: LoadContext) -> Wait | None:
        if req.req_id in self.asked or not self._tokens:
            return None
        self.asked.append(req.req_id)
        load, wait = self._pool.start_load(req, 0, self._tokens), Wait()
        self._waits[req.req_id] = load, wait
        self._recvs.append(KvRecv(req.req_id, load.slots, 1.0))
        return wait

    def take(self, transfers: KvTransfers, activity: Activity) -> None:
        self.activities.append(activity)
        transfers.recvs += self._recvs
        self._recvs = []

    def on_completed(self, transfers: KvTransfers) -> None:
        for recv in transfers.recvs:
            load, wait = self._waits.pop(recv.transfer_id)
            self._pool.finish_load(load, is_valid=True)
            wait.end()

    def on_admitted(self, req: Req) -> None:
        self.admitted.append(req.req_id)

    def drop(self, req: Req) -> None:
        self.dropped.append(req.req_id)


def with_remote(blocks: int = 2) -> tuple[Scheduler, Remote]:
    scheduler = make(batch_max_tokens=256, chunk_size=256)
    remote = Remote(scheduler.only_group.pool, blocks)
    scheduler.only_group.add_source(remote)
    return scheduler, remote


def planned(scheduler: Scheduler) -> Step:
    step = scheduler.next_step()
    assert step is not None
    return step


def test_a_request_waits_for_a_source_and_finds_its_kv_in_the_cache() -> None:
    scheduler, remote = with_remote()
    scheduler.add(make_req(1, list(range(LENGTH))))

    first = planned(scheduler)
    assert (first.num_rows, len(first.recvs), scheduler.num_blocked) == (0, 1, 1)
    process_tokens(scheduler, [])
    second = planned(scheduler)

    assert [len(row.slots) for row in second.chunks] == [LENGTH - 2 * BLOCK_TOKENS]
    assert second.new[0].cached_slots.tolist() == first.recvs[0].slots.tolist()
    assert remote.activities == [Activity.WAITING, Activity.COMPUTING]
    assert remote.admitted == [1]


def test_a_request_does_not_wait_for_what_others_wait_for_no_more() -> None:
    scheduler, remote = with_remote(blocks=0)
    late: list[int] = []
    remote.wait_of = lambda req, context: Wait(5.0, lambda req: late.append(req.req_id))  # type: ignore[method-assign]
    scheduler.add(make_req(1, list(range(LENGTH))))

    assert scheduler.next_step(4.9) is None
    assert scheduler.num_blocked == 1
    scheduler.add(make_req(2, list(range(100, 100 + LENGTH))))
    step = scheduler.next_step(5.0)

    assert step is not None
    assert [new.req_id for new in step.new] == [1, 2]
    assert 2 in late


def test_sources_are_asked_in_their_order_until_one_makes_the_request_wait() -> None:
    scheduler, nothing = with_remote(blocks=0)
    first, second = Remote(scheduler.only_group.pool), Remote(scheduler.only_group.pool)
    scheduler.only_group.add_source(first)
    scheduler.only_group.add_source(second)
    scheduler.add(make_req(1, list(range(LENGTH))))

    planned(scheduler)

    assert (nothing.asked, first.asked, second.asked) == ([], [1], [])


def test_a_source_is_told_of_requests_that_end_and_of_an_idle_engine() -> None:
    scheduler, remote = with_remote(blocks=0)
    scheduler.add(make_req(1, [1, 2, 3], 1))
    scheduler.add(make_req(2, [4, 5, 6], 500))
    planned(scheduler)
    assert remote.dropped == []

    scheduler.abort(2)
    scheduler.abort(1)
    scheduler.next_step()

    assert remote.dropped == [2, 1]
    assert remote.activities[-1] is Activity.IDLE


def test_prompts_for_other_engines_are_sent_block_by_block_beside_any_source() -> None:
    scheduler, _ = with_remote(blocks=0)
    req = make_req(1, list(range(LENGTH + 1)), 1)
    req.target = KvTarget(7, first_block=1, addresses=["there"])
    scheduler.add(req)

    (send,) = planned(scheduler).sends

    assert (send.transfer_id, send.first, send.slots.tolist()) == (7, 0, req.slots[BLOCK_TOKENS:LENGTH].tolist())
    assert scheduler.only_group.sends.num_sent == LENGTH - BLOCK_TOKENS
    scheduler.abort(1)
    assert not len(scheduler.only_group.sends)


def test_the_usual_server_has_no_source_and_its_steps_only_compute() -> None:
    scheduler = make()
    scheduler.add(make_req(1, [1, 2, 3]))

    step = planned(scheduler)

    assert scheduler.only_group.sources == []
    assert [step.stores, step.loads, step.sends, step.recvs] == [[], [], [], []]
