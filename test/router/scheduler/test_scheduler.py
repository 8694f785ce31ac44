"""The scheduler against a fake worker whose KV slots hold hashes of prefixes: every slot must hold what is read."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lightserve.config import RouterConfig, WorkerConfig
from lightserve.errors import WorkerDiedError
from lightserve.ipc.codec import encode
from lightserve.messages.control import SlidingWindowKv, StateKv, StepLimits
from lightserve.messages.int_arrays import Int32s, int32s, int64s
from lightserve.messages.params import FinishReason, GenerationParams, GrammarSpec
from lightserve.messages.step import ForkPrefix, NewReq, Step, Token, TokenOut
from lightserve.router.kv.group_pool import KvGroupPool
from lightserve.router.kv.group_pools import make_group_pools
from lightserve.router.kv.group_slots import NONE, GroupSlots
from lightserve.router.kv.pool import KvPool
from lightserve.router.kv.radix_cache import RadixNode
from lightserve.router.kv.sliding_window import SlidingWindowPool
from lightserve.router.kv.state_pool import StatePool
from lightserve.router.policy import POLICIES, make_policy
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, Scheduler, SchedulerLimits, make_limits
from lightserve.router.scheduler.chunking import SHORT_PROMPT, prompt_tokens
from lightserve.router.token_budget import MIN_HISTORY
from test.router.group_memory import memory_of
from test.router.processing import StepOuts, drafts_result, process_tokens

EOS = 7
ROOT = 0


def fold(prefix: int, token_id: int) -> int:
    return hash((prefix, token_id))


def next_token(prefix: int, seed: int) -> int:
    """The token that the model samples after a prefix: one token in twelve is EOS."""
    return hash((prefix, seed, 1)) % 12  # integers only: strings hash anew in each process


def num_forced(prefix: int, seed: int) -> int:
    """How many tokens a grammar forces after the next: for every other request, at every other position."""
    return hash((prefix, seed, 2)) % 7 if seed % 2 and hash((prefix, seed, 3)) % 2 else 0


def num_accepted(prefix: int, seed: int, drafts: int) -> int:
    """How many of the drafts after the next token are those that the model would sample."""
    return hash((prefix, seed, 4)) % (drafts + 1)


def truth(prompt: Iterable[int], seed: int, max_new_tokens: int, root: int = ROOT) -> list[int]:
    """The output of a server with one request and unlimited memory."""
    prefix = root
    for token_id in prompt:
        prefix = fold(prefix, token_id)
    made: list[int] = []
    while len(made) < max_new_tokens and (not made or made[-1] != EOS):
        made.append(next_token(prefix, seed))
        prefix = fold(prefix, made[-1])
    return made


Written = list[list[int]]  # slots to which a step writes: of the pool of all tokens, then of each KV group


class InFlight(NamedTuple):
    step: Step
    outs: StepOuts
    written: Written


@dataclass
class KvReq:
    ids: list[int]
    seed: int
    slots: list[int]  # by position
    prefixes: list[int] = field(default_factory=list)  # what each slot must hold
    root: int = ROOT  # the prefix of no tokens
    may_force: bool = False  # it may get several tokens at once, like a request with a grammar
    entered_len: int = field(init=False)  # tokens with which it entered
    computed: int = field(init=False)  # its first tokens, whose slots hold their KV

    def __post_init__(self) -> None:
        self.entered_len, self.computed = len(self.ids), len(self.slots)
        self.extend_prefixes()

    def extend_prefixes(self) -> None:
        for token_id in self.ids[len(self.prefixes) :]:
            self.prefixes.append(fold(self.prefixes[-1] if self.prefixes else self.root, token_id))


def drafts_of(step: Step) -> dict[int, int]:
    """By request: the drafts that a step computes."""
    return dict(zip(int64s(step.decode_ids).tolist(), int32s(step.draft_counts).tolist(), strict=False))


def counts_of(step: Step) -> dict[int, int]:
    """By request: the tokens that a step computes, with drafts."""
    drafts = drafts_of(step)
    decodes = {req_id: 1 + drafts.get(req_id, 0) for req_id in int64s(step.decode_ids).tolist()}
    return decodes | {row.req_id: len(row.slots) for row in step.chunks}


class KvWorker:
    """Runs steps like a model worker, and checks every slot of a request whenever it computes a token of it.

    With ``forces`` it sometimes returns several tokens of a request at once, like a grammar. It accepts a random number
    of the drafts that a step computes, and none before tokens that are forced already. The slots of the others hold
    something else.
    """

    def __init__(
        self,
        group: GroupScheduler,
        poison: frozenset[int] = frozenset(),
        forces: bool = False,
    ) -> None:
        self._num_rows = group.limits.max_running  # a request has a row of the table until it is freed
        self._forces = forces
        self._drafts = group.limits.num_drafts > 0
        self._num_stages = group.limits.num_stages
        self.written: Written = []  # by the last step
        self.computed = 0  # tokens
        self._poison = poison  # requests that crash it
        self.reqs: dict[int, KvReq] = {}
        self.retained: dict[int, KvReq] = {}  # that later requests may name as parents
        self._kv: list[int | None] = [None] * group.pool.size
        self._groups = [memory_of(pool) for pool in group.pool.groups]

    def run(self, step: Step) -> StepOuts:
        assert set(step.retain) <= set(step.free), "a request is kept that does not leave"
        self.retained.update({req_id: self.reqs[req_id] for req_id in step.retain})
        for req_id in step.free:
            del self.reqs[req_id]
        for req_id in step.release:
            del self.retained[req_id]
        for new in map(self._whole, step.new):
            assert new.req_id not in self.reqs, "a request enters that was not freed"
            assert len(self.reqs) < self._num_rows, "all request rows are taken"
            self._enter(new)
        assert len({row.req_id for row in step.rows}) == len(step.rows)
        if any(row.req_id in self._poison for row in step.rows):
            raise WorkerDiedError("poison")
        self._check_token_ids(step)
        for req in (self.reqs[row.req_id] for row in step.chunks):
            assert self._drafts or len(req.slots) == req.computed
            del req.slots[req.computed :]  # the router took back those of rejected drafts
        for group, of_group in zip(self._groups, step.group_slots, strict=True):
            group.begin_step(step.rows, self.reqs, of_group.tolist(), step.snapshots.tolist())
        for row in step.rows:
            self.reqs[row.req_id].slots.extend(row.slots)
        counts = counts_of(step)
        self.written = self._slots_of(counts)
        for slots in self.written:
            assert len(set(slots)) == len(slots), "a slot is written twice in a step"
        before = {req_id: self.reqs[req_id].computed for req_id in counts}
        outs = self._results(counts, drafts_of(step))
        for req_id, begin in before.items():  # all rows of a step are written before one is read
            self._check_read(req_id, self.reqs[req_id].computed - begin)
        return outs

    def _results(self, counts: dict[int, int], drafts: dict[int, int]) -> StepOuts:
        outs, accepted = StepOuts(), dict[int, int]()
        for req_id, count in counts.items():
            if drafts.get(req_id):
                accepted[req_id] = self._accept(req_id, count - 1)
                outs += self._draft(req_id, count, accepted[req_id])
            else:
                outs += self._compute(req_id, count)
        outs.drafts = drafts_result(accepted)
        return outs

    def _enter(self, new: NewReq) -> None:
        for group, slots in zip(self._groups, new.group_slots, strict=True):
            group.enter(new.req_id, len(new.cached_slots), slots.tolist())
        req = KvReq(list(new.token_ids), new.seed, list(new.cached_slots), root=self._root_of(new))
        req.may_force = self._forces
        self.reqs[new.req_id] = req

    def _slots_of(self, counts: dict[int, int]) -> Written:
        """The slots of all pools to which a step writes that computes so many tokens of these requests."""
        written: Written = [[] for _ in range(1 + len(self._groups))]
        for req_id, count in counts.items():
            req = self.reqs[req_id]
            assert req.computed + count <= len(req.slots), "a token has no slot"
            written[0] += req.slots[req.computed : req.computed + count]
            for slots, group in zip(written[1:], self._groups, strict=True):
                slots += group.written(req_id, req.computed, count)
        return written

    def _compute(self, req_id: int, count: int) -> list[TokenOut]:
        req = self.reqs[req_id]
        self._write(req_id, count)
        return self._sample(req_id) if req.computed == len(req.ids) else []

    def _accept(self, req_id: int, drafts: int) -> int:
        """How many drafts it accepts: none instead of tokens that are known already."""
        req = self.reqs[req_id]
        return num_accepted(req.prefixes[-1], req.seed, drafts) if req.computed + 1 == len(req.ids) else 0

    def _draft(self, req_id: int, count: int, accepted: int) -> list[TokenOut]:
        """Compute the next token of a request, and drafts of those after it."""
        req = self.reqs[req_id]
        begin = req.computed
        self._write(req_id, 1)
        outs = [self._sample_one(req_id) for _ in range(accepted)]
        self._write(req_id, accepted)
        for position in range(req.computed, begin + count):
            self._kv[req.slots[position]] = None
            for group in self._groups:
                group.reject(req_id, position)
        return outs + (self._sample(req_id) if req.computed == len(req.ids) else [])

    def _root_of(self, new: NewReq) -> int:
        """Requests of different roots must not share KV."""
        return ROOT

    def _whole(self, new: NewReq) -> NewReq:
        if new.parent is None:
            return new
        parent, part = self.retained[new.parent.req_id], new.parent
        assert part.num_tokens <= parent.entered_len, "the parent did not enter with so many tokens"
        assert part.num_slots <= parent.entered_len
        token_ids = [*parent.ids[: part.num_tokens], *new.token_ids]
        return msgspec.structs.replace(
            new, token_ids=token_ids, cached_slots=[*parent.slots[: part.num_slots], *new.cached_slots]
        )

    def _check_token_ids(self, step: Step) -> None:
        """The first stage of a pipeline does not know the tokens that the last one has sampled."""
        reqs = [(self.reqs[row.req_id], len(row.slots)) for row in step.rows]
        expected = [id for req, count in reqs for id in req.ids[req.computed :][:count]]
        assert list(step.token_ids) == (expected if self._num_stages > 1 else [])

    def fail(self, written: Iterable[Written]) -> None:
        """As if steps that wrote to these slots had not been computed; their requests are freed."""
        self.reqs.clear()
        self.retained.clear()
        for slots, *of_groups in written:
            for slot in slots:
                self._kv[slot] = None
            for group, of_group in zip(self._groups, of_groups, strict=True):
                group.fail(of_group)

    def _write(self, req_id: int, count: int) -> None:
        req = self.reqs[req_id]
        for position in range(req.computed, req.computed + count):
            self._kv[req.slots[position]] = req.prefixes[position]
            for group in self._groups:
                group.write(req_id, req, position)
        req.computed += count
        self.computed += count

    def _check_read(self, req_id: int, count: int) -> None:
        """All slots that its last ``count`` tokens read."""
        req = self.reqs[req_id]
        held = [self._kv[slot] for slot in req.slots[: req.computed]]
        assert held == req.prefixes[: len(held)], "a slot does not hold the prefix that is read from it"
        for group in self._groups:
            group.end_req(req_id, req, count)

    def _sample(self, req_id: int) -> list[TokenOut]:
        req = self.reqs[req_id]
        forced = num_forced(req.prefixes[-1], req.seed) if req.may_force else 0
        return [self._sample_one(req_id) for _ in range(1 + forced)]

    def _sample_one(self, req_id: int) -> TokenOut:
        req = self.reqs[req_id]
        token_id = next_token(req.prefixes[-1], req.seed)
        req.ids.append(token_id)
        req.extend_prefixes()
        return TokenOut(req_id, Token(token_id))


class Server:
    """The router's loop without processes: ``depth`` steps are planned before the tokens of the first are seen."""

    def __init__(
        self, scheduler: Scheduler, depth: int = 1, poison: frozenset[int] = frozenset(), forces: bool = False
    ) -> None:
        self.scheduler = scheduler
        self._forces = forces
        self.now_s = 0.0
        self.peak_used = 0
        self.order: list[int] = []  # request ids in the order of first admission
        self.steps: list[set[int]] = []  # the requests of each
        self.crashing: list[int] = []
        self.crashes = 0
        self._depth = depth
        self._poison = poison
        self._in_flight: deque[InFlight] = deque()
        self.worker = self._new_worker()

    def _new_worker(self) -> KvWorker:
        return KvWorker(self.scheduler.only_group, self._poison, self._forces)

    def step(self) -> bool:
        """Whether anything was done."""
        while len(self._in_flight) < self.depth and (step := self._next_step()):
            self.order += [new.req_id for new in step.new if new.req_id not in self.order]
            self.steps.append({row.req_id for row in step.rows})
            self._check_no_token_is_in_flight(step)
            try:
                self.launch(step)
            except WorkerDiedError:
                self.crash()
                return True
            pool = self.scheduler.only_group.pool
            self.peak_used = max(self.peak_used, pool.used)
            assert pool.slots.num_used + pool.slots.num_free == pool.size
            self._check_groups()
            self._check_kept_counts()
        if not self._in_flight:
            return False
        process_tokens(self.scheduler, self._in_flight.popleft().outs, self.step_s)
        self._check_kept_counts()
        return True

    @property
    def step_s(self) -> float | None:
        """How long the last step took, if that is known."""
        return None

    def launch(self, step: Step) -> None:
        self._in_flight.append(InFlight(step, self.worker.run(step), self.worker.written))

    def _check_no_token_is_in_flight(self, step: Step) -> None:
        """The first stage of a pipeline cannot begin with a token that the last one has not sampled."""
        in_flight = {out.req_id for one in self._in_flight for out in one.outs}
        assert self.scheduler.limits.num_stages == 1 or in_flight.isdisjoint(row.req_id for row in step.rows)

    def _next_step(self) -> Step | None:
        admission = self.scheduler.only_group.admission
        admission.wake(self.now_s)
        if admission.has_no_room:  # then no request would be admitted
            admission._head = None
            assert not admission.admit(self.now_s)
        return self.scheduler.next_step(self.now_s)

    @property
    def depth(self) -> int:
        return 1 if self.scheduler.is_isolating_crash else self._depth

    def crash(self) -> None:
        """The worker dies with its state and the tokens in flight. Another one replaces it."""
        self.crashes += 1
        self._in_flight.clear()
        crashing_request = self.scheduler.recover_from_crash()
        if crashing_request is not None:
            self.crashing.append(crashing_request.req_id)
        self.worker = self._new_worker()

    def fail_steps(self) -> None:
        """The steps in flight fail before they compute anything."""
        self.worker.fail(one.written for one in self._in_flight)
        self._in_flight.clear()
        self.scheduler.cancel_steps()

    def run(self, reqs: list[Req]) -> None:
        for req in reqs:
            self.scheduler.add(req)
        while self.step():
            pass

    def assert_idle(self) -> None:
        scheduler = self.scheduler
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_blocked == 0
        assert scheduler.only_group.queue.next_deadline_s() is None
        assert scheduler.only_group.pool.used == scheduler.only_group.pool.shared_tokens == 0
        assert scheduler.only_group.pool.slots.num_used == scheduler.only_group.pool.cached_tokens, (
            "idle means used = cached"
        )
        self._check_groups()
        assert not any(group.used for group in scheduler.only_group.pool.groups)
        assert not self.worker.reqs
        assert set(self.worker.retained) <= scheduler.only_group.fork_points._fork_points.keys(), (
            "the worker keeps requests without need"
        )

    def _check_kept_counts(self) -> None:
        """What the batch keeps up to date is what its requests add up to."""
        batch = self.scheduler.only_group.batch
        reqs = list(batch)
        assert batch.max_tokens == sum(len(req.prompt_ids) + req.max_new_tokens for req in reqs)
        assert self.scheduler.only_group.queue.num_tokens == sum(
            len(req.prompt_ids) for req in self.scheduler.only_group.queue
        )
        assert batch.rows.tolist() == [req.row for req in reqs]
        assert batch.at(batch.rows) == reqs
        assert batch.unplanned().tolist() == [req.unplanned for req in reqs]
        assert batch.has_in_flight() == any(req.in_flight or req.planned_drafts for req in reqs)
        tails = batch.columns.slots._lens, batch.columns.outputs._lens  # a look at the arrays would empty them
        assert all(req.planned_len + req.spare_slots == len(req._slots) + tails[0][req.row] for req in reqs)
        assert all(req.spare_slots >= req.planned_drafts >= 0 for req in reqs)
        assert all(req.output_len == len(req._outputs) + tails[1][req.row] for req in reqs)
        assert sorted(batch.rows.tolist() + batch._free_rows) == list(range(self.scheduler.limits.max_running))

    def _check_groups(self) -> None:
        """Every used slot of a KV group's pool is held by requests or cached, and is counted as that."""
        pool, reqs = self.scheduler.only_group.pool, list(self.scheduler.only_group.batch)
        for group in pool.groups:
            assert isinstance(group, SlidingWindowPool | StatePool)
            assert group._reqs.keys() == set(reqs)
            check_group(pool, group.slots, Counter(slot for req in reqs for slot in group.held_slots(req).tolist()))


def check_group(pool: KvPool, slots: GroupSlots, holders: Counter[int]) -> None:
    """``holders``: how many requests hold each slot of the group."""
    cached = [slot for slot in range(slots.size) if slots._token[slot] != NONE]
    assert {slot: int(slots._holders[slot]) for slot in holders} == holders
    assert slots._slots.num_used == len(holders | Counter(cached))
    assert slots.used == len(holders)
    assert [slots._slot_of[slots._token[slot]] for slot in cached] == cached
    assert (slots._slot_of != NONE).sum() == len(cached)
    cached_tokens = {int(slot) for node in _cached_nodes(pool) for slot in node.slots}
    assert {int(slots._token[slot]) for slot in cached} <= cached_tokens


def _cached_nodes(pool: KvPool) -> list[RadixNode]:
    return pool._cache._nodes_below(*pool._cache._roots.values())


def windows_of(windowed: SlidingWindowKv | None, num_slots: int) -> list[KvGroupPool]:
    return make_group_pools([] if windowed is None else [windowed], num_slots)


def make_group(
    num_slots: int = 1000,
    policy: str = "fifo",
    windowed: SlidingWindowKv | None = None,
    state_rows: int = 0,
    **limits: object,
) -> GroupScheduler:
    """With a pool of recurrent state too, if it has ``state_rows``."""
    defaults: dict[str, object] = {"max_running": 8, "batch_max_tokens": 64, "chunk_size": 64, "token_ratio": 0.0}
    states = [StatePool(StateKv(state_rows), num_slots)] if state_rows else []
    scheduler_limits = SchedulerLimits(**defaults | limits)  # type: ignore[arg-type]
    pool = KvPool(num_slots, [*windows_of(windowed, num_slots), *states], scheduler_limits.kv_lookahead)
    return GroupScheduler(pool, scheduler_limits, make_policy(policy))


def make(
    num_slots: int = 1000,
    policy: str = "fifo",
    windowed: SlidingWindowKv | None = None,
    state_rows: int = 0,
    **limits: object,
) -> Scheduler:
    return Scheduler(make_group(num_slots, policy, windowed, state_rows, **limits))


def beside_a_stream(num_slots: int, batch_max_tokens: int, chunk_size: int) -> tuple[Scheduler, Server]:
    """A scheduler with a request that decodes for longer than the test lasts."""
    scheduler = make(num_slots, batch_max_tokens=batch_max_tokens, chunk_size=chunk_size)
    server = Server(scheduler)
    scheduler.add(make_req(0, [1, 2, 3], 500))
    server.step()
    return scheduler, server


def make_req(
    req_id: int,
    prompt: Int32s,
    max_new_tokens: int = 8,
    seed: int | None = None,
    grammar: GrammarSpec | None = None,
    **fields: Any,
) -> Req:
    seed = req_id if seed is None else seed
    params = GenerationParams.of(max_new_tokens=max_new_tokens, seed=seed, grammar=grammar)
    return Req(req_id, prompt, params, max_new_tokens, (EOS,), arrived_s=float(req_id), **fields)


def endless(req_id: int) -> Req:
    """A request that decodes for longer than the test lasts."""
    req = make_req(req_id, [1, 2, req_id], 500)
    req.eos_ids = ()
    return req


prompts = st.builds(
    lambda shared, own: [100 + i for i in range(shared)] + own,
    st.integers(0, 40),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
)


@st.composite
def windowed_pools(draw: st.DrawFn) -> SlidingWindowKv:
    window = draw(st.integers(1, 30))
    kept = max(window - 1, 1) + draw(st.integers(0, 5))
    return SlidingWindowKv(kept + draw(st.integers(1, 4) | st.integers(5, 200)), window, kept)


@st.composite
def servers(draw: st.DrawFn, num_slots: st.SearchStrategy[int]) -> Server:
    batch_max_tokens = draw(st.integers(9, 64))
    scheduler = make(
        draw(num_slots),
        draw(st.sampled_from(list(POLICIES))),
        draw(st.none() | windowed_pools()),
        draw(st.just(0) | st.integers(2, 30)),
        max_running=draw(st.integers(1, 8)),
        batch_max_tokens=batch_max_tokens,
        chunk_size=draw(st.sampled_from([batch_max_tokens, batch_max_tokens // 2, None])),
        token_ratio=draw(st.sampled_from([0.0, 0.5, 1.0])),
        num_stages=draw(st.sampled_from([1, 1, 1, 2, 3])),  # steps of several are smaller, so a run takes longer
    )
    for length in draw(st.sampled_from([[], [1] * MIN_HISTORY, [5] * MIN_HISTORY, [3, 20] * MIN_HISTORY])):
        scheduler.only_group._estimate.observe(length)  # too short for most requests
    return Server(scheduler, draw(st.integers(1, 3)), forces=draw(st.booleans()))


@st.composite
def mixed_loads(draw: st.DrawFn) -> tuple[Server, list[Req]]:
    """Prompts that share a prefix or none."""
    kinds: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
        [{}, {"salt": "a"}, {"salt": "group", "keeps_kv_cached": False}]
    )
    wanted = draw(st.lists(st.tuples(prompts, st.integers(1, 20), st.integers(-1, 1), kinds), min_size=1, max_size=20))
    reqs = [
        make_req(i, prompt, most, priority=priority, **kind) for i, (prompt, most, priority, kind) in enumerate(wanted)
    ]
    return draw(servers(st.integers(85, 200))), reqs


@st.composite
def identical_loads(draw: st.DrawFn) -> tuple[Server, list[Req]]:
    """Short prompts that are all the same, with the same outputs or others, in a pool that is too small for all."""
    prompt = [1] * draw(st.integers(1, 4))
    seed = draw(st.sampled_from([None, *range(10)]))
    reqs = [make_req(i, prompt, 20, seed) for i in range(draw(st.integers(10, 30)))]
    server = draw(servers(st.integers(26, 52)))
    for _ in range(MIN_HISTORY):
        server.scheduler.only_group._estimate.observe(5)  # too short
    return server, reqs


fresh_histories = settings.get_profile("histories")


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_of_a_pipeline_get_equal_shares_of_the_requests(num_stages: int) -> None:
    server = Server(make(10_000, num_stages=num_stages), depth=num_stages)
    for req_id in range(6):
        server.scheduler.add(endless(req_id))
    for _ in range(20):
        server.step()

    last = server.steps[-num_stages:]

    assert [len(step) for step in last] == [6 // num_stages] * num_stages
    assert set.union(*last) == set(range(6))


def test_no_request_of_a_pipeline_waits_for_others_that_decode() -> None:
    """With one step in flight, as while a crash is isolated, half of the requests would always go first."""
    server = Server(make(10_000, num_stages=2), depth=1)
    for req_id in range(4):
        server.scheduler.add(endless(req_id))
    for _ in range(8):
        server.step()

    assert set.union(*server.steps[-2:]) == set(range(4))


def test_chunks_of_a_prompt_are_in_flight_together_in_a_pipeline() -> None:
    scheduler = make(num_stages=2, batch_max_tokens=16, chunk_size=16)
    scheduler.add(make_req(0, list(range(40))))

    steps = [scheduler.next_step() for _ in range(4)]

    assert [0 if step is None else step.num_tokens for step in steps] == [16, 16, 8, 0]


@fresh_histories
@given(identical_loads())
def test_identical_short_prompts_all_get_their_text_though_estimates_are_too_short(
    load: tuple[Server, list[Req]],
) -> None:
    server, reqs = load

    server.run(reqs)

    assert all(req.output_ids == truth(req.prompt_ids, req.seed, 20) for req in reqs)
    server.assert_idle()


@fresh_histories
@given(
    load=mixed_loads() | identical_loads(),
    events=st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 19), st.booleans()), max_size=60),
    crashes=st.sets(st.integers(0, 60), max_size=8),
)
def test_every_request_gets_its_text_and_all_memory_is_freed_whatever_happens(
    load: tuple[Server, list[Req]], events: list[tuple[int, int | None, bool]], crashes: set[int]
) -> None:
    server, reqs = load
    to_come = deque(reqs)
    aborted = set()

    for number, (arrivals, victim, is_mid_step) in enumerate(events):
        for _ in range(min(arrivals, len(to_come))):
            server.scheduler.add(to_come.popleft())
        if victim is not None and server.scheduler.abort(victim) is not None:
            aborted.add(victim)
        if number in crashes and not is_mid_step:
            server.crash()
        server.step()
        if number in crashes and is_mid_step:
            server.crash()
    server.run(list(to_come))

    for req in reqs:
        if req.req_id not in aborted and req.req_id not in server.crashing:
            assert req.output_ids == truth(req.prompt_ids, req.seed, req.max_new_tokens)
            is_end = req.output_ids[-1] == EOS
            assert req.finish_reason is (FinishReason.STOP if is_end else FinishReason.LENGTH)
    assert server.peak_used <= server.scheduler.only_group.pool.size
    server.assert_idle()


@fresh_histories
@given(
    load=mixed_loads() | identical_loads(),
    events=st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 19), st.booleans()), max_size=40),
)
def test_what_failed_steps_were_to_compute_is_never_read(
    load: tuple[Server, list[Req]], events: list[tuple[int, int | None, bool]]
) -> None:
    server, reqs = load
    to_come = deque(reqs)
    for arrivals, victim, fails in events:
        for _ in range(min(arrivals, len(to_come))):
            server.scheduler.add(to_come.popleft())
        if victim is not None:
            server.scheduler.abort(victim)
        server.step()
        if fails:
            server.fail_steps()
            server.assert_idle()

    again = [make_req(100 + i, req.prompt_ids, req.max_new_tokens, req.seed) for i, req in enumerate(reqs)]
    server.run([*to_come, *again])  # would read what the steps left in the cache

    assert all(req.output_ids == truth(req.prompt_ids, req.seed, req.max_new_tokens) for req in again)
    server.assert_idle()


@st.composite
def beam_steps(draw: st.DrawFn) -> list[list[tuple[int, list[int], bool]]]:
    """For each step the sequences: which one of the last step they continue, their own tokens, whether they abort."""
    own = st.lists(st.integers(0, 3), min_size=1, max_size=4)
    sequence = st.tuples(st.integers(0, 5), own, st.sampled_from([False] * 4 + [True]))
    return draw(st.lists(st.lists(sequence, min_size=1, max_size=6), min_size=2, max_size=8))


@fresh_histories
@given(
    server=servers(st.integers(85, 200)),
    prompt=prompts,
    steps=beam_steps(),
    crashes=st.sets(st.integers(0, 7), max_size=2),
    preempted=st.sets(st.integers(0, 7), max_size=3),
    others=st.lists(st.tuples(prompts, st.integers(1, 20)), max_size=8),
)
def test_sequences_that_continue_others_get_their_text_and_leave_nothing_whatever_happens(
    server: Server,
    prompt: list[int],
    steps: list[list[tuple[int, list[int], bool]]],
    crashes: set[int],
    preempted: set[int],
    others: list[tuple[list[int], int]],
) -> None:
    """As a beam search does: each step continues sequences of the last step, and releases those before it."""
    scheduler, ids = server.scheduler, itertools.count()
    parents = [make_req(next(ids), prompt, 1, can_fork=True)]
    server.run(parents)
    unneeded: list[int] = []
    for number, sequences in enumerate(steps):
        reqs = []
        for place, own, _ in sequences:
            parent = parents[place % len(parents)]
            begin = scheduler.only_group.fork_points.tokens_of(parent.req_id)
            assert begin is not None
            whole = [*begin.tolist(), *own]
            reqs.append(make_req(next(ids), whole, 1 + place % 2, parent=parent.req_id, can_fork=True))
            scheduler.add(reqs[-1])
        scheduler.only_group.fork_points.release(unneeded)
        if number < len(others):
            scheduler.add(make_req(1000 + number, *others[number]))
        server.step()
        if number in preempted and scheduler.num_running:
            scheduler.only_group.preemption.preempt_newest()
        aborted = [
            req
            for req, (_, _, is_aborted) in zip(reqs, sequences, strict=True)
            if is_aborted and scheduler.abort(req.req_id)
        ]
        if number in crashes:
            server.crash()
        while server.step():
            pass
        ended = [req for req in reqs if req not in aborted and req.req_id not in server.crashing]
        assert all(req.output_ids == truth(req.prompt_ids, req.seed, req.max_new_tokens) for req in ended)
        if not ended:
            unneeded = [req.req_id for req in parents + reqs]
            break
        unneeded, parents = [req.req_id for req in (*parents, *reqs) if req not in ended], ended
    scheduler.only_group.fork_points.release([*unneeded, *(req.req_id for req in parents)])
    server.run([])

    server.assert_idle()
    assert not server.worker.retained
    assert not len(scheduler.only_group.fork_points)


def entering(server: Server) -> list[NewReq]:
    """Run a step. Returns the requests that entered with it."""
    step = server.scheduler.next_step()
    assert step is not None
    process_tokens(server.scheduler, server.worker.run(step))
    return step.new


def test_a_request_with_a_parent_enters_with_the_tokens_that_follow() -> None:
    server = Server(make())
    server.run([make_req(0, list(range(100, 150)), 1, can_fork=True)])

    server.scheduler.add(make_req(1, [*range(100, 150), 3], parent=0))
    [new] = entering(server)

    assert new.parent == ForkPrefix(0, 50, 50)
    assert (list(new.token_ids), list(new.cached_slots)) == ([3], [])


def test_a_request_enters_with_all_its_tokens_if_its_parent_is_released() -> None:
    server = Server(make())
    server.run([make_req(0, list(range(100, 150)), 1, can_fork=True)])
    assert set(server.worker.retained) == {0}

    server.scheduler.only_group.fork_points.release([0])
    server.scheduler.add(make_req(1, [*range(100, 150), 3], parent=0))
    [new] = entering(server)

    assert not server.worker.retained
    assert new.parent is None
    assert len(new.token_ids) == 51
    assert len(new.cached_slots) == 50


def test_the_workers_keep_no_parent_that_is_released_before_they_free_it() -> None:
    server = Server(make())
    server.scheduler.add(make_req(0, list(range(100, 150)), 1, can_fork=True))
    server.step()

    server.scheduler.only_group.fork_points.release([0])
    server.run([])

    assert not server.worker.retained
    server.assert_idle()


def test_after_a_crash_a_request_enters_with_all_its_tokens_once() -> None:
    server = Server(make())
    server.run([make_req(0, list(range(100, 150)), 1, can_fork=True)])
    server.crash()
    children = [make_req(1 + i, [*range(100, 150), i], 1, parent=0, can_fork=True) for i in range(2)]
    server.run(children)

    whole = server.worker.computed
    server.run([make_req(3 + i, [*range(100, 150), i, 5], 1, parent=1 + i) for i in range(2)])

    assert whole == 50 + 2
    assert server.worker.computed == whole + 2
    assert set(server.worker.retained) == {1, 2}


def test_a_preempted_request_enters_again_once_with_arrays() -> None:
    """What the workers know of it has left them with its row, and is sent again with one step."""
    server = Server(make())
    req = make_req(0, list(range(100, 150)), 20)
    req.eos_ids = ()
    server.scheduler.add(req)
    for _ in range(5):
        server.step()

    server.scheduler.only_group.preemption.preempt_newest()
    entered = [new for _ in range(4) for new in entering(server)]

    [new] = entered
    assert isinstance(new.token_ids, np.ndarray)
    assert (new.token_ids.dtype, new.cached_slots.dtype) == (np.int32, np.int32)
    assert len(encode(new)) < 400 + 2 * new.token_ids.nbytes


def test_only_what_steps_in_flight_were_to_compute_is_taken_back() -> None:
    server = Server(make(2000, batch_max_tokens=64), depth=2)
    req = make_req(0, list(range(1000, 1200)), 5)
    server.scheduler.add(req)
    server.step()  # two steps of 64 tokens were planned, and the first is back
    assert (req.certain_len, req.planned_len) == (64, 128)

    server.fail_steps()

    assert server.scheduler.only_group.pool.cached_tokens == 64
    server.run([again := make_req(1, req.prompt_ids, 5)])
    assert again.cached_len == 64
    server.assert_idle()


def test_a_request_that_does_not_fit_is_looked_at_again_only_after_a_change() -> None:
    scheduler = make(200)
    server = Server(scheduler)
    running = make_req(0, [1, 2, 3], 100)
    running.eos_ids = ()
    scheduler.add(running)
    server.step()
    scheduler.add(waiting := make_req(1, list(range(1000, 1150)), 40))
    scheduler.next_step()
    looked_at = scheduler.only_group.pool._cache._now  # counts what was looked up

    assert scheduler.only_group.admission.has_no_room
    for _ in range(5):
        scheduler.next_step()
    assert scheduler.only_group.pool._cache._now == looked_at
    scheduler.abort(0)
    scheduler.next_step()
    assert waiting in scheduler.only_group.batch


@pytest.mark.parametrize("forces", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_pool_that_is_too_small_preempts_requests_and_finishes_every_text(depth: int, forces: bool) -> None:
    server = Server(make(600, max_running=50, batch_max_tokens=256, token_ratio=1.0), depth, forces=forces)
    for _ in range(64):
        server.scheduler.only_group._estimate.observe(10)  # far too short: these requests generate more
    reqs = [make_req(i, [50 + i, 1, 2, 3], 200) for i in range(50)]
    for req in reqs:
        req.eos_ids = ()

    server.run(reqs)

    assert all(len(req.output_ids) == 200 for req in reqs)
    assert all(req.finish_reason is FinishReason.LENGTH for req in reqs)
    assert server.scheduler.num_preemptions > 0
    server.assert_idle()


def test_a_request_that_is_preempted_and_admitted_in_one_step_frees_its_row() -> None:
    """All requests generate the same tokens, so a preempted one fits again at once: the others' KV serves it too."""
    server = Server(make(43, max_running=3, token_ratio=1.0))
    for _ in range(MIN_HISTORY):
        server.scheduler.only_group._estimate.observe(5)  # too short
    reqs = [make_req(i, [1], 20, seed=7) for i in range(13)]

    server.run(reqs)

    assert server.scheduler.num_preemptions > 0
    assert [req.output_ids for req in reqs] == [truth([1], 7, 20)] * 13
    server.assert_idle()


def test_without_estimates_no_request_is_preempted() -> None:
    server = Server(make(600, max_running=50, token_ratio=0.0))
    for _ in range(64):
        server.scheduler.only_group._estimate.observe(1)

    server.run([make_req(i, [50 + i, 1, 2, 3], 200) for i in range(50)])

    assert server.scheduler.num_preemptions == 0


def test_a_common_prompt_sent_at_once_is_computed_once() -> None:
    server = Server(make(4000, max_running=32, batch_max_tokens=4096, chunk_size=256))
    system = list(range(1000, 2000))

    server.run([make_req(i, [*system, i], max_new_tokens=1) for i in range(32)])

    assert server.worker.computed == 1000 + 32


def test_the_next_turn_of_a_chat_computes_only_what_is_new() -> None:
    server = Server(make(4000))
    history = list(range(100, 130))
    for turn in range(10):
        req = make_req(turn, history, max_new_tokens=6)
        before = server.worker.computed

        server.run([req])

        new = len(history) - req.cached_len
        assert turn == 0 or new <= 12  # the last answer's last token, and the new question
        assert server.worker.computed - before == new + len(req.output_ids) - 1
        history = [*history, *req.output_ids, *range(500 + turn * 10, 510 + turn * 10)]


@pytest.mark.parametrize("depth", [1, 2])
def test_forced_tokens_are_computed_in_one_step(depth: int) -> None:
    scheduler = make()
    req = make_req(0, [1, 2, 3], max_new_tokens=9)
    scheduler.add(req)
    steps = [scheduler.next_step() for _ in range(depth)]

    forced = [TokenOut(0, Token(token)) for token in (101, 102, 103)]
    process_tokens(scheduler, [TokenOut(0, Token(100)), *forced])
    step = scheduler.next_step()

    assert [len(row.slots) for one in steps if one for row in one.rows] == [3, 1][:depth]
    assert step is not None
    assert [len(row.slots) for row in step.rows] == [5 - depth]  # a step in flight computes the first of them
    assert req.in_flight == 1


def test_forced_tokens_beyond_the_end_of_their_request_are_dropped() -> None:
    scheduler = make()
    reqs = [make_req(0, [1, 2], max_new_tokens=3), make_req(1, [3, 4], max_new_tokens=9)]
    for req in reqs:
        scheduler.add(req)
    scheduler.next_step()

    outs = []
    for req_id in (0, 1):
        forced = [TokenOut(req_id, Token(token)) for token in (101, 102, EOS, 103)]
        outs += [TokenOut(req_id, Token(100)), *forced]
    process_tokens(scheduler, outs)

    assert [req.output_ids for req in reqs] == [[100, 101, 102], [100, 101, 102, EOS]]
    assert [req.finish_reason for req in reqs] == [FinishReason.LENGTH, FinishReason.STOP]


def test_requests_of_different_salts_share_no_prefix() -> None:
    server = Server(make())
    prompt = list(range(100, 150))

    server.run([make_req(0, prompt, 1, salt="a")])
    server.run([make_req(1, prompt, 1, salt="b")])

    assert server.worker.computed == 100


def test_requests_that_leave_no_cache_share_their_prompt_while_they_run_and_leave_nothing() -> None:
    server = Server(make(2000))
    prompt = list(range(100, 150))

    reqs = [make_req(i, prompt, 9, salt="group 1", keeps_kv_cached=False) for i in range(5)]
    for req in reqs:
        req.eos_ids = ()

    server.run(reqs[:4])
    server.run(reqs[4:])

    last_tokens, outputs = 3, 5 * 8  # of a shared prompt its last token is computed; the KV of a last output is not
    assert server.worker.computed == 2 * 50 + last_tokens + outputs
    assert server.scheduler.only_group.pool.slots.num_used == 0
    server.assert_idle()


def test_a_long_prompt_is_computed_in_chunks_beside_running_requests() -> None:
    scheduler, server = beside_a_stream(2000, batch_max_tokens=11, chunk_size=10)
    scheduler.add(make_req(1, list(range(100, 125)), 5))

    sizes = []
    for _ in range(4):
        step = scheduler.next_step()
        assert step is not None
        sizes.append([len(row.slots) for row in step.rows])
        process_tokens(scheduler, server.worker.run(step))

    assert sizes == [[1, 10], [1, 10], [1, 5], [1, 1]]


def test_a_prompt_without_decodes_beside_it_takes_the_whole_step() -> None:
    scheduler = make(4000, batch_max_tokens=1000, chunk_size=10)
    scheduler.add(make_req(0, list(range(100, 1500)), 5))

    step = scheduler.next_step()

    assert step is not None
    assert [len(row.slots) for row in step.rows] == [1000]


def test_a_step_takes_more_prompt_tokens_beside_more_decodes() -> None:
    limits = SchedulerLimits(max_running=256, batch_max_tokens=1000, chunk_size=100)
    sized = SchedulerLimits(
        max_running=256, batch_max_tokens=8192, chunk_size=256, preferred_step_tokens=(256, 384, 512, 768, 1024, 1536)
    )

    assert [prompt_tokens(limits, decodes, 0) for decodes in (0, 1, 50, 128, 130)] == [1000, 101, 150, 228, 254]
    assert [prompt_tokens(sized, decodes, 1) for decodes in (0, 1, 20, 64, 128)] == [8192, 383, 364, 448, 384]
    assert prompt_tokens(sized, 256, 1) == 1280


H200 = SchedulerLimits(
    max_running=4096,
    batch_max_tokens=8192,
    chunk_size=256,
    preferred_step_tokens=(256, 384, 512, 768, 1024, 1280, 1536),
)


def test_the_defaults_of_a_gpu_are_the_sizes_that_were_measured_with_it() -> None:
    """Decodes, waiting requests and contexts of the loads in docs/log.md, and what steps had in them then."""
    assert [prompt_tokens(H200, decodes, 1) for decodes in (1, 8, 20, 64, 128, 200, 256)] == [
        *(383, 376, 364, 448, 384, 1336, 1280),
    ]
    assert [prompt_tokens(H200, 64, waiting) for waiting in (1, 3, 16, 64, 300)] == [448, 448, 448, 704, 960]
    assert [prompt_tokens(H200, 16, 2, context) for context in (0, 600, 1000, 1500, 4000, 9000)] == [
        *(368, 368, 368, 240, 240, 240),
    ]


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128, 512, 1024, 2048, 4096])
def test_the_operators_chunk_size_counts_whatever_sizes_the_device_likes(chunk_size: int) -> None:
    limits = replace(H200, chunk_size=chunk_size)

    few, many = prompt_tokens(limits, 1, 1), prompt_tokens(limits, 1, 200)

    assert chunk_size <= few <= 1.6 * chunk_size
    assert min(2 * chunk_size, 8191) <= many <= 6 * chunk_size


@pytest.mark.parametrize("batch_max_tokens", [1024, 8192])
def test_prompts_keep_a_share_beside_any_number_of_decodes(batch_max_tokens: int) -> None:
    limits = replace(H200, batch_max_tokens=batch_max_tokens)

    shares = [prompt_tokens(limits, decodes, 8, context) for decodes in range(1, 9000, 7) for context in (0, 100_000)]

    assert min(shares) >= 32
    assert prompt_tokens(H200, 1500, 1) >= 1000


def test_a_chunk_shrinks_with_the_context_before_it() -> None:
    contexts = (0, 9_000, 36_000, 64_000, 128_000, 1_000_000)

    few, many = ([prompt_tokens(H200, decodes, 1, context) for context in contexts] for decodes in (8, 256))

    assert few == sorted(few, reverse=True)
    assert many == sorted(many, reverse=True)
    assert few[4] < few[1] / 3  # a token behind 128,000 costs about four times as much as one behind 9,000
    assert many[4] < many[1] / 2
    assert few[-1] >= 32, "it goes on all the same"


def test_a_step_takes_more_prompt_tokens_if_more_requests_wait() -> None:
    limits = SchedulerLimits(max_running=256, batch_max_tokens=1000, chunk_size=100)
    sized = SchedulerLimits(
        max_running=256, batch_max_tokens=8192, chunk_size=256, preferred_step_tokens=(256, 384, 512, 1024)
    )

    assert [prompt_tokens(limits, 1, waiting) for waiting in (0, 1, 2, 3, 4, 400)] == [101, 127, 153, 178, 179, 401]
    assert [prompt_tokens(sized, 8, waiting) for waiting in (0, 1, 2, 3, 4, 400)] == [248, 376, 376, 504, 504, 1016]


def test_a_step_with_prompts_has_a_size_that_the_device_computes_well() -> None:
    scheduler = make(
        100_000, max_running=64, batch_max_tokens=8192, chunk_size=256, preferred_step_tokens=(256, 384, 512, 1024)
    )
    server = Server(scheduler)
    for req_id in range(20):
        scheduler.add(make_req(req_id, [req_id, 2, 3], 500))
    server.step()
    for req_id in range(20, 30):
        scheduler.add(make_req(req_id, list(range(1000 * req_id, 1000 * req_id + 900)), 5))

    steps = [scheduler.next_step() for _ in range(10)]

    assert {sum(len(row.slots) for row in step.rows) for step in steps if step is not None} <= {384, 512, 1024}


def test_short_prompts_pass_a_long_prompt_that_continues_beside_them() -> None:
    scheduler, _ = beside_a_stream(4000, batch_max_tokens=400, chunk_size=96)
    scheduler.add(make_req(1, list(range(1000, 3000)), 5))
    first = scheduler.next_step()
    scheduler.add(make_req(2, list(range(5000, 5050)), 5))
    scheduler.add(make_req(3, list(range(6000, 6030)), 5))
    second = scheduler.next_step()

    assert first is not None
    assert second is not None
    assert {row.req_id: len(row.slots) for row in first.rows} == {0: 1, 1: 122}
    sizes = {row.req_id: len(row.slots) for row in second.rows}
    assert sizes[3] == 30  # all of it
    assert sizes[2] == 50
    assert sizes[1] == pytest.approx(147 - 30 - 50, abs=2)  # what they leave


def test_a_long_prompt_gets_a_quarter_of_the_steps_that_short_prompts_could_fill() -> None:
    scheduler, _ = beside_a_stream(8000, batch_max_tokens=400, chunk_size=96)
    scheduler.add(make_req(1, list(range(1000, 3000)), 5))
    scheduler.next_step()
    for req_id in (2, 3, 4):
        scheduler.add(make_req(req_id, list(range(5000 * req_id, 5000 * req_id + 150)), 5))

    step = scheduler.next_step()

    assert step is not None
    sizes = {row.req_id: len(row.slots) for row in step.rows}
    assert sum(sizes.values()) == pytest.approx(172, abs=2)
    assert sizes[1] == pytest.approx(43, abs=1)


def test_short_prompts_are_computed_in_the_order_of_arrival() -> None:
    scheduler, _ = beside_a_stream(8000, batch_max_tokens=400, chunk_size=96)
    for req_id, length in ((1, 300), (2, 60), (3, 40)):
        scheduler.add(make_req(req_id, list(range(5000 * req_id, 5000 * req_id + length)), 5))

    first, second, third = (scheduler.next_step() for _ in range(3))

    assert first is not None
    assert second is not None
    assert third is not None
    assert [row.req_id for row in first.rows] == [0, 1]
    assert [row.req_id for row in second.rows] == [0, 1, 2]
    assert {row.req_id: len(row.slots) for row in third.rows} == {0: 1, 1: 1, 2: 18, 3: 40}


def test_a_long_prompt_makes_no_step_longer() -> None:
    def tokens_of_a_step(prompt_len: int) -> int:
        scheduler, _ = beside_a_stream(16_000, batch_max_tokens=400, chunk_size=96)
        for req_id, length in ((1, 200), (2, prompt_len)):
            scheduler.add(make_req(req_id, list(range(5000 * req_id, 5000 * req_id + length)), 5))
        scheduler.next_step()
        step = scheduler.next_step()
        assert step is not None
        return sum(len(row.slots) for row in step.rows)

    assert tokens_of_a_step(SHORT_PROMPT) > tokens_of_a_step(SHORT_PROMPT + 500)


def test_a_step_takes_fewer_prompt_tokens_behind_a_long_context() -> None:
    scheduler = make(100_000, batch_max_tokens=40_000, chunk_size=100)
    server = Server(scheduler)
    scheduler.add(make_req(0, list(range(1000, 33_000)), 5))
    server.step()
    scheduler.add(make_req(1, [*range(1000, 33_000), *range(50_000, 52_000)], 5))

    step = scheduler.next_step()

    assert step is not None
    assert [len(row.slots) for row in step.rows] == [1, 45]  # 127 of the first tokens; 32,000 tokens are before these


def test_short_prompts_share_a_step() -> None:
    scheduler = make(batch_max_tokens=64)
    for i in range(5):
        scheduler.add(make_req(i, [i, 1, 2, 3]))

    step = scheduler.next_step()

    assert step is not None
    assert [len(row.slots) for row in step.rows] == [4] * 5


@pytest.mark.parametrize(
    ("worker", "router", "device", "wanted"),
    [
        ({}, {}, StepLimits(8192, 512), (8192, 512)),
        ({}, {}, StepLimits(2048), (2048, 2048)),
        ({"batch_max_tokens": 256}, {}, StepLimits(8192, 512), (256, 256)),
        ({"batch_max_tokens": 4096}, {"chunked_prefill_size": 1024}, StepLimits(8192, 512), (4096, 1024)),
        ({}, {"disable_chunked_prefill": True}, StepLimits(8192, 512), (8192, None)),
    ],
)
def test_step_limits_are_the_operators_or_the_devices(
    worker: dict[str, int], router: dict[str, int], device: StepLimits, wanted: tuple[int, int | None]
) -> None:
    limits = make_limits(WorkerConfig(**worker), RouterConfig(**router), device)  # type: ignore[arg-type]

    assert (limits.batch_max_tokens, limits.chunk_size) == wanted


def test_requests_of_equal_priority_run_in_the_order_of_arrival() -> None:
    for policy, order in (("fifo", [0, 1, 2, 3, 4, 5]), ("priority", [1, 3, 5, 0, 2, 4])):
        server = Server(make(policy=policy, max_running=1))
        reqs = [make_req(i, [i], 2, priority=0 if i % 2 else 1) for i in range(6)]
        for req in reqs:
            req.arrived_s /= 100

        server.run(reqs)

        assert server.order == order


def test_a_request_that_waits_long_enough_passes_a_higher_priority() -> None:
    server = Server(make(policy="priority", max_running=1))
    old = make_req(0, [1], priority=5)
    late = make_req(1, [2], priority=0)
    late.arrived_s = old.arrived_s + 1000

    server.run([late, old])

    assert server.order == [0, 1]


def test_cache_aware_admits_cached_prompts_first_but_starves_no_request() -> None:
    server = Server(make(4000, policy="cache_aware", max_running=1))
    system = list(range(1000, 1100))
    server.run([make_req(0, system, 1)])
    stranger = make_req(1, [1, 2, 3], 1)

    server.run([stranger, *(make_req(i, [*system, i], 1) for i in range(2, 50))])

    place = server.order.index(1)
    assert 30 <= place <= 34


def test_waiting_and_running_requests_past_their_deadline_are_dropped() -> None:
    scheduler = make(max_running=1)
    server = Server(scheduler)
    reqs = [make_req(i, [i], 50, deadline_s=10.0 + i) for i in range(3)]
    for req in reqs:
        scheduler.add(req)
    server.step()

    assert scheduler.drop(lambda req: req.is_expired(9.0)) == []
    assert sorted(req.req_id for req in scheduler.drop(lambda req: req.is_expired(11.5))) == [0, 1]
    while server.step():
        pass
    assert reqs[2].finish_reason is not None
    server.assert_idle()


@pytest.mark.parametrize(("policy", "kept"), [("priority", {0, 2}), ("cache_aware", {0, 2}), ("fifo", {0, 1})])
def test_the_newest_request_of_the_lowest_priority_is_preempted_first(policy: str, kept: set[int]) -> None:
    """With fifo the newest request, whatever the priority."""
    scheduler = make(40, policy, max_running=3, token_ratio=1.0)
    for _ in range(64):
        scheduler.only_group._estimate.observe(2)
    reqs = [make_req(i, [i, 1, 2, 3], 30, priority=priority) for i, priority in enumerate((0, 1, 0))]
    for req in reqs:
        req.eos_ids = ()
    server = Server(scheduler)
    for req in reqs:
        scheduler.add(req)

    while not scheduler.num_preemptions:
        server.step()

    assert {req.req_id for req in scheduler.only_group.batch} == kept


@pytest.mark.parametrize(("policy", "first"), [("priority", 3), ("fifo", 2)])
def test_the_prompts_of_a_step_are_computed_by_priority_unless_the_policy_is_fifo(policy: str, first: int) -> None:
    scheduler = make(2000, policy, batch_max_tokens=400, chunk_size=96)
    server = Server(scheduler)
    scheduler.add(make_req(0, [1, 2, 3], 500))
    server.step()
    for req_id, priority in ((1, 1), (2, 1), (3, 0)):
        scheduler.add(make_req(req_id, list(range(1000 * req_id, 1000 * req_id + 100)), 5, priority=priority))

    step = scheduler.next_step()

    assert step is not None
    tokens = {row.req_id: len(row.slots) for row in step.rows}
    assert max((2, 3), key=lambda req_id: tokens.get(req_id, 0)) == first


def test_after_a_crash_all_requests_continue_where_they_were() -> None:
    server = Server(make(4000, max_running=16), depth=2)
    reqs = [make_req(i, [50 + i, 1, 2, 3], 30) for i in range(16)]
    for req in reqs:
        server.scheduler.add(req)
    while max(len(req.output_ids) for req in reqs) < 5:
        server.step()

    server.crash()
    server.run([])

    assert server.crashing == []
    assert all(req.output_ids == truth(req.prompt_ids, req.seed, 30) for req in reqs)
    server.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("poison", [{3}, {0, 5}, {7}])
def test_a_request_that_crashes_workers_is_found_and_the_others_get_their_text(depth: int, poison: set[int]) -> None:
    server = Server(make(4000), depth, frozenset(poison))
    reqs = [make_req(i, [50 + i, 1, 2, 3], 12) for i in range(12)]

    server.run(reqs)

    assert set(server.crashing) == poison
    assert server.crashes <= 2 * len(poison)
    for req in reqs:
        if req.req_id not in poison:
            assert req.output_ids == truth(req.prompt_ids, req.seed, req.max_new_tokens)
    server.assert_idle()


def test_a_request_that_was_in_flight_at_a_crash_runs_alone_until_it_has_a_token() -> None:
    server = Server(make(4000, batch_max_tokens=450), depth=2)
    for i in range(4):
        server.scheduler.add(make_req(i, [50 + i, *range(100)], 12))
    server.step()
    server.crash()
    before = len(server.steps)
    assert server.scheduler.is_isolating_crash

    while server.scheduler.is_isolating_crash:
        server.step()

    assert all(len(step) == 1 for step in server.steps[before:])
    assert set().union(*server.steps[before:]) == {0, 1, 2, 3}
    server.run([])
    assert server.crashing == []
    assert max(map(len, server.steps[before:])) == 4, "afterwards they share steps again"


def test_a_crash_while_idle_isolates_no_request() -> None:
    server = Server(make())
    server.run([make_req(0, [1, 2, 3])])

    server.crash()

    assert not server.scheduler.is_isolating_crash
    assert server.scheduler.only_group.pool.slots.num_used == 0
    server.run([make_req(1, [1, 2, 3])])
    server.assert_idle()


def pooled_req(req_id: int, length: int, shares_prefix: bool) -> Req:
    ids = np.arange(1, length + 1, dtype=np.int32)
    return Req(req_id, ids, GenerationParams(), 1, (), keeps_kv_cached=shares_prefix, shares_prefix=shares_prefix)


def test_a_pooling_request_ends_with_its_result_and_frees_its_tokens() -> None:
    scheduler = Scheduler(
        GroupScheduler(KvPool(64), SchedulerLimits(max_running=4, batch_max_tokens=32, chunk_size=None))
    )
    scheduler.add(pooled_req(0, 20, shares_prefix=False))
    step = scheduler.next_step()
    assert step is not None
    scheduler.complete_step()

    req = scheduler.process_embedding(0)

    assert req is not None
    assert (req.finish_reason, req.output_ids) == (FinishReason.STOP, [])
    assert scheduler.process_embedding(0) is None
    assert (scheduler.only_group.pool.slots.num_used, scheduler.num_running) == (0, 0)
    freed = scheduler.next_step()
    assert freed is not None
    assert freed.free == [0]


def test_a_text_that_is_pooled_as_a_whole_takes_no_cached_prefix() -> None:
    lengths = []
    for shares_prefix in (True, False):
        scheduler = Scheduler(
            GroupScheduler(KvPool(64), SchedulerLimits(max_running=4, batch_max_tokens=64, chunk_size=64))
        )
        for req_id in (0, 1):
            scheduler.add(pooled_req(req_id, 20, shares_prefix))
            step = scheduler.next_step()
            assert step is not None
            scheduler.complete_step()
            scheduler.process_embedding(req_id)
            lengths.append(len(step.rows[0].slots))

    assert lengths == [20, 1, 20, 20]


def test_texts_that_are_pooled_wait_for_room() -> None:
    scheduler = Scheduler(
        GroupScheduler(KvPool(50), SchedulerLimits(max_running=8, batch_max_tokens=64, chunk_size=None))
    )
    for req_id in range(4):
        scheduler.add(pooled_req(req_id, 20, shares_prefix=False))

    step = scheduler.next_step()

    assert step is not None
    assert [row.req_id for row in step.rows] == [0, 1]
    assert scheduler.num_waiting == 2


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("num_known", [0, 2])
def test_a_request_that_comes_back_gets_no_token_of_steps_in_flight(num_known: int, is_held: bool) -> None:
    """It was moved to another engine or was a job for one, and has the same id."""
    scheduler = make()
    server = Server(scheduler, depth=3)
    scheduler.add(endless(1))
    server.step()
    assert scheduler.abort(1) is not None
    text = truth([4, 5, 6], 3, 20)
    back = make_req(1, [4, 5, 6], 20, seed=3)
    if num_known:
        back.continue_from(text[:num_known], 0.0)

    if is_held:
        scheduler.defer(back)
        scheduler.make_ready(back)
    else:
        scheduler.add(back)
    while server.step():
        pass

    assert len(text) > 3
    assert back.output_ids == text


def test_a_forced_token_of_before_is_not_that_of_a_request_that_comes_back() -> None:
    scheduler = make()
    scheduler.add(endless(1))
    scheduler.next_step()
    scheduler.abort(1)
    back = make_req(1, [4, 5, 6])
    back.continue_from([3], 0.0)
    scheduler.add(back)

    process_tokens(scheduler, [TokenOut(1, Token(5)), TokenOut(1, Token(6))])

    assert back.output_ids == [3]
