"""The ranks of an LLM, as its loop of steps sees them."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Protocol

from lightserve.common.device import pick_device
from lightserve.common.parallel import Parallel
from lightserve.config import HttpConfig, LaunchConfig, RouterConfig, ServerConfig, WorkerConfig
from lightserve.errors import ServerError
from lightserve.messages.control import EngineInfo
from lightserve.messages.step import Step
from lightserve.messages.worker_calls import LoraLoad, LoraLoaded
from lightserve.model_files.source import ModelSource
from lightserve.offline.images import OfflineImages
from lightserve.offline.kv_calls import LocalCalls, Send
from lightserve.offline.rank_processes import RankProcesses
from lightserve.worker.call_handlers import call_handlers
from lightserve.worker.engine_info import engine_info
from lightserve.worker.rpc import GetResult
from lightserve.worker.select import worker_class
from lightserve.worker.worker import ModelWorker


class Ranks(Protocol):
    engine: EngineInfo

    @property
    def worker(self) -> ModelWorker:
        """A single rank."""

    def launch(self, step: Step) -> GetResult:
        """Start a step, and return a function that waits for its result."""

    def reset(self) -> None:
        """Free all requests, and forget the steps in flight."""

    def load_adapter(self, adapter: LoraLoad) -> LoraLoaded:
        """Into the host memory of all ranks."""

    def send_to_group(self, group: int) -> Send:
        """Calls to the ranks of an attention group, from any thread."""

    def close(self) -> None: ...


class OneRank:
    """The whole model, in this process."""

    def __init__(self, config: WorkerConfig, source: ModelSource, images: OfflineImages | None) -> None:
        self.worker = worker_class(config, source)(config, source, Parallel())
        if images is not None:
            self.worker.enable_images(images.arena)
        self.worker.add_cpu_offload(config, num_engines=1)
        self.worker.capture()
        self._calls = LocalCalls(call_handlers(self.worker, profiler=None))
        self.engine = engine_info(self.worker, config, source)
        self._device = config.device

    def launch(self, step: Step) -> GetResult:
        return self.worker.launch(step)

    def reset(self) -> None:
        self.worker.reset()

    def load_adapter(self, adapter: LoraLoad) -> LoraLoaded:
        if self.worker.loras is None:
            raise ServerError("the worker has no slots for adapters")
        return self.worker.loras.load(adapter)

    def send_to_group(self, group: int) -> Send:
        return self._calls.send

    def close(self) -> None:
        self._calls.close()
        del self.worker
        gc.collect()
        pick_device(self._device).free_cached_memory()


def start_ranks(config: WorkerConfig, source: ModelSource, images: OfflineImages | None) -> Ranks:
    """Several ranks are processes with a device each; one is in this process."""
    if config.num_ranks == 1:
        return OneRank(config, source, images)
    return RankProcesses(server_config(config, source), None if images is None else images.arena_fd)


def server_config(config: WorkerConfig, source: ModelSource) -> ServerConfig:
    """Of a server with the same ranks."""
    worker = replace(config, model_dir=str(source.path))  # whose files are all here
    return ServerConfig(worker=worker, router=RouterConfig(), http=HttpConfig(), launch=LaunchConfig())
