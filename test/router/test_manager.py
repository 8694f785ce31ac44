"""The router's loop over real channels, with a model whose steps end when the test lets them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightserve.config import RouterConfig
from lightserve.errors import WorkerDiedError
from lightserve.ipc.channel import Receiver, Sender
from lightserve.ipc.worker_calls import COMPILE_GRAMMAR, WorkerCall
from lightserve.messages.block_hash import block_keys
from lightserve.messages.control import CpuKvSize, EngineInfo, HttpProcessLost
from lightserve.messages.int_arrays import int32s
from lightserve.messages.media import ImageItem
from lightserve.messages.output import BatchTokenIdOut, RouterStats, ToDetokenization, TokenIdOut
from lightserve.messages.params import FinishReason, GenerationParams, GrammarSpec, SchedulingParams
from lightserve.messages.request import (
    REQ_ID_BITS,
    AbortByRequestId,
    AbortReq,
    ContinueReq,
    GenerateReq,
    ReleaseParents,
    ToRouter,
)
from lightserve.messages.step import ForkPrefix, ReqFailed, Step, StepResult, Token, TokenColumns, TokenOut
from lightserve.router.chunk_boundaries import ChunkBoundaries
from lightserve.router.images.image_waits import ImageWaits
from lightserve.router.images.sight import PromptSight
from lightserve.router.kv.pool import KvPool
from lightserve.router.kv.source import KvWorkers
from lightserve.router.kv.tiers.tiers import KvTiers
from lightserve.router.manager import RouterManager
from lightserve.router.observability.stats import ThroughputLog
from lightserve.router.scheduler import GroupScheduler, Scheduler, SchedulerLimits
from lightserve.router.step_pacer import StepKind, StepPacer
from test.waiting import DEADLINE_S, until

EOS = 2
MAX_RUNNING = 8


class FakeModel:
    """Token n of a request is 100 + n; a step ends when the test lets it."""

    def __init__(self, end_after: int | None = None) -> None:
        self.steps: list[Step] = []
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.failing: set[int] = set()  # requests whose grammar allows no token
        self.failing_status = 400
        self.completes_after: int | None = None
        self.stuck_at: int | None = None  # the step that does not end
        self.is_lost = False
        self.restart_requests: list[tuple[str, bool]] = []
        self.forces = 0  # tokens that come with every one that is sampled
        self.compiled: list[asyncio.Future[None]] = []  # of grammars, when the test resolves them
        self._end_after = end_after
        self._missing: dict[int, int] = {}
        self._made: dict[int, int] = {}
        self._tasks: list[asyncio.Task[StepResult]] = []

    def run(self, step: Step) -> asyncio.Future[StepResult]:
        self.steps.append(step)
        if len(self.steps) == self.stuck_at:
            self.may_run.clear()
        task = asyncio.create_task(self._run(step))
        task.add_done_callback(lambda one: one.cancelled() or one.exception())  # not every task is awaited
        self._tasks.append(task)
        return task

    def serves(self, call: WorkerCall[Any, Any]) -> bool:
        return call is COMPILE_GRAMMAR

    def call(self, call: WorkerCall[Any, Any], request: Any, timeout_s: float | None = None) -> asyncio.Future[Any]:
        assert self.serves(call)
        self.compiled.append(asyncio.get_running_loop().create_future())
        return self.compiled[-1]

    storage_tiers = None
    kv_receiver = None

    def kv_workers(self, group: int) -> KvWorkers:
        return self

    def close(self) -> None: ...

    def die(self) -> None:
        self.is_lost = True
        self.may_run.set()

    def request_restart(self, reason: str, caused_by_request: bool) -> None:
        self.die()
        self.restart_requests.append((reason, caused_by_request))

    async def _run(self, step: Step) -> StepResult:
        await self.may_run.wait()
        if self.is_lost:
            raise WorkerDiedError("gone")
        for new in step.new:
            self._missing[new.req_id] = new.num_uncomputed
            self._made[new.req_id] = new.output_len
        outs: list[TokenOut] = []
        failed = []
        for row in step.rows:
            self._missing[row.req_id] -= len(row.slots)
            if self._missing[row.req_id] == 0:
                self._missing[row.req_id] = 1 + self.forces
                if row.req_id in self.failing:
                    failed.append(ReqFailed(row.req_id, self.failing_status, "nothing is left"))
                else:
                    outs += [self._token(row.req_id) for _ in range(1 + self.forces)]
        return with_columns(outs, failed)

    def _token(self, req_id: int) -> TokenOut:
        self._made[req_id] += 1
        made = self._made[req_id]
        token_id = EOS if made == self._end_after else 100 + made
        return TokenOut(req_id, Token(token_id), completes_grammar=made == self.completes_after)


def with_columns(outs: list[TokenOut], failed: list[ReqFailed]) -> StepResult:
    """The result of a step, with plain tokens as columns, as a worker has them."""
    detailed = {out.req_id for out in outs if out != TokenOut(out.req_id, Token(out.token.id))}
    plain: dict[int, list[int]] = {}
    for out in outs:
        if out.req_id not in detailed:
            plain.setdefault(out.req_id, []).append(out.token.id)
    return StepResult(
        [out for out in outs if out.req_id in detailed], failed, plain=TokenColumns.of(list(plain.items()))
    )


class Router:
    """A running router and the two ends a test needs."""

    def __init__(self, manager: RouterManager, scheduler: Scheduler, model: FakeModel) -> None:
        self.manager = manager
        self.scheduler = scheduler
        self.model = model
        self.sent: list[ToDetokenization] = []

    def send(self, message: ToRouter) -> None:
        self._to_router.send(message)

    @property
    def batches(self) -> list[BatchTokenIdOut]:
        return [message for message in self.sent if isinstance(message, BatchTokenIdOut)]

    @property
    def outs(self) -> list[TokenIdOut]:
        return [out for batch in self.batches for out in batch.tokens]

    def tokens_of(self, req_id: int) -> list[int]:
        return [out.token.id for out in self.outs if out.req_id == req_id]

    def has_finished(self, *req_ids: int) -> bool:
        finished = {out.req_id for out in self.outs if out.finish_reason is not None}
        return finished >= set(req_ids)

    @property
    def num_open(self) -> int:
        scheduler = self.scheduler
        return scheduler.num_running + scheduler.num_waiting + scheduler.num_blocked

    def replace_model(self) -> None:
        self.model = FakeModel()
        self.manager.use_workers(self.model)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.sent.append(await self._from_router.recv())

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        run_dir: Path,
        depth: int = 1,
        end_after: int | None = None,
        step_timeout_s: float = 0.0,
        **queue_limits: Any,
    ) -> AsyncIterator[Router]:
        inbox: Receiver[ToRouter] = Receiver(f"ipc://{run_dir}/router", ToRouter)
        from_router: Receiver[ToDetokenization] = Receiver(f"ipc://{run_dir}/detok", ToDetokenization)
        outbox: Sender[ToDetokenization] = Sender(f"ipc://{run_dir}/detok")
        engine = EngineInfo(200, 100, 1000, depth, (EOS,), step_timeout_s=step_timeout_s)
        config = RouterConfig(**{"max_queue_size": 100, "max_queue_tokens": 10_000, **queue_limits})
        limits = SchedulerLimits(max_running=MAX_RUNNING, batch_max_tokens=64, chunk_size=64)
        scheduler, model = Scheduler(GroupScheduler(KvPool(200), limits)), FakeModel(end_after)
        manager = RouterManager(scheduler, model, engine, inbox, outbox, config)
        router = cls(manager, scheduler, model)
        router._to_router = Sender(f"ipc://{run_dir}/router")
        router._from_router = from_router
        task = asyncio.create_task(manager.run(ThroughputLog(manager.metrics, 10.0)))
        try:
            yield router
        finally:
            task.cancel()
            await asyncio.wait([task])
            for channel in (inbox, from_router, outbox, router._to_router):
                channel.close()

    _to_router: Sender[ToRouter]
    _from_router: Receiver[ToDetokenization]


def request(req_id: int, prompt_len: int = 3, max_new_tokens: int = 4) -> GenerateReq:
    sampling = GenerationParams.of(max_new_tokens=max_new_tokens, stop=("x",))
    return GenerateReq(req_id, [5] * prompt_len, sampling, time.monotonic())


def check(scenario: Callable[[Router], Awaitable[None]], run_dir: Path, **options: float | None) -> None:
    async def run() -> None:
        async with Router.running(run_dir, **options) as router:  # type: ignore[arg-type]
            await scenario(router)

    asyncio.run(run())


def test_requests_get_their_tokens_in_order_at_any_depth(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        for req_id in range(20):
            router.send(request(req_id, prompt_len=1 + req_id, max_new_tokens=1 + req_id % 7))

        await router.until(lambda: router.has_finished(*range(20)))

        for req_id in range(20):
            assert router.tokens_of(req_id) == [101 + i for i in range(1 + req_id % 7)]
        await until(lambda: router.scheduler.only_group.pool.used == 0)

    for depth in (1, 2):
        run_dir = tmp_path / str(depth)
        run_dir.mkdir()
        check(scenario, run_dir, depth=depth)


def test_a_request_with_a_span_that_no_step_can_compute_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptSight, "boundaries", lambda _, length, images: ChunkBoundaries(spans=[(0, length - 5)]))

    async def scenario(router: Router) -> None:
        for req_id, length in ((1, 70), (2, 69)):
            router.send(request(req_id, prompt_len=length))

        await router.until(lambda: router.has_finished(2))

        (failure,) = [failure for batch in router.batches for failure in batch.failed]
        assert (failure.req_id, failure.status) == (1, 400)
        assert "65 tokens of the prompt have to be computed in one step; the limit is 64" in failure.message

    check(scenario, tmp_path)


def test_a_request_of_another_server_goes_on_after_its_tokens(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.send(ContinueReq(request(1, prompt_len=3, max_new_tokens=6), [101, 102]))

        await router.until(lambda: router.has_finished(1))

        assert router.tokens_of(1) == [103, 104, 105, 106]
        [announced] = [new for batch in router.batches for new in batch.new]
        assert announced.output_ids == [101, 102]
        await until(lambda: router.scheduler.only_group.pool.used == 0)

    check(scenario, tmp_path)


@pytest.mark.parametrize(("output_ids", "reason"), [([101, 102, 103, 104], "length"), ([101, EOS], "stop")])
def test_a_request_whose_tokens_end_it_already_gets_no_seat(tmp_path: Path, output_ids: list[int], reason: str) -> None:
    """The server that it comes from may have had a longer context, or other end tokens."""

    async def scenario(router: Router) -> None:
        router.send(ContinueReq(request(1, max_new_tokens=4), output_ids))
        router.send(request(2))
        await router.until(lambda: router.has_finished(2))

        [failure] = [failure for batch in router.batches for failure in batch.failed]
        assert (failure.req_id, failure.status) == (1, 503)
        assert failure.message.endswith(f"its {len(output_ids)} tokens already end it ({reason})")
        await until(lambda: router.scheduler.num_running + router.scheduler.num_waiting == 0)
        assert router.scheduler.only_group.pool.used == 0

    check(scenario, tmp_path)


def test_the_tokens_of_a_step_are_sent_in_one_message(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.may_run.clear()
        for req_id in range(6):
            router.send(request(req_id))
        await until(lambda: router.scheduler.num_waiting + router.scheduler.num_running == 6)
        router.model.may_run.set()

        await router.until(lambda: router.has_finished(*range(6)))

        assert max(len(batch.tokens) for batch in router.batches) == 6

    check(scenario, tmp_path)


def test_the_next_step_is_sent_before_the_tokens_of_this_one_are_back(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.may_run.clear()
        router.send(request(1))

        await until(lambda: len(router.model.steps) == 2)

        assert [len(step.rows[0].slots) for step in router.model.steps] == [3, 1]
        assert not router.outs

    check(scenario, tmp_path, depth=2)


class HeldPacer(StepPacer):
    """Every step takes a minute, until the test changes ``wait_s``."""

    wait_s = 60.0

    def send_at(self, kind: StepKind, sent_s: float) -> float:
        return time.monotonic() + self.wait_s


def test_a_request_that_arrives_before_the_next_step_is_due_joins_it(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        pacer = router.manager.steps.pacer = HeldPacer(lead_s=0.0)
        router.model.may_run.clear()
        router.send(request(0))
        await until(lambda: len(router.model.steps) == 1)
        router.send(request(1))
        await until(lambda: router.scheduler.num_waiting == 1)
        assert len(router.model.steps) == 1

        router.send(request(2))
        await until(lambda: router.scheduler.num_waiting == 2)
        pacer.wait_s = -1.0
        router.manager.steps.wake()
        await until(lambda: len(router.model.steps) == 2)
        assert [row.req_id for row in router.model.steps[1].rows] == [0, 1, 2]
        router.model.may_run.set()
        await router.until(lambda: router.has_finished(0, 1, 2))

    check(scenario, tmp_path, depth=2)


def test_the_next_step_is_sent_at_once_if_requests_wait_for_the_one_after(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        pacer = router.manager.steps.pacer = HeldPacer(lead_s=0.0)
        pacer.wait_s = -1.0
        router.model.may_run.clear()
        router.send(request(0))
        await until(lambda: len(router.model.steps) == 2)
        for req_id in (1, 2, 3):
            router.send(request(req_id, prompt_len=60))
        await until(lambda: router.scheduler.num_waiting == 3)
        pacer.wait_s = 60.0
        router.model.stuck_at = 3  # the first that has some of them, and not all
        router.model.may_run.set()
        await until(lambda: len(router.model.steps) == 4)

    check(scenario, tmp_path, depth=2)


def test_the_next_step_is_sent_when_it_is_due_without_another_event(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        pacer = router.manager.steps.pacer = HeldPacer(lead_s=0.0)
        pacer.wait_s = 0.05
        router.model.may_run.clear()
        router.send(request(0))
        await until(lambda: len(router.model.steps) == 1)
        assert len(router.model.steps) == 1
        pacer.wait_s = -1.0
        await until(lambda: len(router.model.steps) == 2)

    check(scenario, tmp_path, depth=2)


def test_a_request_that_arrives_while_no_further_step_is_planned_starts_at_once(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.may_run.clear()
        router.send(request(0, max_new_tokens=1))
        await until(lambda: len(router.model.steps) == 1)
        router.send(request(1))
        await until(lambda: len(router.model.steps) == 2)
        assert [row.req_id for row in router.model.steps[1].rows] == [1]

    check(scenario, tmp_path, depth=2)


def test_a_token_computed_after_the_end_is_dropped(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.send(request(1, max_new_tokens=50))

        await router.until(lambda: router.has_finished(1))

        assert router.tokens_of(1) == [101, 102, EOS]
        assert router.outs[-1].finish_reason is FinishReason.STOP
        await until(lambda: router.scheduler.only_group.pool.used == 0)

    check(scenario, tmp_path, depth=2, end_after=3)


def test_the_first_token_carries_the_admission(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.send(request(1))

        await router.until(lambda: router.has_finished(1))

        admissions = [out.admission for out in router.outs]
        assert admissions[0] is not None
        assert admissions[0].queue_s >= 0
        assert admissions[1:] == [None] * 3
        assert [req.text.stop for batch in router.batches for req in batch.new] == [("x",)]

    check(scenario, tmp_path)


def test_the_prompts_of_waiting_requests_have_a_limit_and_a_freed_place_is_used(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.may_run.clear()
        router.send(request(0, prompt_len=60))
        await until(lambda: router.scheduler.num_running == 1)
        for req_id, prompt_len in ((1, 90), (2, 10), (3, 1)):
            router.send(request(req_id, prompt_len=prompt_len))
        await router.until(lambda: len(refused(router)) == 1)
        assert router.scheduler.only_group.queue.num_tokens == 91

        router.send(AbortReq(1))
        await until(lambda: router.scheduler.only_group.queue.num_tokens == 1)
        router.send(request(4, prompt_len=60))
        router.model.may_run.set()
        await router.until(lambda: router.has_finished(4) and router.has_finished(3))

        assert [(failure.req_id, failure.status) for failure in refused(router)] == [(2, 429)]
        assert "have 90 tokens, and this one has 10; the limit is 95 (--max_queue_tokens)" in refused(router)[0].message
        assert router.scheduler.only_group.queue.num_tokens == 0
        router.send(request(5, prompt_len=96))  # one may always wait
        await router.until(lambda: router.has_finished(5))

    check(scenario, tmp_path, max_queue_tokens=95)


def with_images(req_id: int, count: int, file: bytes = b"file") -> GenerateReq:
    spans = [((6 * number, 6),) for number in range(count)]
    items = [ImageItem(bytes([req_id, *span[0]]), span, 2, 3, 56, 84, 5, file) for span in spans]
    return msgspec.structs.replace(request(req_id, prompt_len=26), images=items)


def test_images_that_wait_for_the_encoder_have_a_limit(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        waits = ImageWaits(lambda encoder, generation: lambda message: None)  # an encoder that never answers
        waits.pool.set_rows(100)
        router.scheduler.only_group.enable_images(waits)
        for req_id, count in enumerate((1, 4, 1)):
            router.send(with_images(req_id, count))

        await router.until(lambda: len(refused(router)) == 1)

        assert (refused(router)[0].req_id, refused(router)[0].status) == (2, 429)
        assert "5 images wait, the limit is 3 (--max_queue_size)" in refused(router)[0].message

    check(scenario, tmp_path, max_queue_size=3)


def test_the_files_of_images_have_a_limit(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        waits = ImageWaits(lambda encoder, generation: lambda message: None)
        waits.pool.set_rows(100)
        router.scheduler.only_group.enable_images(waits)
        router.send(with_images(1, 1, bytes(3000)))  # one may always wait
        router.send(with_images(2, 1))

        await router.until(lambda: len(refused(router)) == 1)

        assert (refused(router)[0].req_id, refused(router)[0].status) == (2, 429)
        assert "have 3e-06 GB, the limit is 2e-06 (--max_queue_media_gb)" in refused(router)[0].message
        router.send(AbortReq(1))
        await until(lambda: waits.file_bytes == 0)
        router.send(with_images(3, 1))
        await until(lambda: waits.file_bytes == 4)

    check(scenario, tmp_path, max_queue_media_gb=2e-6)


def test_an_abort_frees_the_memory_of_the_request_and_is_forwarded(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.may_run.clear()
        router.send(request(1, max_new_tokens=50))
        router.send(request(2))
        await until(lambda: router.scheduler.num_running + router.scheduler.num_waiting == 2)
        router.send(AbortReq(1))
        await until(lambda: router.scheduler.num_running + router.scheduler.num_waiting == 1)
        router.model.may_run.set()

        await router.until(lambda: router.has_finished(2) and any(batch.aborted == [1] for batch in router.batches))

        assert router.tokens_of(1) == []
        await until(lambda: router.scheduler.only_group.pool.used == 0)

    check(scenario, tmp_path)


def test_of_a_burst_as_many_are_served_as_can_run_and_wait(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        for round_ in range(2):
            router.sent.clear()
            router.model.may_run.clear()
            for req_id in range(40):
                router.send(request(100 * round_ + req_id))
            await router.until(lambda: len(refused(router)) >= 40 - MAX_RUNNING - 4)
            router.model.may_run.set()

            await router.until(lambda: len(refused(router)) + num_finished(router) == 40)

            assert num_finished(router) == MAX_RUNNING + 4
            assert {failure.status for failure in refused(router)} == {429}

    check(scenario, tmp_path, max_queue_size=4)


def test_requests_that_wait_for_kv_memory_count_against_the_limit(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.may_run.clear()
        for req_id in range(3):
            router.send(msgspec.structs.replace(request(req_id), prompt_ids=[10 + req_id] * 80))
        await until(lambda: router.num_open == 3)  # before a step ends, or the first is served alone
        router.model.stuck_at = 4
        router.model.may_run.set()
        await until(lambda: len(router.model.steps) == 4)  # the KV pool has room for two of them
        assert (router.scheduler.num_running, router.scheduler.num_waiting) == (2, 1)
        for req_id in range(3, 20):
            router.send(request(req_id))

        await router.until(lambda: len(refused(router)) >= 17 - 3)
        router.model.may_run.set()

        await router.until(lambda: len(refused(router)) + num_finished(router) == 20)

        assert num_finished(router) == 3 + 3

    check(scenario, tmp_path, max_queue_size=4)


def num_finished(router: Router) -> int:
    return sum(out.finish_reason is not None for out in router.outs)


def refused(router: Router) -> list[ReqFailed]:
    return [failure for batch in router.batches for failure in batch.failed]


def test_heartbeats_are_sent_even_when_idle_and_carry_the_age_of_a_step(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        await router.until(lambda: any(isinstance(message, RouterStats) for message in router.sent))
        router.model.may_run.clear()
        router.send(request(1))

        await router.until(
            lambda: any(isinstance(message, RouterStats) and message.step_age_s > 0 for message in router.sent)
        )

    check(scenario, tmp_path)


def test_an_operators_abort_is_forwarded_to_the_http_processes(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.send(AbortByRequestId("abc"))

        await router.until(lambda: AbortByRequestId("abc") in router.sent)

    check(scenario, tmp_path)


def test_a_request_past_its_deadline_fails_and_frees_its_memory(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.may_run.clear()
        router.send(msgspec.structs.replace(request(1), scheduling=SchedulingParams(timeout_s=0.1)))
        router.send(request(2))

        await router.until(lambda: len(refused(router)) == 1)
        router.model.may_run.set()
        await router.until(lambda: router.has_finished(2))

        assert [(failure.req_id, failure.status) for failure in refused(router)] == [(1, 504)]
        assert router.manager.metrics.values["request_failed_total"] == 1
        await until(lambda: router.scheduler.only_group.pool.used == 0)

    check(scenario, tmp_path)


def test_evicted_tokens_are_counted(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        counts = []
        for req_id in range(3):
            router.send(msgspec.structs.replace(request(req_id), prompt_ids=[50 + req_id] * 96))
            await router.until(lambda: router.has_finished(req_id))  # noqa: B023  awaited at once
            counts.append(router.manager.metrics.values["prefix_cache_evicted_tokens_total"])

        assert counts == [0, 0, 3 * 99 - 200]  # 96 + 4 tokens each, the last one's KV is never computed

    check(scenario, tmp_path)


def test_a_request_that_opts_out_of_the_cache_shares_only_with_its_own_choices(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        prompt = request(1, prompt_len=60, max_new_tokens=2)
        alone = SchedulingParams(use_cache=False)

        async def run(group: int, scheduling: SchedulingParams, *req_ids: int) -> None:
            router.model.may_run.clear()
            for req_id in req_ids:
                router.send(msgspec.structs.replace(prompt, req_id=req_id, group=group, scheduling=scheduling))
            await until(lambda: router.num_open == len(req_ids))
            router.model.may_run.set()
            await router.until(lambda: router.has_finished(*req_ids))

        await run(1, SchedulingParams(), 1)
        await run(2, SchedulingParams(), 2)
        await run(3, alone, 3, 4)  # two choices of one request, at the same time
        await run(3, alone, 5)  # when they have ended
        await run(6, alone, 6)

        cached = {out.req_id: out.admission.cached_tokens for out in router.outs if out.admission}
        assert cached == {1: 0, 2: 59, 3: 0, 4: 59, 5: 0, 6: 0}
        assert router.scheduler.only_group.pool.cached_tokens == 61, "of the requests that use the cache"

    check(scenario, tmp_path)


def test_a_request_without_an_allowed_token_fails_and_the_others_continue(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.failing.add(1)
        router.send(request(1))
        router.send(request(2))

        await router.until(lambda: router.has_finished(2))

        failed = [failure for batch in router.batches for failure in batch.failed]
        assert failed == [ReqFailed(1, 400, "nothing is left")]
        assert router.tokens_of(1) == []
        assert router.tokens_of(2) == [101, 102, 103, 104]
        assert router.scheduler.num_running == 0

    check(scenario, tmp_path, depth=2)


def test_a_token_that_completes_a_grammar_ends_the_request_and_is_text(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.completes_after = 2
        router.send(request(1))

        await router.until(lambda: router.has_finished(1))

        assert router.tokens_of(1) == [101, 102]
        assert router.outs[-1].finish_reason is FinishReason.STOP
        assert [out.is_text_token for out in router.outs] == [False, True]

    check(scenario, tmp_path)


def test_forced_tokens_carry_the_state_of_the_request_after_each(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.forces = 3
        router.send(request(1, max_new_tokens=6))

        await router.until(lambda: router.has_finished(1))

        assert router.tokens_of(1) == [101, 102, 103, 104, 105, 106]
        assert [out.finish_reason for out in router.outs] == [None] * 5 + [FinishReason.LENGTH]
        assert [out.admission is not None for out in router.outs] == [True] + [False] * 5
        assert [len(batch.tokens) for batch in router.batches if batch.tokens] == [4, 2]
        assert router.manager.metrics.values["generation_tokens_total"] == 6
        assert router.manager.metrics.values["forced_tokens_total"] == 4

    for depth in (1, 2):
        run_dir = tmp_path / str(depth)
        run_dir.mkdir()
        check(scenario, run_dir, depth=depth)


def stats(router: Router) -> list[RouterStats]:
    return [message for message in router.sent if isinstance(message, RouterStats)]


async def begin(router: Router, count: int) -> None:
    """Run ``count`` requests for 40 tokens together until a step does not end."""
    router.model.may_run.clear()
    for req_id in range(count):
        router.send(request(req_id, max_new_tokens=40))
    await until(lambda: router.scheduler.num_running + router.scheduler.num_waiting == count)
    router.model.stuck_at = len(router.model.steps) + 10
    router.model.may_run.set()
    await until(lambda: len(router.model.steps) >= (router.model.stuck_at or 0))
    assert router.scheduler.num_running == count


def test_requests_continue_with_new_workers_where_they_stopped(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        await begin(router, 4)
        await router.until(lambda: len(router.tokens_of(0)) >= 5)

        first = router.model
        first.die()
        await router.until(lambda: bool(stats(router)) and not stats(router)[-1].has_workers)
        router.send(request(4, max_new_tokens=3))  # waits with the others
        await until(lambda: router.scheduler.num_waiting == 5)
        assert first.restart_requests == [("the connection was closed", False)]
        router.replace_model()

        await router.until(lambda: router.has_finished(*range(5)))
        assert all(router.tokens_of(req_id) == [101 + i for i in range(40)] for req_id in range(4))
        assert router.tokens_of(4) == [101, 102, 103]
        assert refused(router) == []
        assert router.manager.metrics.values["worker_restarts_total"] == 1
        await router.until(lambda: stats(router)[-1].has_workers)
        await until(lambda: router.scheduler.only_group.pool.used == 0)

    for depth in (1, 2):
        run_dir = tmp_path / str(depth)
        run_dir.mkdir()
        check(scenario, run_dir, depth=depth)


def test_workers_that_die_while_idle_are_noticed_at_once(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.die()

        await router.until(lambda: bool(stats(router)) and not stats(router)[-1].has_workers)

        assert router.model.restart_requests == [("the connection was closed", False)]
        router.replace_model()
        router.send(request(1))
        await router.until(lambda: router.has_finished(1))
        assert not router.scheduler.is_isolating_crash

    check(scenario, tmp_path)


def test_a_request_that_crashes_two_workers_fails_and_the_others_continue(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        await begin(router, 3)
        router.model.die()
        await until(lambda: bool(router.model.restart_requests))

        router.replace_model()
        router.model.may_run.clear()
        await until(lambda: len(router.model.steps) == 1)
        assert [row.req_id for row in router.model.steps[0].rows] == [0], "it is alone"
        router.model.die()
        await until(lambda: bool(router.model.restart_requests))
        assert router.model.restart_requests == [("the connection was closed", True)]
        router.replace_model()

        await router.until(lambda: router.has_finished(1, 2))
        assert [(failure.req_id, failure.status) for failure in refused(router)] == [(0, 500)]
        assert "died twice" in refused(router)[0].message
        assert router.tokens_of(1) == router.tokens_of(2) == [101 + i for i in range(40)]

    check(scenario, tmp_path, depth=2)


def test_a_step_that_does_not_end_gets_its_workers_replaced(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        hung = router.model
        hung.may_run.clear()
        router.send(request(1))

        await until(lambda: bool(hung.restart_requests))
        router.replace_model()

        assert hung.restart_requests[0][0].startswith("a step has been running for ")
        await router.until(lambda: router.has_finished(1))
        assert router.tokens_of(1) == [101, 102, 103, 104]

    check(scenario, tmp_path, step_timeout_s=0.1)


def test_requests_can_be_aborted_and_expire_while_there_is_no_worker(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        await begin(router, 3)
        router.model.die()
        await until(lambda: bool(router.model.restart_requests))

        router.send(AbortReq(0))
        await router.until(lambda: any(0 in batch.aborted for batch in router.batches))
        router.send(msgspec.structs.replace(request(5), scheduling=SchedulingParams(timeout_s=0.1)))
        await router.until(lambda: [failure.status for failure in refused(router)] == [504])
        router.replace_model()

        await router.until(lambda: router.has_finished(1, 2))
        await until(lambda: router.scheduler.only_group.pool.used == 0)

    check(scenario, tmp_path)


def test_a_request_with_a_numerical_error_fails_and_is_counted(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.failing.add(1)
        router.model.failing_status = 500
        router.send(request(1))
        router.send(request(2))

        await router.until(lambda: router.has_finished(2))

        assert refused(router) == [ReqFailed(1, 500, "nothing is left")]
        assert router.manager.metrics.values["request_numerical_error_total"] == 1
        assert router.scheduler.only_group.pool.cached_tokens == 6, "of the other one alone"

    check(scenario, tmp_path)


def test_tokens_that_were_not_processed_before_the_workers_were_replaced_are_dropped(tmp_path: Path) -> None:
    """The tokens are back, and the loop has not processed them yet."""

    async def scenario(router: Router) -> None:
        router.model.may_run.clear()
        router.send(request(1))
        await until(lambda: len(router.model.steps) == 2)
        (result, _) = router.model._tasks
        router.model.may_run.set()
        await asyncio.sleep(0)
        assert result.done()
        assert not router.outs

        router.replace_model()

        await router.until(lambda: router.has_finished(1))

        assert router.tokens_of(1) == [101, 102, 103, 104]

    check(scenario, tmp_path, depth=2)


def test_sequences_of_an_open_group_share_kv_without_the_cache_of_others(tmp_path: Path) -> None:
    """The steps of a beam search come one after the other, and must not compute their prompt again."""

    async def scenario(router: Router) -> None:
        scheduling = SchedulingParams(use_cache=False)
        beams = [
            msgspec.structs.replace(request(req_id, prompt_len=20), scheduling=scheduling, group=9, is_group_open=True)
            for req_id in (1, 2)
        ]
        router.send(beams[0])
        await router.until(lambda: router.has_finished(1))
        router.send(beams[1])
        await router.until(lambda: router.has_finished(2))
        router.send(request(3, prompt_len=20))
        await router.until(lambda: router.has_finished(3))

        cached = {out.req_id: out.admission.cached_tokens for out in router.outs if out.admission is not None}
        assert cached == {1: 0, 2: 19, 3: 0}

    check(scenario, tmp_path)


def test_beams_that_opt_out_of_the_cache_are_stored_in_no_tier(tmp_path: Path) -> None:
    """Another server has groups of the same numbers: it would find them in Redis."""

    async def scenario(router: Router) -> None:
        tiers = KvTiers(router.scheduler.only_group.pool, CpuKvSize(num_blocks=10, block_bytes=6400))
        router.scheduler.only_group.add_source(tiers)
        for req_id, use_cache in enumerate((False, True, True, True)):
            scheduling = SchedulingParams(use_cache=use_cache)
            beam = msgspec.structs.replace(request(req_id), prompt_ids=[50 + req_id] * 96, scheduling=scheduling)
            router.send(msgspec.structs.replace(beam, group=9, is_group_open=True))
            await router.until(lambda: router.has_finished(req_id))  # noqa: B023  awaited at once

        def is_stored(token: int, salt: str) -> bool:
            return block_keys(int32s([token] * 96), f" {salt}", [])[0] in tiers.offload_queue.host

        assert not is_stored(50, "group 9")
        assert is_stored(51, "salt ")

    check(scenario, tmp_path)


def test_a_request_continues_the_prompt_of_its_parent_until_that_is_released(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        first = msgspec.structs.replace(request(1, prompt_len=20), group=9, is_group_open=True)
        child = msgspec.structs.replace(request(2, prompt_len=1), group=9, is_group_open=True, parent=1)
        router.send(first)
        await router.until(lambda: router.has_finished(1))
        router.send(child)
        await router.until(lambda: router.has_finished(2))
        [entered] = [new for step in router.model.steps for new in step.new if new.req_id == 2]

        router.send(ReleaseParents([1, 2]))
        router.send(msgspec.structs.replace(child, req_id=3))
        await router.until(lambda: any(batch.failed for batch in router.batches))

        assert entered.parent == ForkPrefix(1, 20, 20)
        assert len(entered.token_ids) == 1
        [failure] = [failure for batch in router.batches for failure in batch.failed]
        assert (failure.req_id, failure.status) == (3, 500)
        assert failure.message == "the request continues 1, which is not known"
        await router.until(lambda: any(step.release for step in router.model.steps))
        assert [req_id for step in router.model.steps for req_id in step.release] == [1, 2]

    check(scenario, tmp_path)


SECOND = 1 << REQ_ID_BITS  # the first id of the second HTTP process


def test_the_requests_of_an_http_process_that_died_free_their_seats_and_kv(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.stuck_at = 4
        router.model.may_run.clear()
        router.send(request(1, max_new_tokens=16))
        for req_id in range(10):  # more than can run
            router.send(request(SECOND | req_id, max_new_tokens=16))
        await until(lambda: router.scheduler.num_running + router.scheduler.num_waiting == 11)
        router.model.may_run.set()
        await until(lambda: len(router.model.steps) == 4)
        assert (router.scheduler.num_running, router.scheduler.num_waiting) == (8, 3)

        router.manager.abort_http_process(HttpProcessLost(1, successor=3))
        router.model.may_run.set()
        await router.until(lambda: router.has_finished(1))

        assert router.tokens_of(1) == [101 + i for i in range(16)]
        aborted = [req_id for batch in router.batches for req_id in batch.aborted]
        assert sorted(aborted) == [SECOND | req_id for req_id in range(10)]
        await until(lambda: router.scheduler.only_group.pool.used == 0)
        assert router.manager.metrics.values["http_process_restarts_total"] == 1

    check(scenario, tmp_path)


def test_what_an_http_process_sent_before_it_died_is_not_computed(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.manager.abort_http_process(HttpProcessLost(1, successor=3))
        router.send(request(SECOND))
        router.send(ContinueReq(request(SECOND | 1), [101]))
        router.send(request(3 << REQ_ID_BITS))
        await router.until(lambda: router.has_finished(3 << REQ_ID_BITS))

        assert {new.req_id for batch in router.batches for new in batch.new} == {3 << REQ_ID_BITS}
        router.manager.abort_http_process(HttpProcessLost(3, successor=1))  # all numbers were used: the first again
        router.send(request(SECOND | 2))
        await router.until(lambda: router.has_finished(SECOND | 2))

    check(scenario, tmp_path)


def test_parents_of_an_http_process_that_died_are_released(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        for req_id in (1, SECOND | 1):
            router.send(msgspec.structs.replace(request(req_id), group=9, is_group_open=True))
        await router.until(lambda: router.has_finished(1, SECOND | 1))

        router.manager.abort_http_process(HttpProcessLost(1, successor=3))

        assert [*router.scheduler.only_group.fork_points] == [1]

    check(scenario, tmp_path)


def with_grammar(req_id: int) -> GenerateReq:
    free = request(req_id)
    return msgspec.structs.replace(free, params=free.params.replace(grammar=GrammarSpec("regex", "a+")))


def test_a_request_runs_once_the_workers_have_compiled_its_grammar(tmp_path: Path) -> None:
    """Others run meanwhile: no step waits for the compilation."""

    async def scenario(router: Router) -> None:
        router.send(with_grammar(1))
        router.send(request(2))
        await router.until(lambda: router.has_finished(2))
        held = router.scheduler.num_blocked, router.scheduler.num_waiting, router.tokens_of(1)

        router.model.compiled[0].set_result(None)
        await router.until(lambda: router.has_finished(1))

        assert held == (1, 0, [])
        assert router.scheduler.num_blocked == 0

    check(scenario, tmp_path)


def test_a_request_that_is_aborted_while_its_grammar_compiles_never_runs(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.send(with_grammar(1))
        await until(lambda: len(router.model.compiled) == 1)
        router.send(AbortReq(1))
        await router.until(lambda: any(1 in batch.aborted for batch in router.batches))

        router.model.compiled[0].set_result(None)
        router.send(request(2))
        await router.until(lambda: router.has_finished(2))

        assert router.tokens_of(1) == []
        assert (router.scheduler.num_blocked, router.scheduler.num_waiting) == (0, 0)

    check(scenario, tmp_path)


def test_requests_whose_grammars_compile_count_as_waiting(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        for req_id in range(3):
            router.send(with_grammar(req_id))

        await router.until(lambda: any(failed.status == 429 for batch in router.batches for failed in batch.failed))

        assert router.scheduler.num_blocked == 2
        assert len(router.model.compiled) == 2

    check(scenario, tmp_path, max_queue_size=2)


def test_a_held_request_expires_like_any_other(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.send(msgspec.structs.replace(with_grammar(1), scheduling=SchedulingParams(timeout_s=0.1)))

        await router.until(lambda: any(failed.status == 504 for batch in router.batches for failed in batch.failed))

        assert router.scheduler.num_blocked == 0

    check(scenario, tmp_path)
