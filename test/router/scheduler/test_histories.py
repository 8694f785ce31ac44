"""Random histories of an engine: whatever happens, every KV slot holds the prefix that is read from it, every request
gets its text, and nothing is left at the end.

A seed makes a history. Every run tries other seeds: --examples says how many, --long tries hundreds. A failure prints
the seed, and a @reproduce_failure line that replays it.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st

from lightserve.messages.block_hash import BLOCK_TOKENS, block_keys
from lightserve.messages.cluster import KvCancel, KvTarget, KvTransferParams, KvTransferTimeout, RemotePrefillRequest
from lightserve.messages.control import CpuGroupSize, CpuKvSize, SlidingWindowKv, StateKv
from lightserve.messages.params import BACKGROUND_PRIORITY, GrammarSpec
from lightserve.messages.step import ReqFailed, Step
from lightserve.messages.worker_calls import KvLoaded, KvReceived
from lightserve.router.kv.group_pools import make_group_pools
from lightserve.router.kv.pool import KvPool
from lightserve.router.kv.remote_prefill import RemoteKvSource
from lightserve.router.kv.state_pool import StatePool
from lightserve.router.kv.tiers.tiers import KvTiers
from lightserve.router.policy import POLICIES, make_policy
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, LoraSlots, Scheduler, SchedulerLimits
from test.fuzz.profile import FUZZ
from test.router.engine_worker import EngineWorker, Prefixes, prefixes_of, root_of, stored
from test.router.kv.tiers.test_tiers import Disk, FakeStorageClient
from test.router.processing import StepOuts, process_tokens
from test.router.scheduler.test_scheduler import make_req, truth

EVENTS = 400
MOST_TURNS = 20_000  # after the last event: more are a request that does not end
MOST_OPEN = 24  # requests
NUM_ADAPTERS, ADAPTER_SLOTS = 4, 2
KINDS = [
    "one pool",
    "windows",
    "states",
    "windows and states",
    "tiers",
    "disk",
    "windows, tiers",
    "windows, disk",
    "states, disk",
    "windows and states, tiers",
    "roles",
    "windows and states, roles",
]
MIN_REMOTE_PREFILL_TOKENS = 32

few_seeds = settings(
    settings.get_profile("histories"),
    max_examples=max(FUZZ.max_examples // 3, 1),
    phases=[Phase.explicit, Phase.generate],  # a smaller seed makes no smaller history
)


class Traits(NamedTuple):
    """What an engine has. Pipelines, adapters and grammars go with everything."""

    windows: tuple[int, ...]
    has_states: bool
    has_tiers: bool
    has_disk: bool
    receives: bool  # KV of prefill engines
    sends: bool  # KV to decode engines
    has_adapters: bool
    forces: bool  # grammars
    num_stages: int
    num_drafts: int


def random_traits(rng: random.Random, kind: str) -> Traits:
    return Traits(
        windows=(25, 40) if "windows and states" in kind else (rng.choice([40, 100]),) if "windows" in kind else (),
        has_states="states" in kind,
        has_tiers="tiers" in kind or "disk" in kind or (kind == "roles" and rng.random() < 0.5),
        has_disk="disk" in kind,
        receives="roles" in kind,
        sends="roles" in kind,
        has_adapters=rng.random() < 0.5,
        forces=rng.random() < 0.5,
        num_stages=rng.choice([1, 1, 2, 3]),
        num_drafts=rng.choice([0, 1, 3, 7]),
    )


def random_scheduler(rng: random.Random, traits: Traits) -> Scheduler:
    """Its pool is too small for all requests. A step may compute most of it."""
    size = rng.choice([700, 1500, 3000])
    limits = SchedulerLimits(
        max_running=rng.choice([3, 8]),
        batch_max_tokens=rng.choice([96, 400, size, size]),
        chunk_size=rng.choice([64, None]),
        num_stages=traits.num_stages,
        token_ratio=rng.choice([0.0, 0.85]),
        num_drafts=traits.num_drafts,
    )
    loras = LoraSlots(ADAPTER_SLOTS)
    loras.loaded |= set(range(NUM_ADAPTERS))
    policy = make_policy(rng.choice(list(POLICIES)))
    windows = [SlidingWindowKv(rng.choice([300, 600]), window, kept_tokens=window + 20) for window in traits.windows]
    states = (
        [StatePool(StateKv(rng.choice([2, 4, 10, 30]), block=rng.choice([1, 1, 16])), size)]
        if traits.has_states
        else []
    )
    pool = KvPool(size, [*make_group_pools(windows, size), *states], lookahead=rng.choice([0, 0, 1]))
    return Scheduler(GroupScheduler(pool, limits, policy, loras=loras))


def random_tiers(rng: random.Random, pool: KvPool, has_disk: bool) -> KvTiers:
    block_bytes = rng.choice([6400, 2**26])  # many blocks or one are stored before they are evicted
    groups = tuple(CpuGroupSize(rng.choice([2, 6, 30]), block_bytes) for _ in pool.groups)
    return KvTiers(pool, CpuKvSize(rng.choice([2, 12, 60]), block_bytes, ("disk",) if has_disk else (), groups))


class FakeReceiver:
    """The workers that receive KV."""

    def __init__(self) -> None:
        self.addresses = ["a worker"]
        self.cancelled: set[int] = set()

    def cancel(self, transfer_id: int) -> None:
        self.cancelled.add(transfer_id)


class History:
    def __init__(self, kind: str, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.traits = traits = random_traits(rng, kind)
        self.scheduler = random_scheduler(rng, traits)
        self.depth = rng.choice([1, 2]) if traits.num_stages == 1 else traits.num_stages
        self.longest = self.scheduler.only_group.pool.size * 3 // 4  # tokens of a prompt
        self.prompts = [[rng.randrange(50) for _ in range(rng.randrange(1, self.longest))] for _ in range(3)]
        self.now_s = 0.0
        self.numbers = itertools.count()
        self.open: dict[int, Req] = {}
        self.held: list[Req] = []
        self.parents: dict[int, Req] = {}  # ended requests that others may continue
        self.blocks: dict[bytes, Prefixes] = {}  # what a stored block of each key must hold
        self.in_flight: deque[tuple[Step, StepOuts]] = deque()
        self.coming: dict[int, Prefixes] = {}  # by transfer: the prompt that a prefill engine would compute
        self.first_block: dict[int, int] = {}  # by transfer that was opened
        self.disk = Disk(rng, damaged=0.05)
        self.remote_kv: RemoteKvSource | None = None
        self.tiers: KvTiers | None = None
        if traits.receives:
            self.remote_kv = RemoteKvSource(self.scheduler.only_group.pool, self.on_sent)
            self.scheduler.only_group.add_source(self.remote_kv)
        if traits.has_tiers:
            self.tiers = random_tiers(rng, self.scheduler.only_group.pool, traits.has_disk)
            self.tiers.use_clock(lambda: self.now_s)
            self.scheduler.only_group.add_source(self.tiers)
        self.worker = self.new_worker()

    # requests

    def arrive(self) -> None:
        """A prompt that shares a beginning with others, with the same adapter or not."""
        if len(self.open) < MOST_OPEN:
            shared = self.rng.choice(self.prompts)
            count = self.rng.choice([len(shared), self.rng.randrange(len(shared) + 1)])
            ids = shared[:count] + self.random_ids(60)
            if self.traits.sends and self.rng.random() < 0.5:  # prompts for other engines are whole blocks
                ids = ids[: len(ids) // BLOCK_TOKENS * BLOCK_TOKENS] or ids
            self.add(ids, self.rng.randrange(1, 30), **self.random_kind())

    def continue_beam(self) -> None:
        """A sequence of one token, which continues another one or begins."""
        if not self.parents or self.rng.random() < 0.2:
            self.add([*self.rng.choice(self.prompts), 1], 1, **self.random_kind(), can_fork=True)
            return
        number, parent = self.rng.choice(list(self.parents.items()))
        fields = {"salt": parent.salt, "lora_id": parent.lora_id, "is_private": parent.is_private}
        for _ in range(self.rng.randrange(1, 4)):
            ids = [*parent.prompt_ids.tolist(), *self.random_ids(3)]
            if len(ids) <= self.longest:
                self.add(ids, 1, **fields, parent=number, can_fork=True)

    def add(self, ids: list[int], max_new_tokens: int, **fields: Any) -> None:
        number, rng = next(self.numbers), self.rng
        deadline_s = self.now_s + rng.choice([0.5, 200.0]) if rng.random() < 0.1 else None
        fields |= {"priority": rng.choice([0, 0, 1, 1, BACKGROUND_PRIORITY]), "deadline_s": deadline_s}
        if self.traits.forces and rng.random() < 0.5:
            fields["grammar"] = GrammarSpec("regex", "a")
        req = make_req(number, ids, max_new_tokens, **fields)
        req.arrived_s = self.now_s
        self.open[number] = req
        self.note_blocks(req)
        if not req.is_private and req.lora_id is None:
            self.split(req)
        if rng.random() < 0.1:
            self.scheduler.defer(req)
            self.held.append(req)
        else:
            self.scheduler.add(req)

    def split(self, req: Req) -> None:
        """A prefill engine may compute its prompt, or it is the prompt of a decode engine."""
        prefixes, chance = prefixes_of(req.prompt_ids.tolist(), root_of(None)), self.rng.random()
        if self.remote_kv is not None and chance < 0.5:
            self.coming[req.req_id] = prefixes
            req.kv_transfer_params = KvTransferParams(req.req_id, 5.0, MIN_REMOTE_PREFILL_TOKENS)
        elif self.traits.sends and chance < 0.8:
            first = self.rng.randrange(3)
            self.worker.wanted[req.req_id] = prefixes[first * BLOCK_TOKENS :]
            req.target = KvTarget(req.req_id, first, ["a worker"])

    def random_kind(self) -> dict[str, Any]:
        """Requests share prefixes with those of their adapter and salt, or with nobody."""
        if self.traits.has_adapters and self.rng.random() < 0.5:
            lora_id = self.rng.randrange(NUM_ADAPTERS)
            return {"lora_id": lora_id, "salt": f"lora {lora_id} salt "}
        if self.rng.random() < 0.15:
            keeps = self.rng.random() < 0.5  # as beams do
            return {"salt": f"group {next(self.numbers)}", "is_private": True, "keeps_kv_cached": keeps}
        return {"salt": self.rng.choice(["salt ", "salt ", "salt b"])}

    def random_ids(self, most: int) -> list[int]:
        return [self.rng.randrange(50) for _ in range(self.rng.randrange(1, most))]

    def text_of(self, req: Req) -> list[int]:
        return truth(req.prompt_ids.tolist(), req.seed, req.max_new_tokens, root_of(req.lora_id))

    def note_blocks(self, req: Req) -> None:
        ids = [*req.prompt_ids.tolist(), *self.text_of(req)]
        held = prefixes_of(ids, root_of(req.lora_id))
        for number, key in enumerate(block_keys(np.array(ids, dtype=np.int32), f" {req.salt}", [])):
            self.blocks[key] = held[number * BLOCK_TOKENS :][:BLOCK_TOKENS]

    def end(self, req: Req) -> None:
        del self.open[req.req_id]
        assert req.output_ids == self.text_of(req)
        if req.can_fork:
            self.parents[req.req_id] = req

    def drop(self, req: Req | None) -> None:
        """It ends without its text."""
        if req is not None:
            del self.open[req.req_id]
            self.scheduler.only_group.fork_points.release([req.req_id])

    # what happens to them

    def abort(self) -> None:
        if self.open:
            self.drop(self.scheduler.abort(self.rng.choice(list(self.open))))

    def fail(self) -> None:
        """Its logits are not finite, or a grammar allows no token."""
        if self.open:
            failure = ReqFailed(self.rng.choice(list(self.open)), self.rng.choice([400, 500]), "it failed")
            self.drop(self.scheduler.fail(failure))

    def release_held(self) -> None:
        if self.held:
            self.scheduler.make_ready(self.held.pop(self.rng.randrange(len(self.held))))

    def release_parent(self) -> None:
        if self.parents:
            number = self.rng.choice(list(self.parents))
            del self.parents[number]
            self.scheduler.only_group.fork_points.release([number])

    def preempt(self) -> None:
        if self.scheduler.num_running:
            self.scheduler.only_group.preemption.preempt_newest()

    def let_time_pass(self) -> None:
        """Loads and lookups may be late, and requests expire."""
        self.now_s += self.rng.choice([0.1, 1.5, 100.0])
        for req in self.scheduler.drop(lambda req: req.is_expired(self.now_s)):
            self.drop(req)

    # steps

    def plan(self) -> None:
        depth = 1 if self.scheduler.is_isolating_crash else self.depth
        step = self.scheduler.next_step(self.now_s) if len(self.in_flight) < depth else None
        if step is None:
            return
        sampled = {out.req_id for _, outs in self.in_flight for out in outs}
        assert self.traits.num_stages == 1 or sampled.isdisjoint(row.req_id for row in step.rows)
        self.in_flight.append((step, self.worker.run(step)))

    def deliver(self) -> None:
        if not self.in_flight:
            return
        for req in process_tokens(self.scheduler, self.in_flight.popleft()[1]):
            if req.finish_reason is not None and req.req_id in self.open:
                self.end(req)

    def crash(self) -> None:
        """The workers die with the steps in flight, host memory and open transfers."""
        self.in_flight.clear()
        self.drop(self.scheduler.recover_from_crash())
        self.worker = self.new_worker(self.worker)

    def new_worker(self, before: EngineWorker | None = None) -> EngineWorker:
        worker = EngineWorker(self.scheduler, self.traits.forces, self.blocks)
        if before is not None:
            worker.wanted, worker.num_sent = before.wanted, before.num_sent
            worker.num_group_sends = before.num_group_sends
        self.receiver = FakeReceiver()
        if self.remote_kv is not None:
            self.remote_kv.use_receiver(self.receiver)
        self.client = FakeStorageClient(worker, self.disk)
        if self.tiers is not None:
            self.tiers.storage.connect(self.client, lambda: None)
        return worker

    # KV from elsewhere

    def finish_load(self) -> None:
        tiers = self.tiers
        if tiers is None or not self.worker.loads:
            return
        load_id, is_valid = self.rng.choice(list(self.worker.loads)), self.rng.random() < 0.9
        self.worker.finish_load(load_id, is_valid)
        tiers.finish(load_id, KvLoaded(1e-6, is_valid))

    def reply(self) -> None:
        """Of a lower tier. Lookups, reads and writes overtake each other."""
        if self.client.replies:
            self.client.replies.rotate(self.rng.randrange(len(self.client.replies)))
            self.client.replies.popleft().resolve()

    def on_sent(self, message: RemotePrefillRequest | KvTransferTimeout) -> None:
        if isinstance(message, RemotePrefillRequest) and message.num_blocks:
            self.first_block[message.transfer_id] = message.first_block

    def finish_ticket(self) -> None:
        """All of its KV has come, or some."""
        remote_kv = self.remote_kv
        if remote_kv is None or not self.worker.recvs:
            return
        transfer_id = self.rng.choice(list(self.worker.recvs))
        count = self.worker.num_coming(transfer_id)
        if transfer_id in self.receiver.cancelled or self.rng.random() < 0.3:
            count = self.rng.randrange(count + 1)
        begin = self.first_block[transfer_id] * BLOCK_TOKENS
        self.worker.receive(transfer_id, self.coming[transfer_id], begin, count)
        remote_kv.finish(KvReceived(transfer_id, count))

    def cancel_transfer(self) -> None:
        """The prefill engine is lost, or has not begun."""
        if self.remote_kv is not None and self.worker.recvs:
            transfer_id = self.rng.choice(list(self.worker.recvs))
            self.remote_kv.cancel(KvCancel(transfer_id, transfer_id, was_started=self.rng.random() < 0.5))

    # a run

    def run(self) -> None:
        often: list[Callable[[], None]] = [self.arrive, self.plan, self.plan, self.deliver, self.deliver]
        others = [self.finish_load, self.reply, self.finish_ticket, self.continue_beam, self.release_held]
        seldom = [self.abort, self.fail, self.preempt, self.let_time_pass, self.cancel_transfer, self.release_parent]
        weights = [8] * len(often) + [4] * len(others) + [1] * len(seldom) + [0.3]
        for event in self.rng.choices([*often, *others, *seldom, self.crash], weights, k=EVENTS):
            self.now_s += 0.01
            event()
        self.finish()
        self.check_nothing_is_left()

    def finish(self) -> None:
        """No more requests come, and nothing more fails."""
        for _ in range(MOST_TURNS):
            if not self.open and not self.in_flight:
                break
            self.now_s += 0.01
            for event in (self.release_held, self.finish_load, self.reply, self.finish_ticket, self.plan, self.deliver):
                event()
        assert not self.open, "requests do not end"
        self.scheduler.only_group.fork_points.release(list(self.parents))
        while self.worker.loads or self.worker.recvs or self.client.replies or self.in_flight or self.has_planned():
            for event in (self.finish_load, self.reply, self.finish_ticket, self.deliver):
                event()

    def has_planned(self) -> bool:
        self.plan()
        return bool(self.in_flight)

    def check_nothing_is_left(self) -> None:
        pool, scheduler = self.scheduler.only_group.pool, self.scheduler
        assert not self.worker.reqs
        assert not self.worker.retained
        assert not len(scheduler.only_group.fork_points)
        assert scheduler.num_waiting == scheduler.num_blocked == scheduler.only_group.queue.num_tokens == 0
        assert scheduler.only_group.queue.next_deadline_s() is None
        assert pool.used == pool.shared_tokens == 0
        assert pool.slots.num_used == pool.cached_tokens
        assert not any(group.used for group in pool.groups)
        assert not len(scheduler.only_group.sends)
        remote_kv, tiers = self.remote_kv, self.tiers
        if remote_kv is not None:
            assert not any((remote_kv._open, remote_kv._coming, remote_kv._transfer_of, remote_kv._received))
            assert not any((remote_kv._cancelled, remote_kv._declined))
        if tiers is not None:
            assert not any((tiers._loads, tiers._load_of, tiers.offload_queue._storing, tiers.offload_queue._queued))
            assert not tiers.offload_queue.host.num_pinned
        assert all(held == stored(key, self.blocks, len(held)) for key, held in self.disk.blocks.items())


@pytest.mark.parametrize("kind", KINDS)
@few_seeds
@given(seed=st.integers(0, 2**62))
def test_every_slot_holds_what_is_read_from_it_whatever_happens(kind: str, seed: int) -> None:
    History(kind, seed).run()
