"""What steps and long requests cost the router and a worker in Python: milliseconds of CPU time, and memory.

    python -m benchmark.engine.host_overhead [--running 256 1000 2000] [--prefix 131072] [--steps 60] [--has_states]

It runs the real scheduler, reporter, messages, batch and collector in one process, without a model, on one thread, and
prints medians. Two steps are in flight. ``--has_states``: the steps are those of a model with recurrent layers. Columns
of a step:

    plan, send          the router plans a step, and encodes it
    receive, pack       the worker decodes it, and makes the input of the device
    collect, reply      the worker makes the result of a step, and encodes it
    read, report        the router decodes it, gives tokens to requests, and encodes the message to the detokenizer
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch

from lightserve.common.kv.req_manager import ReqManager
from lightserve.ipc.channel import make_decoder
from lightserve.ipc.codec import encode
from lightserve.ipc.worker_calls import RUN
from lightserve.messages.control import StateKv
from lightserve.messages.params import GenerationParams
from lightserve.messages.request import GenerateReq
from lightserve.messages.step import Step
from lightserve.router.kv.group_pools import make_group_pools
from lightserve.router.kv.pool import KvPool
from lightserve.router.output_processor import OutputProcessor
from lightserve.router.policy import make_policy
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, Scheduler, SchedulerLimits
from lightserve.worker.batch.infer_batch import InferBatch
from lightserve.worker.collector import PendingStep, StepCollector
from lightserve.worker.rpc import GetResult
from lightserve.worker.sampling.sampler import Sampler

PARTS = ("plan", "send", "receive", "pack", "collect", "reply", "read", "report")
ROUTER, WORKER = ("plan", "report"), ("pack", "collect")
VOCAB_SIZE = 32_000
PROMPT_LEN = 64  # of requests that only decode
EXTRA = 64  # steps before those that are measured
DEPTH = 2  # steps in flight
MAX_STEP_TOKENS = 1 << 20
NUM_IN_MEMORY, NUM_WAITING = 32, 2_048  # prompts that are measured, and that the result is for
CPU = torch.device("cpu")

decode_request = make_decoder(GenerateReq)


class EncodingSender:
    """Encodes messages as a channel does, and drops them."""

    def send(self, message: Any) -> None:
        encode(message)


class Host:
    """A router and a worker in one process. ``times``: seconds of each part, of every step since it was cleared."""

    def __init__(
        self, running: int, longest: int, pool: int, policy: str = "priority", has_states: bool = False
    ) -> None:
        limits = SchedulerLimits(running, MAX_STEP_TOKENS, MAX_STEP_TOKENS)
        groups = make_group_pools([StateKv(2 * running)] if has_states else [], pool)
        self.scheduler = Scheduler(GroupScheduler(KvPool(pool, groups), limits, make_policy(policy)))
        self.times: dict[str, list[float]] = defaultdict(list)
        self._output_processor = OutputProcessor(self.scheduler, EncodingSender())  # type: ignore[arg-type]
        self._batch = InferBatch(ReqManager(running, longest, CPU), pool, CPU)
        if has_states:
            self._batch.enable_states()
        self._sampler = Sampler(VOCAB_SIZE, CPU, self._batch.last_ids, gather=lambda local: local)
        self._collector = StepCollector()
        self._in_flight: deque[GetResult] = deque()
        self._launch_s: deque[float] = deque()  # of the steps in flight: what launching them adds to "collect"

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self.times[part].append(time.thread_time() - begin)

    def add(self, req_id: int, prompt: Any, max_new_tokens: int) -> Req:
        """As if a request came from an HTTP process."""
        params = GenerationParams.of(max_new_tokens=max_new_tokens, seed=0, ignore_eos=True)
        raw = encode(GenerateReq(req_id, prompt, params, arrived_s=float(req_id)))
        with self.timed("accept"):
            message = decode_request(raw)
            req = Req(req_id, message.prompt_ids, message.params, max_new_tokens, (), arrived_s=message.arrived_s)
            self.scheduler.add(req)
        return req

    def step(self) -> None:
        """Fill the pipeline, and process the result of the oldest step."""
        while len(self._in_flight) < DEPTH:
            with self.timed("plan"):
                step = self.scheduler.next_step()
            if step is None:
                break
            with self.timed("send"):
                command = encode(step)
            self._in_flight.append(self._launch(command))
        if self._in_flight:
            self._process(self._in_flight.popleft())

    def settle(self) -> None:
        """Until all requests decode. A step admits 64 at most."""
        for _ in range(4):
            self.step()
        while self.scheduler.num_waiting:
            self.step()
        for _ in range(4):
            self.step()
        self.times.clear()

    def finish(self) -> None:
        while self._in_flight or self.scheduler.num_running or self.scheduler.num_waiting:
            self.step()

    def ms(self, *parts: str) -> list[float]:
        return [1e3 * median(self.times[part]) for part in parts]

    def _launch(self, command: bytes) -> GetResult:
        with self.timed("receive"):
            step = RUN.decode_request(command)
        with self.timed("pack"):
            self._batch.apply(self._collector.take_updates())
            self._update(step)
            packed = self._batch.pack(step, lambda shape: shape)
            self._sampler.prepare(packed.reqs)
        tokens = torch.full((len(packed.reqs),), 9, dtype=torch.int64)
        begin = time.thread_time()
        collect = self._collector.add(PendingStep(tokens, self._batch.take_sampled(packed), None))
        self._launch_s.append(time.thread_time() - begin)
        return collect

    def _update(self, step: Step) -> None:
        for req_id in step.free:
            self._batch.remove(req_id)
        for new in step.new:
            self._batch.add(new)

    def _process(self, collect: GetResult) -> None:
        with self.timed("collect"):
            result = collect()
        self.times["collect"][-1] += self._launch_s.popleft()
        with self.timed("reply"):
            reply = encode(result)
        with self.timed("read"):
            result = RUN.decode_reply(reply)
        with self.timed("report"):
            self.scheduler.complete_step()
            self._output_processor.report(result)


def random_prompt(rng: np.random.Generator, length: int) -> Any:
    return rng.integers(0, VOCAB_SIZE, length, dtype=np.int32)


def decoding(running: int, steps: int, rng: np.random.Generator, extra: int = 0, has_states: bool = False) -> Host:
    """A host with ``running`` requests that decode, and room for ``extra`` more."""
    most = PROMPT_LEN + steps + EXTRA
    host = Host(running + extra, most, (running + extra) * most, has_states=has_states)
    for req_id in range(running):
        host.add(req_id, random_prompt(rng, PROMPT_LEN), steps + EXTRA)
    host.settle()
    return host


def print_steps(running: list[int], steps: int, has_states: bool) -> None:
    print(f"{'running':>8}" + "".join(f"{part:>9}" for part in PARTS) + f"{'plan+report':>13}{'pack+collect':>13}")
    for count in running:
        host = decoding(count, steps, np.random.default_rng(0), has_states=has_states)
        for _ in range(steps):
            host.step()
        parts = "".join(f"{ms:9.3f}" for ms in host.ms(*PARTS))
        print(f"{count:8}{parts}{sum(host.ms(*ROUTER)):13.3f}{sum(host.ms(*WORKER)):13.3f}", flush=True)


def print_admissions(running: list[int], repeats: int) -> None:
    """The plan of a step that admits a request, less the plan of one that admits none."""
    print("\nadmission of one request: ms of planning, of a short request beside so many running")
    for count in running:
        rng = np.random.default_rng(0)
        host = decoding(count, 4 * repeats + 8, rng, extra=2)
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(repeats):
            for admits in (True, False):
                host.times.clear()
                if admits:
                    host.add(count + number, random_prompt(rng, PROMPT_LEN), 1)
                host.step()
                times[admits].append(host.times["plan"][0])
        print(f"{count:8} {1e3 * (median(times[True]) - median(times[False])):9.3f}", flush=True)


def print_long_prefix(length: int, repeats: int) -> None:
    """A request whose prompt is cached but for its last tokens."""
    prompt = random_prompt(np.random.default_rng(0), length)
    host = Host(1, length + 64, 2 * length)
    host.add(0, prompt, 1)
    host.finish()
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(1, repeats + 1):
        host.times.clear()
        host.add(number, prompt, 8)
        host.step()  # two steps are launched: the rest of the prompt, and the first decode
        admit, first_decode = ({part: host.times[part][place] for part in PARTS[:4]} for place in (0, 1))
        times["accept"].append(host.times["accept"][0])
        times["admit (router: plan, send)"].append(admit["plan"] + admit["send"])
        times["enter (worker: receive, pack)"].append(admit["receive"] + admit["pack"])
        times["first decode (plan, send, receive, pack)"].append(sum(first_decode.values()))
        host.times.clear()
        host.finish()
        times["close (router: the slowest report)"].append(max(host.times["report"]))
    print(f"\na request with {length:,} tokens, all but one cached: ms")
    for name, values in times.items():
        print(f"{1e3 * median(values):9.3f}  {name}")


def print_blocked(length: int, running: int, steps: int) -> None:
    """Requests decode while the first of the queue, whose long prefix is cached, does not fit."""
    rng = np.random.default_rng(0)
    prompt = random_prompt(rng, length)
    print(
        f"\nplanning beside {running} running, ms: nothing waits; the head of the queue ({length:,} tokens) is blocked"
    )
    for is_blocked in (False, True):
        pool = 2 * length + running * (PROMPT_LEN + steps + EXTRA)
        host = Host(running + 1, length + 64, pool)
        host.add(0, prompt, 1)
        host.finish()
        for req_id in range(1, running + 1):
            host.add(req_id, random_prompt(rng, PROMPT_LEN), steps + EXTRA)
        host.settle()
        if is_blocked:
            host.add(running + 1, prompt, pool)
        host.times.clear()
        for _ in range(steps):
            host.step()
        print(f"{'blocked' if is_blocked else 'empty':>8} {host.ms('plan')[0]:9.3f}", flush=True)


def print_memory(length: int) -> None:
    rng = np.random.default_rng(0)
    host = Host(1, 64, 1 << 20)
    prompts = [random_prompt(rng, length) for _ in range(NUM_IN_MEMORY)]
    tracemalloc.start()
    for req_id, prompt in enumerate(prompts):
        host.add(req_id, prompt, 8)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"\n{NUM_WAITING:,} waiting prompts of {length:,} tokens: {held / NUM_IN_MEMORY * NUM_WAITING / 1e9:.2f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[256, 1000, 2000])
    parser.add_argument("--prefix", type=int, default=131_072, help="tokens of the long prompts")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--has_states", action="store_true", help="of a model with recurrent layers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print_steps(args.running, args.steps, args.has_states)
    print_admissions(args.running, args.steps)
    print_long_prefix(args.prefix, 12)
    print_blocked(args.prefix, args.running[0], args.steps)
    print_memory(args.prefix)


if __name__ == "__main__":
    main()
