"""Trainers free KV memory and replace weights only when nobody writes into the KV pool any more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightserve.ipc.worker_calls import SET_MEMORY, UPDATE_WEIGHTS, WAIT_FOR_LOAD, WorkerCall
from lightserve.messages.cluster import KvTransferParams, RemotePrefillRequest
from lightserve.messages.control import CpuKvSize
from lightserve.messages.rl import LoadWeightsFrom, RlQuery, RlReply, Sleep, WakeUp
from lightserve.messages.weights import WorkerWeightsReply
from lightserve.messages.worker_calls import KvLoaded, KvReceived, MemoryChanged
from lightserve.router.kv.remote_prefill import RemoteKvSource
from lightserve.router.kv.tiers.tiers import KvTiers
from test.router.test_manager import FakeModel, Router, check, request
from test.waiting import until

PROMPT_LEN = 97  # a block, and more


class Workers(FakeModel):
    """A load ends when the test ends it."""

    def __init__(self, keeps_graphs: bool = False) -> None:
        super().__init__()
        self._changed = MemoryChanged(keeps_graphs=keeps_graphs)
        self.calls: list[str] = []
        self.loads: dict[int, asyncio.Future[Any]] = {}

    def serves(self, call: WorkerCall[Any, Any]) -> bool:
        return True

    def call(self, call: WorkerCall[Any, Any], request: Any, timeout_s: float | None = None) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if call is WAIT_FOR_LOAD:
            self.loads[request] = reply
            return reply
        self.calls.append(type(request).__name__)
        reply.set_result({SET_MEMORY: self._changed, UPDATE_WEIGHTS: WorkerWeightsReply()}[call])
        return reply


class Receiver:
    """Of KV of other engines. A transfer ends when the test ends it."""

    addresses = ("there",)

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def cancel(self, transfer_id: int) -> None:
        self.cancelled.append(transfer_id)


def prompt(req_id: int, token: int) -> Any:
    return msgspec.structs.replace(request(req_id, max_new_tokens=1), prompt_ids=[token] * PROMPT_LEN)


async def start_load(router: Router) -> Workers:
    """A request waits for a load of its prompt, whose KV has left the pool for host memory."""
    workers = Workers()
    router.scheduler.only_group.add_source(
        KvTiers(router.scheduler.only_group.pool, CpuKvSize(num_blocks=10, block_bytes=6400))
    )
    router.manager.use_workers(workers)
    for req_id, token in enumerate((50, 60, 70)):  # the pool holds two
        router.send(prompt(req_id, token))
        await router.until(lambda: router.has_finished(req_id))  # noqa: B023  awaited at once
    router.send(prompt(9, 50))
    await until(lambda: bool(workers.loads))
    return workers


async def ask(router: Router, query: RlQuery) -> RlReply:
    router.manager.rl.put(query)

    def replies() -> list[RlReply]:
        return [message for message in router.sent if isinstance(message, RlReply)]

    await router.until(lambda: any(reply.query_id == query.query_id for reply in replies()))
    return next(reply for reply in replies() if reply.query_id == query.query_id)


def test_kv_memory_is_freed_after_the_loads_that_write_into_it_and_what_they_brought_is_not_found(
    tmp_path: Path,
) -> None:
    async def scenario(router: Router) -> None:
        workers = await start_load(router)
        router.manager.rl.put(Sleep(1, mode="keep", tags=["kv_cache"]))
        await until(lambda: router.manager.rl.state.is_paused)
        assert workers.calls == []

        [load] = workers.loads.values()
        load.set_result(KvLoaded(0.01))
        await until(lambda: workers.calls == ["ReleasedMemory"])
        assert router.scheduler.only_group.pool.cached_tokens == 0
        assert (await ask(router, WakeUp(2))).status == 200

        await router.until(lambda: router.has_finished(9))
        [admission] = [out.admission for out in router.outs if out.req_id == 9 and out.admission]
        assert admission.cached_tokens == 0

    check(scenario, tmp_path)


def test_kv_of_the_weights_before_that_arrives_during_an_update_is_not_that_of_the_new_ones(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()

    async def scenario(router: Router) -> None:
        workers = await start_load(router)
        router.manager.weights.enable(router.manager.rl, str(tmp_path), 0)
        router.manager.rl.put(LoadWeightsFrom(1, "weights"))
        await until(lambda: workers.calls == ["CheckFolder"])

        [load] = workers.loads.values()
        load.set_result(KvLoaded(0.01))

        await router.until(lambda: router.has_finished(9))
        [admission] = [out.admission for out in router.outs if out.req_id == 9 and out.admission]
        assert admission.cached_tokens == 0

    check(scenario, tmp_path)


@pytest.mark.parametrize("is_lost", [False, True])
def test_transfers_of_other_engines_are_ended_before_kv_memory_is_freed(tmp_path: Path, is_lost: bool) -> None:
    async def scenario(router: Router) -> None:
        sent: list[Any] = []
        receiver, workers = Receiver(), Workers()
        source = RemoteKvSource(router.scheduler.only_group.pool, sent.append)
        router.scheduler.only_group.add_source(source)
        router.manager.use_workers(workers)
        source.use_receiver(receiver)  # type: ignore[arg-type]
        group = router.scheduler.only_group
        router.manager._accept(prompt(1, 50))
        group.queue.find(1).kv_transfer_params = KvTransferParams(7, 60.0, min_tokens=32)  # type: ignore[union-attr]
        await until(lambda: [type(message) for message in sent] == [RemotePrefillRequest])

        router.manager.rl.put(Sleep(1, mode="keep", tags=["kv_cache"]))
        await until(lambda: receiver.cancelled == [7])
        assert workers.calls == []

        if is_lost:
            router.manager.use_workers(workers := Workers())
        else:
            source._on_received(router.manager.steps.wake, KvReceived(7, 1))
        await until(lambda: workers.calls == ["ReleasedMemory"])
        assert (await ask(router, WakeUp(2))).status == 200

        await router.until(lambda: router.has_finished(1))

    check(scenario, tmp_path)


@pytest.mark.parametrize(("keeps_graphs", "method"), [(False, "kv_freed"), (True, "kv_unmapped")])
def test_workers_that_come_while_kv_memory_is_released_release_theirs(
    tmp_path: Path, keeps_graphs: bool, method: str
) -> None:
    async def scenario(router: Router) -> None:
        router.manager.use_workers(Workers(keeps_graphs))
        router.send(prompt(1, 50))
        await router.until(lambda: router.has_finished(1))
        assert (await ask(router, Sleep(1, tags=["kv_cache"]))).method == method

        router.manager.use_workers(workers := Workers(keeps_graphs))
        router.manager.rl.on_new_workers()

        await until(lambda: workers.calls == ["ReleasedMemory"])
        assert (await ask(router, WakeUp(2))).method == method
        assert workers.calls == ["ReleasedMemory"] * 2

    check(scenario, tmp_path)


@pytest.mark.parametrize(
    ("of_ranks", "joined"),
    [
        ([MemoryChanged(keeps_graphs=True)] * 2, MemoryChanged(keeps_graphs=True)),
        ([MemoryChanged(keeps_graphs=True), MemoryChanged()], MemoryChanged()),
        ([MemoryChanged(keeps_graphs=True), MemoryChanged("no memory")], MemoryChanged("no memory")),
    ],
)
def test_ranks_change_their_kv_memory_as_the_worst_of_them(
    of_ranks: list[MemoryChanged], joined: MemoryChanged
) -> None:
    assert SET_MEMORY.joined(of_ranks) == joined
