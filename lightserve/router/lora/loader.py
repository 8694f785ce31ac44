"""Keeps the adapters that requests need in the host memory of the workers, from where steps copy them to the device.

An adapter is loaded for its first request and stays until its room is needed for another. One is loaded at a time: the
workers read files beside their steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from lightserve.errors import AdapterError
from lightserve.ipc.worker_calls import LOAD_LORA, WorkerCaller
from lightserve.messages.worker_calls import LoraLoad, LoraLoaded
from lightserve.router.lora.registry import RegisteredAdapter
from lightserve.router.scheduler import Scheduler
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)


OnFailed = Callable[[RegisteredAdapter, str], None]  # an adapter cannot be loaded, for this reason


@dataclass(slots=True, eq=False)
class _Entry:
    adapter: RegisteredAdapter
    users: int = 0  # requests that wait or run
    is_loaded: bool = False
    loaded: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class AdapterLoader:
    def __init__(self, scheduler: Scheduler, capacity: int, on_failed: OnFailed) -> None:
        self._scheduler = scheduler
        self._slots = [group.loras for group in scheduler.groups]
        for slots in self._slots:
            slots.on_leave = self.release
        self._capacity = capacity
        self._on_failed = on_failed
        self._workers: WorkerCaller | None = None
        self._entries: dict[int, _Entry] = {}  # by id, the least recently used first
        self._loading: _Entry | None = None

    def acquire(self, adapter: RegisteredAdapter) -> asyncio.Future[str]:
        """Load an adapter for a request. The future resolves to why it failed, "" if it is there."""
        entry = self._entries.pop(adapter.lora_id, None) or _Entry(adapter)
        self._entries[adapter.lora_id] = entry
        entry.users += 1
        self._load_next()
        return entry.loaded

    def release(self, lora_id: int) -> None:
        """A request with this adapter has ended."""
        entry = self._entries.get(lora_id)
        if entry is None:  # it could not be loaded
            return
        entry.users -= 1
        if not entry.users and not entry.is_loaded and entry is not self._loading:
            del self._entries[lora_id]
        self._load_next()

    def use_workers(self, workers: WorkerCaller) -> None:
        """New workers have no adapters: load all that requests need again."""
        self._workers = workers
        self._loading = None
        for slots in self._slots:
            slots.loaded.clear()
        self._entries = {lora_id: entry for lora_id, entry in self._entries.items() if entry.users}
        for entry in self._entries.values():
            entry.is_loaded = False
            if entry.loaded.done():
                entry.loaded = asyncio.get_running_loop().create_future()
        self._load_next()

    def loading_of(self, lora_id: int) -> asyncio.Future[str] | None:
        entry = self._entries.get(lora_id)
        return None if entry is None else entry.loaded

    def _load_next(self) -> None:
        """Load the first adapter that requests wait for, if there is room."""
        while self._workers is not None and self._loading is None:
            entry = next(
                (candidate for candidate in self._entries.values() if candidate.users and not candidate.is_loaded), None
            )
            dropped = None if entry is None else self._make_room()
            if entry is None or dropped is None:
                return
            self._load(self._workers, entry, dropped)

    def _load(self, workers: WorkerCaller, entry: _Entry, dropped: list[int]) -> None:
        try:
            entry.adapter.check_unchanged()
        except AdapterError as error:
            self._fail(entry, str(error))
            return
        self._loading = entry
        command = LoraLoad(entry.adapter.lora_id, str(entry.adapter.folder), dropped)
        reply = workers.call(LOAD_LORA, command)
        reply.add_done_callback(lambda done: self._on_reply(workers, entry, done.result()))

    def _make_room(self) -> list[int] | None:
        """The adapters to drop for one more; None: all are needed."""
        loaded = [entry for entry in self._entries.values() if entry.is_loaded]
        surplus = len(loaded) + 1 - self._capacity
        if surplus <= 0:
            return []
        unused = [entry.adapter.lora_id for entry in loaded if not entry.users]
        dropped = [lora_id for lora_id in unused if not self._scheduler.needs_on_host(lora_id)][:surplus]
        if len(dropped) < surplus:
            return None
        for lora_id in dropped:
            del self._entries[lora_id]
            for slots in self._slots:
                slots.loaded.discard(lora_id)
        return dropped

    def _on_reply(self, workers: WorkerCaller, entry: _Entry, reply: LoraLoaded | None) -> None:
        if workers is not self._workers or reply is None:  # they are lost; the next ones load it again
            return
        self._loading = None
        error = reply.error or self._digest_problem(entry.adapter, reply.digest)
        if error:
            self._fail(entry, error)
        else:
            entry.adapter.digest, entry.is_loaded = reply.digest, True
            for slots in self._slots:
                slots.loaded.add(entry.adapter.lora_id)
            logger.info("the adapter %r is loaded from %s", entry.adapter.name, entry.adapter.folder)
            entry.loaded.set_result("")
        self._load_next()

    @staticmethod
    def _digest_problem(adapter: RegisteredAdapter, digest: str) -> str:
        """Requests use cached prefixes that were computed with the files of an earlier load."""
        is_same = adapter.digest in ("", digest)
        return "" if is_same else f"{adapter.folder}: the files have changed since they were loaded first"

    @property
    def digests(self) -> dict[int, str]:
        """Of the adapters that are loaded, by id."""
        return {lora_id: entry.adapter.digest for lora_id, entry in self._entries.items() if entry.is_loaded}

    def _fail(self, entry: _Entry, reason: str) -> None:
        logger.warning("the adapter %r cannot be used: %s", entry.adapter.name, reason)
        self._entries.pop(entry.adapter.lora_id, None)
        self._on_failed(entry.adapter, reason)
        entry.loaded.set_result(reason)
