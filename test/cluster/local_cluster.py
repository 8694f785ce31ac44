"""A dispatcher with real routers in one process. Messages pass through their wire format, workers are fakes."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from lightserve.cluster.disaggregation import SAME_SERVER, KvExchange
from lightserve.cluster.dispatcher import Dispatcher
from lightserve.cluster.placement import Placement
from lightserve.cluster.routing import make_policy
from lightserve.config import RouterConfig
from lightserve.ipc.channel import make_decoder
from lightserve.ipc.codec import encode
from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.cluster import FromEngine, ToEngine
from lightserve.messages.control import EngineInfo
from lightserve.messages.output import BatchTokenIdOut, RouterStats, ToDetokenization
from lightserve.messages.params import GenerationParams
from lightserve.messages.request import GenerateReq, ToRouter
from lightserve.messages.step import NewReq, ReqFailed, Step, StepResult, Token, TokenOut
from lightserve.messages.worker_calls import KvReceived
from lightserve.router.kv.pool import KvPool
from lightserve.router.kv.remote_prefill import RemoteKvSource
from lightserve.router.manager import RouterManager
from lightserve.router.observability.stats import ThroughputLog
from lightserve.router.scheduler import GroupScheduler, Scheduler, SchedulerLimits
from test.router.test_manager import FakeModel
from test.waiting import DEADLINE_S

POOL = 4096
MIN_REMOTE_PREFILL_TOKENS = 100


class Channel:
    """Messages in order, encoded and decoded as on a socket."""

    def __init__(self, message_type: Any) -> None:
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._decode = make_decoder(message_type)

    def send(self, message: Any) -> None:
        self._queue.put_nowait(encode(message))

    async def recv(self) -> Any:
        return self._decode(await self._queue.get())


class Link:
    def __init__(self, to_engine: Channel, from_engine: Channel) -> None:
        self.send = to_engine.send
        self.recv = from_engine.recv
        self.instance = f"router {id(to_engine)}"
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class FakeKvReceiver:
    """The workers of a decode engine: transfers end when all their blocks have come, or they are cancelled or late."""

    def __init__(self, network: dict[str, FakeKvReceiver]) -> None:
        self.addresses = [f"receiver {len(network)}"]
        self.on_received: Callable[[KvReceived], None] = lambda _: None
        self._expected: dict[int, int] = {}  # blocks by transfer
        self._arrived: dict[int, set[int]] = defaultdict(set)
        self._cancelled: set[int] = set()  # before they were expected
        network[self.addresses[0]] = self

    def start(self) -> None: ...

    def expect(self, transfer_id: int, blocks: int, timeout_s: float) -> None:
        self._expected[transfer_id] = blocks
        asyncio.get_running_loop().call_later(timeout_s, self._end, transfer_id)
        self.arrive(transfer_id, range(0))
        if transfer_id in self._cancelled:
            self._end(transfer_id)

    def arrive(self, transfer_id: int, blocks: range) -> None:
        self._arrived[transfer_id].update(blocks)
        if len(self._arrived[transfer_id]) == self._expected.get(transfer_id):
            self._end(transfer_id)

    def cancel(self, transfer_id: int) -> None:
        self._cancelled.add(transfer_id)
        self._end(transfer_id)

    def _end(self, transfer_id: int) -> None:
        blocks = self._expected.pop(transfer_id, None)
        if blocks is not None:
            come = next(i for i in range(blocks + 1) if i not in self._arrived[transfer_id])
            self.on_received(KvReceived(transfer_id, come))


class SeededModel(FakeModel):
    """The n-th token of a request depends on its seed and on n, as if it was sampled."""

    def __init__(self, crashes_at: int | None = None, network: dict[str, FakeKvReceiver] | None = None) -> None:
        super().__init__()
        self.network = {} if network is None else network
        self.receiver: FakeKvReceiver | None = None
        self.crashes_at = crashes_at  # a token id in a prompt that kills the workers
        self._seeds: dict[int, int] = {}
        self.entered: list[NewReq] = []

    async def _run(self, step: Step) -> StepResult:
        for new in step.new:
            self._seeds[new.req_id] = new.seed
            self.entered.append(new)
            if self.crashes_at is not None and new.token_ids[0] == self.crashes_at:
                self.die()
        result = await super()._run(step)
        for recv in step.recvs:
            if self.receiver is not None:
                self.receiver.expect(recv.transfer_id, len(recv.slots) // BLOCK_TOKENS, recv.timeout_s)
        for send in step.sends:
            blocks = range(send.first, send.first + len(send.slots) // BLOCK_TOKENS)
            self.network[send.addresses[0]].arrive(send.transfer_id, blocks)
        return result

    @property
    def kv_receiver(self) -> Any:  # type: ignore[override]
        return self.receiver

    def _token(self, req_id: int) -> TokenOut:
        self._made[req_id] += 1
        return TokenOut(req_id, Token(token_of(self._seeds[req_id], self._made[req_id])))


def token_of(seed: int, position: int) -> int:
    return 1000 + (seed * 31 + position * 7) % 997


class LocalEngine:
    def __init__(self, config: RouterConfig, model: SeededModel, pool: int, role: str = "normal") -> None:
        self.model = model
        self.pool = KvPool(pool)
        limits = SchedulerLimits(max_running=8, batch_max_tokens=256, chunk_size=128)
        self.to_engine, self.from_engine = Channel(ToEngine), Channel(FromEngine)
        self.scheduler = Scheduler(GroupScheduler(self.pool, limits))
        ready = EngineInfo(pool, pool, 32_000, 1)
        inbox: Any = self.to_engine
        outbox: Any = self.from_engine
        self.role = role
        if role == "decode":
            self.scheduler.only_group.add_source(RemoteKvSource(self.pool, self.from_engine.send))
        self.manager = RouterManager(self.scheduler, model, ready, inbox, outbox, config)
        self.cached_blocks = self.manager.report_cached_blocks(self.from_engine.send)
        self.task = asyncio.create_task(self.manager.run(ThroughputLog(self.manager.metrics, 0.0)))


class LocalCluster:
    def __init__(
        self, policy: str, config: RouterConfig, num_engines: int, pool: int, roles: Sequence[str] = ()
    ) -> None:
        self.roles = roles or ("normal",) * num_engines
        self.network: dict[str, FakeKvReceiver] = {}
        self.kv_exchanges: dict[int, KvExchange] = {}  # of engines that differ from the others
        self.inbox, self._from_dispatcher = Channel(ToRouter), Channel(ToDetokenization)
        self.placement = Placement(make_policy(policy), MIN_REMOTE_PREFILL_TOKENS)
        inbox: Any = self.inbox
        outbox: Any = self._from_dispatcher
        self.dispatcher = Dispatcher(self.placement, inbox, outbox, config, num_engines)
        self.engines: dict[int, LocalEngine] = {}
        self.crashes_at: int | None = None
        self.announced: Counter[int] = Counter()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ended: Counter[int] = Counter()
        self.failed: dict[int, ReqFailed] = {}
        self.aborted: list[int] = []
        self.stats: RouterStats | None = None
        self.cached_tokens: dict[int, int] = {}
        self.replies: list[Any] = []
        self._config = config
        self._pool = pool

    def start(self, number: int) -> LocalEngine:
        role = self.roles[number]
        engine = self.engines[number] = LocalEngine(self._config, self._model(number), self._pool, role)
        exchange = self.kv_exchanges.get(number, SAME_SERVER)
        self.dispatcher.join(number, Link(engine.to_engine, engine.from_engine), role, exchange)
        return engine

    def _model(self, number: int) -> SeededModel:
        model = SeededModel(self.crashes_at, self.network)
        if self.roles[number] == "decode":
            model.receiver = FakeKvReceiver(self.network)
        return model

    def kill_router(self, number: int) -> None:
        self.engines.pop(number).task.cancel()
        self.dispatcher.leave(number)

    def kill_workers(self, number: int) -> None:
        self.engines[number].model.die()
        self.engines[number].manager.steps.wake()

    def replace_workers(self, number: int) -> None:
        engine = self.engines[number]
        engine.model = self._model(number)
        engine.manager.use_workers(engine.model)

    def send(self, req_id: int, prompt: list[int], max_new_tokens: int = 8, **options: Any) -> None:
        params = GenerationParams.of(max_new_tokens=max_new_tokens, seed=options.pop("seed", None))
        options.setdefault("arrived_s", asyncio.get_running_loop().time())
        self.inbox.send(GenerateReq(req_id, prompt, params, **options))

    def has_ended(self, *req_ids: int) -> bool:
        return all(self.ended[req_id] for req_id in req_ids)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._record(await self._from_dispatcher.recv())

    def _record(self, message: Any) -> None:
        if isinstance(message, RouterStats):
            self.stats = message
        elif not isinstance(message, BatchTokenIdOut):
            self.replies.append(message)
        else:
            self.announced.update(one.req_id for one in message.new)
            self.aborted += message.aborted
            for failure in message.failed:
                self.failed[failure.req_id] = failure
                self.ended[failure.req_id] += 1
            for out in message.tokens:
                assert self.announced[out.req_id] == 1
                self.tokens[out.req_id].append(out.token.id)
                self.ended[out.req_id] += out.finish_reason is not None
                if out.admission is not None:
                    self.cached_tokens[out.req_id] = out.admission.cached_tokens


@asynccontextmanager
async def local_cluster(
    num_engines: int = 2,
    policy: str = "prefix",
    config: RouterConfig | None = None,
    pool: int = POOL,
    roles: Sequence[str] = (),
) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(policy, config or RouterConfig(), num_engines, pool, roles)
    running = asyncio.create_task(cluster.dispatcher.run())
    await asyncio.sleep(0)
    for number in range(num_engines):
        cluster.start(number)
    try:
        yield cluster
    finally:
        tasks = [running, *(engine.task for engine in cluster.engines.values())]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        assert isinstance(result, asyncio.CancelledError), result
