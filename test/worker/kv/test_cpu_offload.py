"""What --kv_ram_gb refuses."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.config import HttpConfig, LaunchConfig, RouterConfig, ServerConfig, WorkerConfig
from lightserve.errors import OptionError, ServerError
from lightserve.worker.worker import ModelWorker
from test.worker.test_step_runner import make


@pytest.fixture(scope="module")
def worker(folder: str) -> ModelWorker:
    return make(folder, "cpu")


@pytest.mark.parametrize(("size", "words"), [(1e-7, "holds no block of 64 tokens"), (1e6, "GiB are free; lower it")])
def test_a_size_that_cannot_be_is_refused(worker: ModelWorker, size: float, words: str) -> None:
    with pytest.raises(ServerError, match=words):
        worker.add_cpu_offload(WorkerConfig(kv_ram_gb=size), 1)


def test_engines_and_ranks_share_the_memory(worker: ModelWorker) -> None:
    sizes = []
    for num_engines in (1, 2):
        worker.add_cpu_offload(WorkerConfig(kv_ram_gb=0.01), num_engines)
        assert worker.cpu_kv is not None
        sizes.append(worker.cpu_kv.num_blocks)

    assert sizes[0] // 2 == sizes[1]


def test_a_tier_without_a_prefix_cache_is_refused() -> None:
    with pytest.raises(OptionError, match="disable_dynamic_prompt_cache"):
        ServerConfig(
            worker=WorkerConfig(kv_ram_gb=1),
            router=RouterConfig(disable_dynamic_prompt_cache=True),
            http=HttpConfig(),
            launch=LaunchConfig(),
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_ram_gb": 1, "kv_disk_gb": 1}, "kv_disk_gb and kv_disk_dir need each other"),
        ({"kv_ram_gb": 1, "kv_disk_dir": "a"}, "kv_disk_gb and kv_disk_dir need each other"),
        ({"kv_disk_gb": 1, "kv_disk_dir": "a"}, "needs --kv_ram_gb"),
    ],
)
def test_options_that_need_another_one_say_so(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        WorkerConfig(**options)


@pytest.mark.parametrize("size", [-1, float("nan"), float("inf")])
def test_a_size_is_a_number_from_zero_on(size: float) -> None:
    with pytest.raises(OptionError, match="kv_ram_gb"):
        WorkerConfig(kv_ram_gb=size)
