"""The memory of the KV cache is freed while the weights stay, and taken again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from lightserve.common.device.cpu import CpuDevice
from lightserve.common.device.profile import H200_GRAPHS
from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.messages.worker_calls import KvMemory, KvMemoryChanged
from lightserve.model_files.source import resolve
from lightserve.offline.llm import LLM
from lightserve.worker.kv.memory import KvPoolMemory
from lightserve.worker.worker import ModelWorker
from test.common.test_mapped_memory import HostMapper
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
    memory = KvPoolMemory(worker.model.mem_manager, worker._runner, worker._platform, worker.model.device)
    buffers = worker.model.mem_manager.buffers
    captured = set(made[-1].captured)
    assert captured

    llm._scheduler.clear_cache()  # as the router does
    assert memory.handle(KvMemory(is_released=True)).error == ""
    assert [buffer.untyped_storage().nbytes() for buffer in buffers] == [0] * len(buffers)
    assert not made[-1].captured
    assert memory.handle(KvMemory(is_released=True)).error == ""  # again: nothing to do
    assert memory.handle(KvMemory(is_released=False)).error == ""

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

        def change(is_released: bool) -> KvMemoryChanged:
            assert worker.kv_memory is not None
            return calls.submit(worker.kv_memory.handle, KvMemory(is_released)).result()

        assert change(True) == KvMemoryChanged(keeps_graphs=True)
        assert change(False) == KvMemoryChanged(keeps_graphs=True)

    outs = Driver(worker, seed=1).run(15)
    assert [(out.req_id, out.token.id) for out in outs] == [(out.req_id, out.token.id) for out in expected]
    assert len(replays) == 2 * num_replays > 4
    assert [buffer.data_ptr() for buffer in buffers] == addresses
