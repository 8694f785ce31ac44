"""LoRA adapters in the router: which one a request uses, and the operator's commands to load and unload them."""

from __future__ import annotations

import asyncio

from lightserve.config import WorkerConfig
from lightserve.errors import AdapterError, LightserveError, ModelNotFoundError
from lightserve.ipc.channel import Sender
from lightserve.ipc.worker_calls import WorkerCaller
from lightserve.messages.output import AdapterCard, AdapterReply, ToDetokenization
from lightserve.messages.request import AdapterQuery, LoadAdapter, UnloadAdapter
from lightserve.router.lora.loader import AdapterLoader
from lightserve.router.lora.registry import AdapterRegistry, RegisteredAdapter, not_found
from lightserve.router.output_processor import OutputProcessor
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler

DISABLED = "this server has no LoRA adapters; start it with --lora_modules or --lora_dir"


class AdapterControl:
    def __init__(
        self, scheduler: Scheduler, output_processor: OutputProcessor, replies: Sender[ToDetokenization]
    ) -> None:
        self._scheduler = scheduler
        self._output_processor = output_processor
        self._replies = replies
        self._registry = AdapterRegistry([], None)
        self._loader: AdapterLoader | None = None  # None: the workers take no adapters

    def enable(self, config: WorkerConfig, workers: WorkerCaller) -> None:
        """Load the adapters of --lora_modules, as many as host memory may hold."""
        self._registry = AdapterRegistry(config.lora_modules, config.lora_dir)
        self._loader = AdapterLoader(self._scheduler, config.num_cpu_loras, self._on_failed)
        self._output_processor.adapter_digests = self._digests
        self._loader.use_workers(workers)
        for adapter in list(self._registry)[: config.num_cpu_loras]:
            self._loader.acquire(adapter).add_done_callback(lambda _, loaded=adapter: self._release(loaded))  # type: ignore[misc]

    def use_workers(self, workers: WorkerCaller) -> list[Req]:
        """Continue with new workers. Returns the requests that must wait until their adapters are loaded again."""
        if self._loader is None:
            return []
        self._loader.use_workers(workers)
        queues = [group.queue for group in self._scheduler.groups]
        return [req for queue in queues for req in queue.defer_again(lambda req: req.lora_id is not None)]

    def _digests(self) -> dict[str, str]:
        """Of the adapters that are loaded, by name."""
        loaded = {} if self._loader is None else self._loader.digests
        return {adapter.name: loaded[adapter.lora_id] for adapter in self._registry if adapter.lora_id in loaded}

    def find(self, name: str) -> RegisteredAdapter | None:
        """The adapter that a request names; None: the base model."""
        if not name:
            return None
        if self._loader is None:
            raise not_found(name)
        return self._registry.find(name)

    def load(self, adapter: RegisteredAdapter) -> asyncio.Future[str] | None:
        """Load the adapter of a new request, until the request ends. None: it is there."""
        loading = None if self._loader is None else self._loader.acquire(adapter)
        return None if loading is None or loading.done() else loading

    def loading_of(self, req: Req) -> asyncio.Future[str] | None:
        """The load that a held request waits for."""
        if self._loader is None or req.lora_id is None:
            return None
        return self._loader.loading_of(req.lora_id)

    def handle(self, message: AdapterQuery) -> None:
        """Reply to an operator."""
        try:
            if isinstance(message, LoadAdapter):
                self._add(message)
                return
            if isinstance(message, UnloadAdapter):
                self._check_enabled()
                self._registry.remove(message.name)
            elif message.name:
                self.find(message.name)
        except LightserveError as error:
            self._replies.send(_error_reply(message.query_id, error))
            return
        cards = [AdapterCard(adapter.name, adapter.shown_path) for adapter in self._registry]
        self._replies.send(AdapterReply(message.query_id, adapters=cards))

    def _add(self, message: LoadAdapter) -> None:
        """The reply comes when the workers have loaded it. Until then requests use what the name stood for before."""
        loader = self._check_enabled()
        adapter = self._registry.prepare(message.name, message.path, message.replaces)
        if message.is_restored:
            self._registry.put(adapter)

        def reply(done: asyncio.Future[str]) -> None:
            if not done.result():
                self._registry.put(adapter)
            loader.release(adapter.lora_id)
            reason = adapter.for_client(done.result())
            self._replies.send(AdapterReply(message.query_id, 400 if reason else 200, reason))

        loader.acquire(adapter).add_done_callback(reply)

    def _check_enabled(self) -> AdapterLoader:
        if self._loader is None:
            raise AdapterError(DISABLED)
        return self._loader

    def _release(self, adapter: RegisteredAdapter) -> None:
        if self._loader is not None:
            self._loader.release(adapter.lora_id)

    def _on_failed(self, adapter: RegisteredAdapter, reason: str) -> None:
        """An adapter cannot be loaded: its requests fail, and the rest goes on."""
        if adapter.is_on_demand:
            self._registry.forget(adapter)
        failed = self._scheduler.drop(lambda req: req.lora_id == adapter.lora_id)
        if failed:
            shown = f"the adapter {adapter.name!r} cannot be used: {adapter.for_client(reason)}"
            self._output_processor.fail(failed, 400, lambda _: shown)


def _error_reply(query_id: int, error: LightserveError) -> AdapterReply:
    return AdapterReply(query_id, 404 if isinstance(error, ModelNotFoundError) else 400, str(error))
