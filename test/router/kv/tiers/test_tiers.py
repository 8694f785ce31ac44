"""The host memory tier against a fake worker whose slots hold hashes of prefixes: every slot must hold what is read."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import pytest

from lightserve.messages.block_hash import BLOCK_TOKENS, block_keys
from lightserve.messages.control import CpuKvSize
from lightserve.messages.step import KvLoad, ReqFailed, Step
from lightserve.messages.worker_calls import NO_STORE, KvFetch, KvFetched, KvFlush, KvFlushed, KvLoaded, KvLookup
from lightserve.router.kv.source import LoadContext
from lightserve.router.kv.tiers.storage import LOOKUP_S
from lightserve.router.kv.tiers.tiers import KvTiers
from lightserve.router.req import Req
from test.router.processing import StepOuts
from test.router.scheduler.test_scheduler import ROOT, KvWorker, Server, fold, make, make_req, truth

LOAD = KvLoaded(1e-6)


class TierWorker(KvWorker):
    """A load writes its slots when it is finished."""

    def __init__(self, server: TierServer) -> None:
        super().__init__(server.scheduler.only_group)
        self.host: dict[int, list[int | None]] = {}
        self.loads: deque[KvLoad] = deque()

    def run(self, step: Step) -> StepOuts:
        for store in step.stores:
            for number, block in enumerate(store.blocks.tolist()):
                slots = store.slots[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS].tolist()
                self.host[block] = [self._kv[slot] for slot in slots]
        self.loads += step.loads
        written = {slot for row in step.rows for slot in row.slots}
        loading = {slot for load in self.loads for slot in load.slots.tolist()}
        assert not written & loading, "a step writes slots that a load writes"
        return super().run(step)

    def load(self) -> int:
        """Do the oldest load."""
        load = self.loads.popleft()
        held = [prefix for block in load.blocks.tolist() for prefix in self.host[block]]
        for slot, prefix in zip(load.slots.tolist(), held, strict=True):
            self._kv[slot] = prefix
        return load.load_id


class Reply:
    """A future that the test resolves."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self._callback: Callable[[Any], None] = lambda _: None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callback = callback

    def result(self) -> Any:
        return self._value

    def resolve(self) -> None:
        self._value = self._compute()
        self._callback(self)


class Disk:
    """A lower tier. It survives workers; some of its blocks are damaged, which it notices."""

    def __init__(self, rng: random.Random, damaged: float) -> None:
        self._rng = rng
        self._damaged = damaged
        self.blocks: dict[bytes, list[int | None]] = {}
        self.num_errors = 0

    def read(self, key: bytes) -> list[int | None] | None:
        if self._rng.random() < self._damaged:
            self.num_errors += 1
            self.blocks.pop(key, None)
        return self.blocks.get(key)


class HasHost(Protocol):
    host: dict[int, list[int | None]]  # by block


class FakeStorageClient:
    """Of one worker. Replies come in the order of the commands, when the test wants."""

    def __init__(self, worker: HasHost, disk: Disk) -> None:
        self._worker = worker
        self._disk = disk
        self.replies: deque[Reply] = deque()

    def _later(self, compute: Callable[[], Any]) -> Any:
        self.replies.append(Reply(compute))
        return self.replies[-1]

    def lookup(self, command: KvLookup) -> Any:
        return self._later(lambda: [0 if key in self._disk.blocks else NO_STORE for key in command.keys])

    def fetch(self, command: KvFetch) -> Any:
        def read() -> KvFetched:
            found = [self._disk.read(key) for key in command.keys]
            for block, kv in zip(command.blocks, found, strict=True):
                self._worker.host[block] = [None] * BLOCK_TOKENS if kv is None else kv
            return KvFetched([kv is not None for kv in found], 1e-6)

        return self._later(read)

    def flush(self, command: KvFlush) -> Any:
        def write() -> KvFlushed:
            for key in command.removed:
                self._disk.blocks.pop(key, None)
            for key, block in zip(command.keys, command.blocks, strict=True):
                self._disk.blocks[key] = list(self._worker.host[block])
            return KvFlushed([len(command.keys)], [0], [1])

        return self._later(write)


class TierServer(Server):
    worker: TierWorker

    def __init__(
        self, num_slots: int = 640, num_blocks: int = 64, depth: int = 1, disk: Disk | None = None, **limits: Any
    ) -> None:
        scheduler = make(num_slots, **limits)
        self._disk = disk
        size = CpuKvSize(num_blocks, BLOCK_TOKENS * 100, () if disk is None else ("disk",))
        self.tiers = KvTiers(scheduler.only_group.pool, size)
        scheduler.only_group.add_source(self.tiers)
        super().__init__(scheduler, depth)

    def _new_worker(self) -> TierWorker:
        worker = TierWorker(self)
        if self._disk is not None:
            self.client = FakeStorageClient(worker, self._disk)
            self.tiers.storage.connect(self.client, lambda: None)
        return worker

    @property
    def has_replies(self) -> bool:
        return self._disk is not None and bool(self.client.replies)

    def resolve(self) -> None:
        self.client.replies.popleft().resolve()

    def finish_load(self) -> None:
        self.tiers.finish(self.worker.load(), LOAD)

    @property
    def is_busy(self) -> bool:
        scheduler = self.scheduler
        return bool(scheduler.num_waiting or scheduler.num_blocked or scheduler.num_running or self.worker.loads)

    def run_all(self) -> None:
        while self.step() or self.worker.loads or self.has_replies:
            if self.worker.loads:
                self.finish_load()
            if self.has_replies:
                self.resolve()

    def serve(self, reqs: Iterable[Req]) -> None:
        """One after the other."""
        for req in reqs:
            self.scheduler.add(req)
            self.run_all()


def prompt(first: int, length: int = 300) -> list[int]:
    return list(range(first, first + length))


def one(req_id: int, ids: list[int], **fields: Any) -> Req:
    return make_req(req_id, ids, 4, seed=0, **fields)


def test_an_evicted_prefix_is_loaded_and_not_computed_again() -> None:
    server = TierServer()
    server.serve([one(0, prompt(1000)), one(1, prompt(2000)), one(2, prompt(3000))])
    computed = server.worker.computed
    again = one(3, prompt(1000))

    server.serve([again])

    assert again.cached_len == 256
    assert server.worker.computed - computed <= 300 - 256 + 4
    assert again.output_ids == truth(prompt(1000), 0, 4)
    assert server.tiers.metrics()["ram"]["hits_total"] >= 192
    server.assert_idle()


def prefixes(req: Req) -> dict[bytes, list[int]]:
    """What the blocks of its prompt hold, by key."""
    held = list(itertools.accumulate(req.prompt_ids.tolist(), fold, initial=ROOT))[1:]
    keys = block_keys(req.prompt_ids, f" {req.salt}", [])
    return {key: held[number * BLOCK_TOKENS :][:BLOCK_TOKENS] for number, key in enumerate(keys)}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("has_disk", [False, True])
@pytest.mark.parametrize(
    "limits",
    [
        {"batch_max_tokens": 640, "chunk_size": None},
        {"batch_max_tokens": 640, "chunk_size": 256},
        {"batch_max_tokens": 512, "chunk_size": 64},
    ],
    ids=["whole prompts", "large chunks", "small chunks"],
)
def test_a_step_that_computes_most_of_the_pool_stores_only_what_was_computed_before(
    limits: dict[str, Any], has_disk: bool, depth: int
) -> None:
    """The worker stores before it computes."""
    disk = Disk(random.Random(0), damaged=0.0)
    server = TierServer(640, depth=depth, disk=disk if has_disk else None, **limits)
    reqs = [one(number, prompt(1000 * number, 600)) for number in range(1, 5)]
    again = [one(10 + number, prompt(1000 * number, 600)) for number in range(1, 5)]

    for at_once in (reqs, again):  # an idle server would store all of it
        for req in at_once:
            server.scheduler.add(req)
        server.run_all()

    assert all(req.output_ids == truth(req.prompt_ids, req.seed, 4) for req in again)
    assert server.tiers.metrics()["ram"]["hits_total"] >= 500
    expected = {key: held for req in reqs for key, held in prefixes(req).items()}
    assert {key: disk.blocks[key] for key in expected.keys() & disk.blocks.keys()}.items() <= expected.items()
    assert len(expected.keys() & disk.blocks.keys()) >= (30 if has_disk else 0)


def test_requests_of_another_salt_do_not_find_it() -> None:
    server = TierServer()
    server.serve([one(0, prompt(1000), salt="a"), one(1, prompt(2000)), one(2, prompt(3000))])
    again = one(3, prompt(1000), salt="b")

    server.serve([again])

    assert again.cached_len == 0
    assert server.tiers.metrics()["ram"]["hits_total"] == 0


def test_another_request_runs_while_one_waits_for_its_load() -> None:
    server = TierServer()
    server.serve([one(0, prompt(1000)), one(1, prompt(2000)), one(2, prompt(3000))])
    waiting, other = one(3, prompt(1000)), one(4, [1, 2, 3])
    server.scheduler.add(waiting)
    server.scheduler.add(other)

    while server.step():
        pass

    assert other.finish_reason is not None
    assert waiting.num_admissions == 0
    server.run_all()
    assert waiting.output_ids == truth(prompt(1000), 0, 4)
    server.assert_idle()


def test_two_requests_with_the_same_prefix_share_a_load() -> None:
    server = TierServer()
    server.serve([one(0, prompt(1000)), one(1, prompt(2000)), one(2, prompt(3000))])
    both = [one(3, prompt(1000)), one(4, [*prompt(1000), 5])]
    for req in both:
        server.scheduler.add(req)

    server.step()

    assert len(server.worker.loads) == 1
    server.run_all()
    assert [req.cached_len >= 256 for req in both] == [True, True]
    server.assert_idle()


def test_a_request_whose_load_is_late_computes() -> None:
    server = TierServer()
    server.serve([one(0, prompt(1000)), one(1, prompt(2000)), one(2, prompt(3000))])
    late = one(3, prompt(1000))
    server.scheduler.add(late)
    server.scheduler.next_step(now_s=0.0)
    deadline_s = server.scheduler.only_group.queue.next_deadline_s()

    step = server.scheduler.next_step(now_s=(deadline_s or 0.0) + 1)

    assert step is not None
    assert [new.req_id for new in step.new] == [3]
    assert server.tiers.metrics()["ram"]["late_total"] == 1


def fail_while_it_is_computed(server: TierServer, req: Req) -> None:
    """Its logits are not finite. All its blocks are to be removed."""
    server.scheduler.add(req)
    while not req.in_flight:
        while server.has_replies:
            server.resolve()
        if server.worker.loads:
            server.finish_load()
        step = server.scheduler.next_step()
        if step is not None:
            server.worker.run(step)
            server.scheduler.complete_step()
    server.scheduler.fail(ReqFailed(req.req_id, 500, "not finite"))


def test_kv_that_may_not_be_finite_is_not_loaded() -> None:
    server = TierServer()
    server.serve([one(0, prompt(1000)), one(1, prompt(2000)), one(2, prompt(3000))])

    fail_while_it_is_computed(server, one(3, prompt(1000)))

    again = one(4, prompt(1000))
    server.scheduler.add(again)
    assert server.tiers.wait_of(again, LoadContext(0.0, lambda tokens: True)) is None


def test_a_load_that_failed_in_the_workers_is_computed() -> None:
    server = TierServer()
    server.serve([one(0, prompt(1000)), one(1, prompt(2000)), one(2, prompt(3000))])
    again = one(3, prompt(1000))
    server.scheduler.add(again)
    server.step()
    load = server.worker.loads.popleft()

    server.tiers.finish(load.load_id, KvLoaded(0.0, is_valid=False))
    server.run_all()

    assert again.output_ids == truth(prompt(1000), 0, 4)
    assert server.tiers.metrics()["ram"]["hits_total"] == 0
    server.assert_idle()


def test_the_slots_of_loads_in_flight_are_free_after_steps_that_failed() -> None:
    server = TierServer()
    server.serve([one(0, prompt(1000)), one(1, prompt(2000)), one(2, prompt(3000))])
    server.scheduler.add(one(3, prompt(1000)))
    server.step()
    assert server.worker.loads

    server.fail_steps()
    server.finish_load()

    server.assert_idle()
    again = one(4, prompt(1000))
    server.serve([again])
    assert again.cached_len == 0
    assert again.output_ids == truth(prompt(1000), 0, 4)


def test_the_steps_of_a_beam_search_hash_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(ids: Any, salt: str, known: list[bytes]) -> list[bytes]:
        keys = block_keys(ids, salt, known)
        hashed.append(len(keys) - len(known))
        return keys

    monkeypatch.setattr("lightserve.router.kv.tiers.offload_queue.block_keys", counted)
    server = TierServer(4000)
    ids = prompt(1000, 1000)
    server.serve([make_req(0, ids, 1, seed=0, can_fork=True)])

    for step in range(1, 4):
        ids = [*ids, *prompt(5000 + 100 * step, 30)]
        beam = make_req(step, ids, 1, seed=0, parent=step - 1, can_fork=True)
        server.serve([beam])
        assert beam.kv_keys == block_keys(beam.prompt_ids, f" {beam.salt}", [])[: len(beam.kv_keys)]

    assert sum(hashed) == len(ids) // BLOCK_TOKENS


def test_a_new_server_finds_what_another_one_wrote_when_it_was_idle() -> None:
    disk = Disk(random.Random(0), damaged=0.0)
    TierServer(disk=disk).serve([one(0, prompt(1000))])
    assert len(disk.blocks) == 300 // BLOCK_TOKENS
    again = one(0, prompt(1000))
    server = TierServer(disk=disk)

    server.serve([again])

    assert again.cached_len == 256
    assert again.output_ids == truth(prompt(1000), 0, 4)
    assert server.tiers.metrics()["disk"]["hits_total"] == 256


def test_workers_that_die_while_they_remove_blocks_are_replaced_by_ones_that_do() -> None:
    disk = Disk(random.Random(0), damaged=0.0)
    server = TierServer(disk=disk, depth=2)
    server.serve([one(0, prompt(1000))])
    assert len(disk.blocks) == 4
    fail_while_it_is_computed(server, one(1, prompt(1000)))
    assert server.has_replies, "the removal is in flight"

    server.crash()
    server.run_all()

    assert not disk.blocks


def test_a_block_that_is_to_be_removed_is_not_read_before() -> None:
    disk = Disk(random.Random(0), damaged=0.0)
    TierServer(disk=disk).serve([one(0, prompt(1000))])
    server = TierServer(disk=disk)
    fail_while_it_is_computed(server, one(1, prompt(1000)))
    removal = server.client.replies.popleft()
    again = one(2, prompt(1000))

    server.serve([again])

    assert again.cached_len == 0
    assert again.output_ids == truth(prompt(1000), 0, 4)
    removal.resolve()


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_prefix_that_host_memory_cannot_hold_is_fetched_once(num_blocks: int) -> None:
    disk = Disk(random.Random(0), damaged=0.0)
    TierServer(disk=disk).serve([one(0, prompt(1000))])
    server = TierServer(num_blocks=num_blocks, disk=disk)
    again = one(0, prompt(1000))
    server.scheduler.add(again)

    for _ in range(20):  # steps and replies
        server.step()
        if server.worker.loads:
            server.finish_load()
        elif server.has_replies:
            server.resolve()

    assert again.output_ids == truth(prompt(1000), 0, 4)
    assert again.cached_len == num_blocks * BLOCK_TOKENS
    assert server.tiers.metrics()["disk"]["hits_total"] == num_blocks * BLOCK_TOKENS


def test_damaged_blocks_are_computed() -> None:
    disk = Disk(random.Random(0), damaged=0.0)
    TierServer(disk=disk).serve([one(0, prompt(1000))])
    disk._damaged = 1.0
    again = one(0, prompt(1000))
    server = TierServer(disk=disk)

    server.serve([again])

    assert again.cached_len == 0
    assert again.output_ids == truth(prompt(1000), 0, 4)
    assert server.tiers.metrics()["disk"]["errors_total"] == 4


def test_blocks_of_an_adapter_stay_in_the_process() -> None:
    disk = Disk(random.Random(0), damaged=0.0)
    server = TierServer(disk=disk)
    server.scheduler.only_group.loras.loaded.add(0)

    server.serve([one(0, prompt(1000), lora_id=0), one(1, prompt(2000)), one(2, prompt(3000))])

    keys = {
        key
        for req in (one(1, prompt(2000)), one(2, prompt(3000)))
        for key in server.tiers.offload_queue.keys_of(req, 300)
    }
    assert set(disk.blocks) <= keys


def test_a_request_does_not_wait_for_a_lookup_that_takes_too_long() -> None:
    server = TierServer(disk=Disk(random.Random(0), damaged=0.0))
    server.scheduler.add(one(0, prompt(1000)))
    assert server.scheduler.next_step(now_s=0.0) is None

    step = server.scheduler.next_step(now_s=LOOKUP_S)

    assert step is not None
    assert [new.req_id for new in step.new] == [0]


@pytest.mark.parametrize("seed", range(16))
def test_every_request_gets_its_text_and_all_memory_is_freed_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    server = TierServer(
        rng.choice([400, 640, 1500]),
        rng.choice([1, 3, 10, 100]),
        depth=rng.choice([1, 2]),
        disk=Disk(rng, damaged=0.1) if seed % 2 else None,
        batch_max_tokens=rng.choice([64, 256]),
        chunk_size=64,
        token_ratio=rng.choice([0.0, 0.9]),
    )
    to_come = [
        make_req(
            number,
            prompt(1000 * rng.randrange(5), rng.randrange(1, 330)) + [rng.randrange(4)] * rng.randrange(1, 30),
            rng.randrange(1, 40),
            seed=0,
            salt=rng.choice(["", "", "x"]),
        )
        for number in range(50)
    ]
    reqs, aborted = list(to_come), set[int]()
    late = 0.0
    while to_come or server.is_busy:
        event = rng.random()
        if to_come and event < 0.3:
            server.scheduler.add(to_come.pop())
        elif event < 0.36:
            late += 1000.0
            aborted |= disturb(server, rng, late)
        elif server.has_replies and event < 0.5:
            server.resolve()
        elif event < 0.6 or not server.step():
            if server.worker.loads:
                server.finish_load()
            elif server.has_replies:
                server.resolve()
    server.run_all()

    for req in reqs:
        if req.req_id not in aborted:
            assert req.output_ids == truth(req.prompt_ids, req.seed, req.max_new_tokens)
    assert server.peak_used <= server.scheduler.only_group.pool.size
    server.assert_idle()


def disturb(server: TierServer, rng: random.Random, now_s: float) -> set[int]:
    """A request is aborted, the worker dies, or loads are late. Returns the aborted request."""
    kind = rng.randrange(10)
    if kind == 0:
        server.crash()
    elif kind < 5:
        server.now_s = now_s
    else:
        victim = rng.randrange(50)
        return {victim} if server.scheduler.abort(victim) is not None else set()
    return set()
