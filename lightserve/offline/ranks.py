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
from lightserve.offline.rank_processes import RankProcesses
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

    def close(self) -> None: ...


class OneRank:
    """The whole model, in this process."""

    def __init__(self, config: WorkerConfig, source: ModelSource, images: OfflineImages | None) -> None:
        self.worker = worker_class(config, source)(config, source, Parallel())
        if images is not None:
            self.worker.enable_images(images.arena)
        self.worker.capture()
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

    def close(self) -> None:
        del self.worker
        gc.collect()
        pick_device(self._device).free_cached_memory()


def start_ranks(config: WorkerConfig, source: ModelSource, images: OfflineImages | None) -> Ranks:
    """Several ranks are processes with a device each; one is in this process."""
    if config.num_ranks == 1:
        return OneRank(config, source, images)
    worker = replace(config, model_dir=str(source.path))  # whose files are all here
    server = ServerConfig(worker=worker, router=RouterConfig(), http=HttpConfig(), launch=LaunchConfig())
    return RankProcesses(server, None if images is None else images.arena_fd)
