"""What a step of a beam search costs by its length: bytes between the processes, and CPU time without the model.

    python -m benchmark.engine.beams [--beams 4 8] [--lengths 100 1000 4000] [--steps 40]

It runs the real HTTP manager, router, detokenizer and the batch of a worker in one process. Messages are encoded and
decoded as between processes. It prints medians of the steps after the first ones.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from lightserve.common.kv.req_manager import ReqManager
from lightserve.config import RouterConfig
from lightserve.detokenization.manager import DetokenizationManager
from lightserve.httpserver.beam_search import run_beam_search
from lightserve.httpserver.engine_client import HttpServerManager
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.prompt_request import PromptRequest
from lightserve.ipc.codec import encode, make_decode
from lightserve.messages.control import EngineInfo
from lightserve.messages.output import ToDetokenization, ToHttpserver
from lightserve.messages.params import GenerationParams
from lightserve.messages.request import ToRouter
from lightserve.messages.step import Step, StepResult
from lightserve.router.kv.pool import KvPool
from lightserve.router.manager import RouterManager
from lightserve.router.observability.stats import ThroughputLog
from lightserve.router.scheduler import GroupScheduler, Scheduler, SchedulerLimits
from lightserve.text.beam_search import BeamParams
from lightserve.worker.batch.infer_batch import InferBatch
from lightserve.worker.null_worker import NullWorker

SKIPPED_STEPS = 3  # the prompt, and steps with fewer beams
MAX_RUNNING = 64
CPU = torch.device("cpu")
PARTS = ("http to router", "router to worker", "worker to router", "plan us", "worker us", "all us")


class Costs(NamedTuple):
    """Of one step. The bytes of each link, and microseconds of CPU time."""

    http_bytes: float
    step_bytes: float
    result_bytes: float
    plan_us: float  # to plan and to encode it
    worker_us: float  # to decode it, and to update and pack the batch
    all_us: float  # of all processes together


class Link:
    """A channel within this process."""

    def __init__(self, message_type: Any) -> None:
        self.num_bytes = 0
        self._decode = make_decode(message_type)
        self._unread: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, message: Any) -> None:
        raw = encode(message)
        self.num_bytes += len(raw)
        self._unread.put_nowait(raw)

    async def recv(self) -> Any:
        return self._decode(await self._unread.get())


class BatchOnly:
    """The workers without a model: the batch of a worker, and tokens of a null worker."""

    is_lost = False
    storage_tiers = kv_receiver = None

    def __init__(self, max_len: int) -> None:
        self.batch = InferBatch(ReqManager(MAX_RUNNING, max_len, CPU), max_len, CPU)
        self.step_bytes = self.result_bytes = 0
        self.plan_s = self.worker_s = 0.0
        self.samples: list[tuple[float, ...]] = []  # after each step with rows
        self.to_router = Link(ToRouter)
        self._tokens = NullWorker(0.0)
        self._decode_step, self._decode_result = make_decode(Step), make_decode(StepResult)

    def kv_workers(self, group: int) -> BatchOnly:
        return self

    def run(self, step: Step) -> asyncio.Future[StepResult]:
        with self._timed("plan_s"):
            command = encode(step)
        self.step_bytes += len(command)
        with self._timed("worker_s"):
            step = self._decode_step(command)
            self._update(step)
            if step.num_rows:
                self.batch.take_sampled(self.batch.pack(step, lambda shape: shape))
        result = encode(self._tokens.launch(step)())
        self.result_bytes += len(result)
        if step.num_rows:
            counts = self.to_router.num_bytes, self.step_bytes, self.result_bytes
            self.samples.append((*counts, self.plan_s, self.worker_s, time.thread_time()))
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        future.set_result(self._decode_result(result))
        return future

    def _update(self, step: Step) -> None:
        self.batch.free(step)
        for new in step.new:
            self.batch.add(self.batch.retained.whole(new))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.thread_time()
        yield
        setattr(self, name, getattr(self, name) + time.thread_time() - begin)

    def time_planning(self, scheduler: Scheduler) -> None:
        plan = scheduler.next_step

        def timed(now_s: float = 0.0) -> Step | None:
            with self._timed("plan_s"):
                return plan(now_s)

        setattr(scheduler, "next_step", timed)  # noqa: B010  # mypy: a method


class LocalServer:
    """The managers of all processes, connected within this one."""

    def __init__(self, max_len: int, workers: BatchOnly | None = None, num_stages: int = 1) -> None:
        self.engine = EngineInfo(MAX_RUNNING * max_len, max_len, 32_000, pipeline_depth=num_stages)
        self.workers = workers or BatchOnly(max_len)
        limits = SchedulerLimits(MAX_RUNNING, 1 << 20, None, num_stages=num_stages)
        self.scheduler = Scheduler(GroupScheduler(KvPool(self.engine.max_total_token_num), limits))
        to_router: Any = self.workers.to_router
        to_detokenization: Any = Link(ToDetokenization)
        to_http: Any = Link(ToHttpserver)
        client: Any = self.workers
        self.router = RouterManager(self.scheduler, client, self.engine, to_router, to_detokenization, RouterConfig())
        self.http = HttpServerManager(0, to_router, to_http)
        self.http.engine_info(self.engine)
        self._detokenization = DetokenizationManager(None, to_detokenization, to_router, [to_http])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        log = ThroughputLog(self.router.metrics, 0)
        running = (self.http.run(), self.router.run(log), self._detokenization.run())
        tasks = [asyncio.create_task(one) for one in running]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def search(self, length: int, params: BeamParams) -> list[list[int]]:
        """The tokens of the beams after a prompt of ``length`` tokens."""
        context: Any = SimpleNamespace(manager=self.http)
        log = AccessLog("beams", "/benchmark", is_written=False)
        [found] = await run_beam_search(context, [PromptRequest([*range(length)], GenerationParams())], params, log)
        return [beam.token_ids for beam in found]


async def measure(num_beams: int, length: int, steps: int, num_stages: int = 1) -> Costs:
    """Medians of a step of a search with a prompt of ``length`` tokens."""
    server = LocalServer(length + steps + 1, num_stages=num_stages)
    server.workers.time_planning(server.scheduler)
    async with server.running():
        await server.search(length, BeamParams(num_beams=num_beams, max_new_tokens=steps, ignore_eos=True))
    samples = server.workers.samples[SKIPPED_STEPS:]
    medians = [median(after - before for before, after in pairwise(one)) for one in zip(*samples, strict=True)]
    return Costs(*medians[:3], *(1e6 * seconds for seconds in medians[3:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 1000, 4000])
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    print(f"{'beams':>5} {'length':>6} " + " ".join(f"{part:>16}" for part in PARTS))
    for num_beams in args.beams:
        for length in args.lengths:
            costs = asyncio.run(measure(num_beams, length, args.steps))
            print(f"{num_beams:5} {length:6} " + " ".join(f"{cost:16,.0f}" for cost in costs), flush=True)


if __name__ == "__main__":
    main()
