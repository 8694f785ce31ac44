"""The memory of the KV cache, and that of the weights, is freed and taken again: captured steps stay valid."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lightserve.common.device.cpu import CpuDevice
from lightserve.common.device.cuda_pool import CudaMappedPool
from lightserve.common.device.profile import H200_GRAPHS
from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.messages.weights import CancelLoad, LeaveGroup, ReadTensor
from lightserve.messages.worker_calls import MemoryChanged, ReleasedMemory
from lightserve.model_files.source import resolve
from lightserve.offline.llm import LLM
from lightserve.worker.memory import WorkerMemory
from lightserve.worker.worker import ModelWorker
from test.common.test_mapped_memory import HostMapper
from test.fake_vendor.pool import HostPools
from test.worker.test_draft_graphs import RerunGraphs
from test.worker.test_step_runner import Driver


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[RerunGraphs]:
    """The graphs of a CPU, which has some here."""
    made: list[RerunGraphs] = []

    def make_graphs(self: CpuDevice, function: Callable[[Tensor, Any], Any]) -> RerunGraphs:
        made.append(RerunGraphs(function))
        return made[-1]

    profile = CpuDevice.profile
    ranges = replace(H200_GRAPHS, decodes=(1, 2, 16), tokens=(64,), requests=(4,), max_draft_tokens=0)
    monkeypatch.setattr(CpuDevice, "graphs", make_graphs)
    monkeypatch.setattr(CpuDevice, "profile", lambda self, device: replace(profile(self, device), graphs=ranges))
    return made


def test_captured_steps_are_captured_again_when_the_kv_cache_has_memory(
    small_folder: str, made: list[RerunGraphs]
) -> None:
    llm = LLM(small_folder, device="cpu", data_type="float32", max_total_token_num=256, max_req_total_len=128)
    [before] = llm.generate([[5, 6, 7]], max_new_tokens=6, temperature=0.0, ignore_eos=True)
    worker = llm.worker
    memory = WorkerMemory(worker.model.mem_manager, None, worker._runner, worker._platform, worker.model.device)
    buffers = worker.model.mem_manager.buffers
    captured = set(made[-1].captured)
    assert captured

    llm._scheduler.clear_cache()  # as the router does
    assert memory.handle(ReleasedMemory(kv=True)).error == ""
    assert [buffer.untyped_storage().nbytes() for buffer in buffers] == [0] * len(buffers)
    assert not made[-1].captured
    assert memory.handle(ReleasedMemory(kv=True)).error == ""  # again: nothing to do
    assert memory.handle(ReleasedMemory()).error == ""

    assert set(made[-1].captured) == captured
    replays = made[-1].replays.total()
    [after] = llm.generate([[5, 6, 7]], max_new_tokens=6, temperature=0.0, ignore_eos=True)
    assert made[-1].replays.total() > replays
    assert after.token_ids == before.token_ids


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_captured_steps_stay_where_the_kv_cache_keeps_its_addresses(
    folder: str, device: str, made: list[RerunGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "memory_mapper", HostMapper())
    sizes: dict[str, Any] = {"max_total_token_num": 1000, "max_req_total_len": 100, "running_max_req_size": 12}
    config = WorkerConfig(model_dir=folder, device=device, data_type="float32", **sizes)
    worker = ModelWorker(config, resolve(folder), Parallel(), has_trainer=True)
    worker.add_trainer_calls(config)
    worker.capture()
    graphs: Any = worker._runner._graphs
    replay, replays = graphs.replay, []

    def counted(key: Any, inputs: Tensor) -> Any:
        replays.append(key)
        return replay(key, inputs)

    monkeypatch.setattr(graphs, "replay", counted)
    monkeypatch.setattr(graphs, "capture", lambda examples: pytest.fail("steps are captured again"))
    buffers = worker.model.mem_manager.buffers
    addresses = [buffer.data_ptr() for buffer in buffers]
    expected = Driver(worker, seed=1).run(15)
    num_replays = len(replays)

    with ThreadPoolExecutor(1) as calls:  # the calls of a router have threads of their own

        def change(is_released: bool) -> MemoryChanged:
            assert worker.memory is not None
            return calls.submit(worker.memory.handle, ReleasedMemory(kv=is_released)).result()

        assert change(True) == MemoryChanged(keeps_graphs=True)
        assert change(False) == MemoryChanged(keeps_graphs=True)

    outs = Driver(worker, seed=1).run(15)
    assert [(out.req_id, out.token.id) for out in outs] == [(out.req_id, out.token.id) for out in expected]
    assert len(replays) == 2 * num_replays > 4
    assert [buffer.data_ptr() for buffer in buffers] == addresses


def sleeping_worker(folder: str, device: str, monkeypatch: pytest.MonkeyPatch) -> ModelWorker:
    """Its weights are in memory that can be moved to the host."""
    monkeypatch.setattr(CpuDevice, "memory_mapper", HostMapper())
    monkeypatch.setattr(CpuDevice, "memory_pools", HostPools())
    sizes: dict[str, Any] = {"max_total_token_num": 1000, "max_req_total_len": 100, "running_max_req_size": 12}
    config = WorkerConfig(model_dir=folder, device=device, data_type="float32", **sizes)
    worker = ModelWorker(config, resolve(folder), Parallel(), has_trainer=True)
    worker.add_trainer_calls(config)
    worker.capture()
    return worker


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("released", [ReleasedMemory(weights=True), ReleasedMemory(kv=True, weights=True)])
def test_captured_steps_stay_while_the_weights_are_on_the_host(
    folder: str, device: str, released: ReleasedMemory, made: list[RerunGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = sleeping_worker(folder, device, monkeypatch)
    assert worker.memory is not None
    graphs: Any = worker._runner._graphs
    monkeypatch.setattr(graphs, "capture", lambda examples: pytest.fail("steps are captured again"))
    table, _ = next(iter(worker.model.rotary_tables.values()))
    address, free = table.data_ptr(), _free_bytes(device)
    expected = Driver(worker, seed=1).run(15)

    assert worker.memory.handle(released) == MemoryChanged(keeps_graphs=True)
    if device == "cpu":
        assert bool(table.isnan().all())  # it is away
    else:
        assert isinstance(worker._weight_pool, CudaMappedPool)
        assert _free_bytes(device) - free >= worker._weight_pool.num_bytes > 0
    assert worker.memory.handle(released) == MemoryChanged(keeps_graphs=True)  # again: nothing to do
    assert worker.memory.handle(ReleasedMemory()) == MemoryChanged(keeps_graphs=True)

    outs = Driver(worker, seed=1).run(15)
    assert [(out.req_id, out.token.id) for out in outs] == [(out.req_id, out.token.id) for out in expected]
    assert table.data_ptr() == address


def _free_bytes(device: str) -> int:
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def test_weights_that_are_on_the_host_are_neither_read_nor_updated(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = sleeping_worker(folder, "cpu", monkeypatch)
    assert worker.memory is not None
    assert worker.weights is not None
    worker.memory.handle(ReleasedMemory(weights=True))

    refused = worker.weights.handle(ReadTensor("lm_head.weight", 4))
    assert refused.is_client_error
    assert "the weights have no memory while the server sleeps; wake them first" in refused.error
    assert not worker.weights.handle(LeaveGroup("trainer")).error  # groups need no weights
    assert not worker.weights.handle(CancelLoad()).error

    worker.memory.handle(ReleasedMemory())
    assert not worker.weights.handle(ReadTensor("lm_head.weight", 4)).error


def test_a_worker_whose_weights_cannot_move_keeps_them_and_its_kv(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = sleeping_worker(folder, "cpu", monkeypatch)
    assert worker.memory is not None
    no_room = RuntimeError("CUDA out of memory\nand more")
    monkeypatch.setattr(worker._weight_pool, "release", Mock(side_effect=no_room))

    assert worker.memory.handle(ReleasedMemory(kv=True, weights=True)) == MemoryChanged("CUDA out of memory")
    assert worker.memory.released == ReleasedMemory()
    assert Driver(worker, seed=1).run(5)


def test_weights_that_a_trainer_leaves_no_room_for_are_asked_for_again(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = sleeping_worker(folder, "cpu", monkeypatch)
    assert worker.memory is not None
    expected = Driver(worker, seed=1).run(5)
    worker.memory.handle(ReleasedMemory(kv=True, weights=True))
    restore, no_room = worker._weight_pool.restore, RuntimeError("CUDA out of memory")  # type: ignore[union-attr]
    monkeypatch.setattr(worker._weight_pool, "restore", Mock(side_effect=no_room))

    assert worker.memory.handle(ReleasedMemory()).error == "CUDA out of memory"
    assert worker.memory.released == ReleasedMemory(kv=True, weights=True)
    monkeypatch.setattr(worker._weight_pool, "restore", restore)
    assert worker.memory.handle(ReleasedMemory()) == MemoryChanged(keeps_graphs=True)

    outs = Driver(worker, seed=1).run(5)
    assert [(out.req_id, out.token.id) for out in outs] == [(out.req_id, out.token.id) for out in expected]
