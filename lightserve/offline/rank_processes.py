"""The ranks of an LLM with --tp or --pp: the worker processes of a server, without its other processes.

An event loop in a thread starts them, sends them steps and notices when one dies. The caller's thread may have a loop
of its own. The processes end with ``close``, with the LLM, or with the interpreter.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from lightserve.config import ServerConfig
from lightserve.errors import ServerError
from lightserve.ipc.process import ChildConfig
from lightserve.ipc.worker_calls import LOAD_LORA, WorkerCall
from lightserve.messages.control import EngineInfo
from lightserve.messages.step import Step, StepResult
from lightserve.messages.worker_calls import LoraLoad, LoraLoaded
from lightserve.offline.kv_calls import Send
from lightserve.router.workers.client import RpycModelClient
from lightserve.server.child_process import EXIT_GRACE_S
from lightserve.server.engine_processes import EngineProcesses
from lightserve.server.process_group import Modules, ProcessGroup
from lightserve.server.run_directory import run_directory
from lightserve.worker.rpc import GetResult
from lightserve.worker.worker import ModelWorker

Reply = TypeVar("Reply")


class RankProcesses:
    def __init__(self, config: ServerConfig, arena_fd: int | None) -> None:
        """``arena_fd``: memory with the embeddings of images; None: requests have none."""
        self._host = _RankHost(config, arena_fd)
        self._end = weakref.finalize(self, self._host.stop)  # also when the interpreter exits
        self._num_ranks = config.worker.num_ranks
        num_groups = config.worker.num_groups
        self._known: list[set[int]] = [set() for _ in range(num_groups)]  # requests that the ranks have, by group
        # by group: those that the next step frees, because the scheduler does not know them
        self._forgotten: list[list[int]] = [[] for _ in range(num_groups)]
        try:
            self.engine = self._host.start()
        except BaseException:
            self.close()
            raise

    @property
    def worker(self) -> ModelWorker:
        raise ServerError(f"the model is in {self._num_ranks} other processes")

    def launch(self, step: Step) -> GetResult:
        steps = [self._with_forgotten(group, of_group) for group, of_group in enumerate(step.groups or [step])]
        self._forgotten = [[] for _ in self._known]
        step = msgspec.structs.replace(step, groups=steps) if step.groups else steps[0]
        return self._host.send(step).result

    def _with_forgotten(self, group: int, step: Step) -> Step:
        known, forgotten = self._known[group], self._forgotten[group]
        known.update(new.req_id for new in step.new)
        known.difference_update(step.free)
        return msgspec.structs.replace(step, free=[*forgotten, *step.free]) if forgotten else step

    def reset(self) -> None:
        """Steps in flight end before the next one begins."""
        for known, forgotten in zip(self._known, self._forgotten, strict=True):
            forgotten += known
            known.clear()

    def load_adapter(self, adapter: LoraLoad) -> LoraLoaded:
        return self._host.load_adapter(adapter)

    def send_to_group(self, group: int) -> Send:
        return partial(self._host.send_to_group, group)

    def close(self) -> None:
        self._end()


class _RankHost:
    """The thread. It does not know its owner, which can be collected while the thread runs."""

    def __init__(self, config: ServerConfig, arena_fd: int | None) -> None:
        self._config = config
        self._arena_fd = arena_fd
        self._loop = asyncio.new_event_loop()
        self._serving: asyncio.Task[None] = self._loop.create_task(self._serve())
        self._ready: Future[EngineInfo] = Future()
        self._death: Future[ServerError] = Future()  # of a rank: all of them have ended
        self._client: RpycModelClient
        self._processes: EngineProcesses
        self._thread = threading.Thread(target=self._run, name="lightserve-ranks", daemon=True)

    def start(self) -> EngineInfo:
        self._thread.start()
        return self._ready.result()

    def stop(self) -> None:
        """End the ranks, and wait until they have exited."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._serving.cancel)
        if threading.current_thread() is not self._thread:  # which may collect the LLM
            self._thread.join()

    def send(self, step: Step) -> Future[StepResult]:
        result: Future[StepResult] = Future()
        self._loop.call_soon_threadsafe(self._send, step, result)
        return result

    def send_to_group(self, group: int, call: WorkerCall[Any, Reply], request: Any) -> Future[Reply | None]:
        async def ask() -> Reply | None:
            return await self._client.group(group).call(call, request)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop)

    def load_adapter(self, adapter: LoraLoad) -> LoraLoaded:
        async def load() -> LoraLoaded | None:
            return await self._client.call(LOAD_LORA, adapter)

        loaded = asyncio.run_coroutine_threadsafe(load(), self._loop).result()
        if loaded is None:
            raise self._death.result()
        return loaded

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._serving)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        with run_directory() as run_dir:
            group = ProcessGroup(self._config, run_dir, Modules())
            [self._processes] = group.engines
            try:
                engine = await self._started()
                with closing(await self._connected(run_dir)) as self._client:
                    self._ready.set_result(engine)
                    await self._report_death()
            except Exception as error:
                self._ready.set_exception(error)
            finally:
                await group.kill_all()

    async def _started(self) -> EngineInfo:
        processes = self._processes
        if self._arena_fd is not None:
            processes.use_arena(self._arena_fd)
        await processes.start_workers()
        death = asyncio.ensure_future(processes.wait_worker_death())
        ready = asyncio.ensure_future(processes.wait_workers_ready())
        await asyncio.wait({death, ready}, return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            ready.cancel()
            raise death.result()
        death.cancel()
        return ready.result()

    async def _connected(self, run_dir: str) -> RpycModelClient:
        child_config, processes = ChildConfig(self._config, run_dir), self._processes
        paths = [child_config.worker_path(rank, processes.generation) for rank in range(len(processes.workers))]
        return await RpycModelClient.connect(paths, lambda *_: None, self._config.worker.answering_ranks)

    async def _report_death(self) -> None:
        died = await self._processes.wait_worker_death()
        self._processes.kill_workers()  # the others wait for it
        self._death.set_result(ServerError(f"{died}; make another LLM"))
        await self._loop.create_future()  # requests get the error, until the caller closes the LLM

    def _send(self, step: Step, result: Future[StepResult]) -> None:
        self._client.run(step).add_done_callback(partial(self._on_reply, result))

    def _on_reply(self, result: Future[StepResult], reply: asyncio.Future[StepResult]) -> None:
        error = reply.exception()
        if error is None:
            result.set_result(reply.result())
            return
        # a rank that has closed its connection may still be exiting, and knows why
        self._loop.call_later(EXIT_GRACE_S, self._processes.kill_workers, str(error))
        self._death.add_done_callback(lambda death: result.set_exception(death.result()))
