"""The memory of the KV cache is freed while the weights stay, and taken again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from lightserve.common.device.cpu import CpuDevice
from lightserve.common.device.profile import H200_GRAPHS
from lightserve.messages.worker_calls import KvMemory
from lightserve.offline.llm import LLM
from lightserve.worker.kv.memory import KvPoolMemory
from test.worker.test_draft_graphs import RerunGraphs


def test_captured_steps_are_captured_again_when_the_kv_cache_has_memory(
    small_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RerunGraphs] = []

    def make_graphs(self: CpuDevice, function: Callable[[Tensor, Any], Any]) -> RerunGraphs:
        made.append(RerunGraphs(function))
        return made[-1]

    profile = CpuDevice.profile
    ranges = replace(H200_GRAPHS, decodes=(1, 2), tokens=(64,), requests=(4,), max_draft_tokens=0)
    monkeypatch.setattr(CpuDevice, "graphs", make_graphs)
    monkeypatch.setattr(CpuDevice, "profile", lambda self, device: replace(profile(self, device), graphs=ranges))
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
