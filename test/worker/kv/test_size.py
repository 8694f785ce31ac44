"""The size of the KV pool: what memory allows, or what the operator sets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.model_files.source import resolve
from lightserve.worker.kv import size as kv_size_module
from lightserve.worker.kv.size import kv_size
from lightserve.worker.worker import ModelWorker

CONFIG = WorkerConfig(device="cpu", data_type="float32", max_req_total_len=10, running_max_req_size=2)


class Memory:
    """A device with so much memory for KV."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def compile_kernels(self, *args: Any) -> None:
        pass

    def peak_bytes(self, *args: Any) -> int:
        return 0

    def wait_for_others(self) -> None:
        pass

    def kv_budget(self, *args: Any) -> int:
        return self._budget


@pytest.fixture(scope="module")
def worker(folder: str) -> ModelWorker:
    config = replace(CONFIG, model_dir=folder, max_total_token_num=100)
    return ModelWorker(config, resolve(folder), Parallel())


def size(worker: ModelWorker, tokens: int, max_total_token_num: int | None = None) -> int:
    """The pool of a worker whose memory holds so many tokens."""
    model = worker.model
    config = replace(CONFIG, max_total_token_num=max_total_token_num)
    budget = tokens * model.kv_layout.bytes_per_token
    sizes = kv_size(config, model, Memory(budget), lambda: None)  # type: ignore[arg-type]
    assert not sizes.groups  # no layer has a window
    return sizes.tokens


def test_the_pool_takes_all_memory_for_the_prefix_cache(worker: ModelWorker) -> None:
    """Running requests could use 2 * 10 tokens at once. The rest of the pool keeps prefixes."""
    assert size(worker, 1234) == 1234


def test_the_operator_may_set_more_than_running_requests_could_use(worker: ModelWorker) -> None:
    assert worker.max_total_token_num == 100
    assert size(worker, 1234, max_total_token_num=100_000) == 100_000


def test_the_pool_of_a_tiny_model_has_no_more_slots_than_the_router_can_count(
    worker: ModelWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_size_module, "MAX_SLOTS", 1000)

    assert size(worker, 1234) == 1000
