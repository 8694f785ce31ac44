"""Time of prefill and decode steps of a model without the server, and what the device could reach at best.

    python -m benchmark.engine.static --model_dir DIR --load_format dummy
    python -m benchmark.engine.static --decode 1x1150 1x100000 --prefill 128 512+8000 64x1024
    python -m benchmark.engine.static --profile

A load is [BATCHx]TOKENS, for prefill with +CACHED tokens before them. The worker runs the steps that the router would
send, with as many in flight; nothing is in the prefix cache but the CACHED tokens, whose KV is noise. Times are medians
from the tokens of one step to those of the next, and of a whole prefill. --profile shows where a GPU spends a step.
"""

from __future__ import annotations

import argparse
import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from benchmark.engine.step_profile import profile_steps
from lightserve.bench.ceilings import Ceilings, measure_ceilings
from lightserve.bench.model_cost import ModelCost, Work
from lightserve.common.device import pick_device
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.config.parse import Parser, add_flags, config_from_args
from lightserve.errors import ServerError
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow
from lightserve.model_files.source import resolve
from lightserve.worker.rpc import GetResult
from lightserve.worker.warm_up import in_all_pools
from lightserve.worker.worker import ModelWorker

WHAT = [(__doc__ or "").split("\n\n")[part] for part in (0, 2)]  # without the commands
DECODES = ("1x1150", "8x1150", "64x1150", "256x1150")
PREFILLS = ("128", "512", "2048", "8000", "512+8000")
PROFILED_DECODES = ("1x1150", "256x1150")
PROFILED_PREFILLS = ("128", "8000")
KV_STD = 0.5  # the cache is filled with noise: memory that was never written may hold NaN
NOISE_TOKENS = 1 << 16
WARM_STEPS = 4  # not counted: whatever a batch needs once


@dataclass(frozen=True, slots=True)
class Times:
    """Medians of many steps."""

    step_s: float  # from the tokens of one step to those of the next
    launch_s: float  # of it, until the worker has launched the step


def _fill_with_noise(memory: MemoryManager) -> None:
    for buffer in itertools.chain.from_iterable(group.unbind() for group in memory.buffers):
        if buffer.dtype == torch.int8:
            buffer.random_(-127, 128)
        else:
            for start in range(0, len(buffer), NOISE_TOKENS):  # all at once would need as much memory again
                part = buffer[start : start + NOISE_TOKENS]
                part.copy_(torch.randn(part.shape, device=part.device) * KV_STD)
    for scales in memory.scale_buffers.values():
        scales.fill_(KV_STD / 64)


class StaticBench:
    """Drives a worker with made-up requests, whose slots are plain ranges."""

    def __init__(self, worker: ModelWorker, batch_max_tokens: int | None, adapters: int = 0) -> None:
        """``adapters``: the requests use so many LoRA adapters in turn, all with weights of 0."""
        self.worker = worker
        self._adapters = adapters
        self.cost = ModelCost.of(worker.model)
        self._batch_max_tokens = batch_max_tokens or worker.step_limits.batch_max_tokens
        self._seeds = itertools.count()
        _fill_with_noise(worker.model.mem_manager)

    def why_not(self, work: Work, steps: int = 0) -> str | None:
        """Why a load cannot run here; None: it can."""
        length = work.cached + work.new + steps
        if self.worker.model.mem_manager.group_sizes:
            return "not for models with KV groups, such as those with sliding windows"
        if work.batch > self.worker.model.req_manager.max_reqs:
            return f"more than running_max_req_size={self.worker.model.req_manager.max_reqs} requests"
        if length > self.worker.max_req_total_len:
            return f"longer than max_req_total_len={self.worker.max_req_total_len}"
        if work.batch * length > self.worker.max_total_token_num:
            return f"more than the {self.worker.max_total_token_num} tokens of the KV pool"
        return None

    def prefill(self, work: Work, repeats: int) -> Times:
        """From the first chunk's launch to the tokens, nothing else in flight."""
        totals, launches = [], []
        for steps in [list(self.prefill_steps(work)) for _ in range(repeats + 1)]:
            begin = time.perf_counter()
            _, launched = self.run(steps)
            totals.append(time.perf_counter() - begin)
            launches.append(sum(launched))
        return Times(median(totals[1:]), median(launches[1:]))

    def decode(self, work: Work, steps: int) -> Times:
        finished, launched = self.run(list(self.decode_steps(work, steps + WARM_STEPS)))
        gaps = [after - before for before, after in itertools.pairwise(finished)]
        return Times(median(gaps[WARM_STEPS:-1]), median(launched[WARM_STEPS:-1]))  # the last one computes nothing

    def run(self, steps: Iterable[Step]) -> tuple[list[float], list[float]]:
        """When the tokens of each step were there, and how long its launch took."""
        in_flight: deque[GetResult] = deque()
        finished, launched = [], []
        for step in steps:
            begin = time.perf_counter()
            in_flight.append(self.worker.launch(self._with_states(step)))
            launched.append(time.perf_counter() - begin)
            if len(in_flight) >= self.worker.pipeline_depth:
                in_flight.popleft()()
                finished.append(time.perf_counter())
        for collect in in_flight:
            collect()
            finished.append(time.perf_counter())
        return finished, launched

    def _with_states(self, step: Step) -> Step:
        memory = self.worker.model.mem_manager
        return in_all_pools(step, 0, has_states=True) if memory.state_rows else step

    def prefill_steps(self, work: Work) -> Iterator[Step]:
        """In steps of ``batch_max_tokens``, each request's tokens behind its cached ones; then the requests leave."""
        reqs = self._requests(work)
        first = work.batch * work.cached
        slots = [list(range(first + i * work.new, first + (i + 1) * work.new)) for i in range(work.batch)]
        rows = deque(StepRow(req.req_id, own) for req, own in zip(reqs, slots, strict=True))
        yield Step(self._next_rows(rows), reqs)
        while rows:
            yield Step(self._next_rows(rows))
        yield Step([], free=[req.req_id for req in reqs])

    def _next_rows(self, rows: deque[StepRow]) -> list[StepRow]:
        taken, room = [], self._batch_max_tokens
        while rows and room > 0:
            row = rows.popleft()
            taken.append(StepRow(row.req_id, row.slots[:room]))
            if len(row.slots) > room:
                rows.appendleft(StepRow(row.req_id, row.slots[room:]))
            room -= len(taken[-1].slots)
        return taken

    def decode_steps(self, work: Work, count: int) -> Iterator[Step]:
        """All requests at once, a token each; the slots of a step are neighbours."""
        reqs = self._requests(work)
        first = work.batch * work.cached
        for number in range(count):
            begin = first + number * work.batch
            rows = [StepRow(req.req_id, [begin + i]) for i, req in enumerate(reqs)]
            yield Step(rows, reqs if number == 0 else [])
        yield Step([], free=[req.req_id for req in reqs])

    def _requests(self, work: Work) -> list[NewReq]:
        generator = torch.Generator().manual_seed(next(self._seeds))
        length, sampling = work.cached + work.new, SamplingParams(temperature=0.0)
        ids = torch.randint(self.worker.model_config.vocab_size, (work.batch, length), generator=generator).tolist()
        return [
            NewReq(
                -1 - number,
                prompt,
                sampling,
                seed=0,
                cached_slots=list(range(number * work.cached, (number + 1) * work.cached)),
                lora_slot=number % self._adapters if self._adapters else -1,
            )
            for number, prompt in enumerate(ids)
        ]


def parse_load(text: str) -> tuple[int, int, int]:
    """Batch, tokens and cached tokens of [BATCHx]TOKENS[+CACHED]."""
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)(?:\+(\d+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not [BATCHx]TOKENS[+CACHED], such as 8x1150")
    batch, tokens, cached = found.groups()
    return int(batch or 1), int(tokens), int(cached or 0)


def decode_work(text: str) -> Work:
    """Of a load whose requests have so many tokens already."""
    batch, tokens, cached = parse_load(text)
    return Work(batch, 1, tokens + cached)


def prefill_work(text: str) -> Work:
    return Work(*parse_load(text))


def print_decodes(bench: StaticBench, ceilings: Ceilings, works: Iterable[Work], steps: int) -> None:
    print(
        f"{'decode: batch x context':>24} {'ms/step':>10} {'floor ms':>9} {'of it':>6} {'launch ms':>10} {'tok/s':>9}"
    )
    for work in works:
        name = f"{work.batch}x{work.cached}"
        if reason := bench.why_not(work, steps + WARM_STEPS):
            print(f"{name:>24} {reason}")
            continue
        times = bench.decode(work, steps)
        middle = replace(work, cached=work.cached + WARM_STEPS + steps // 2)
        print(_row(name, times, bench.cost.floor_s(middle, ceilings), work.batch), flush=True)


def print_prefills(bench: StaticBench, ceilings: Ceilings, works: Iterable[Work], repeats: int) -> None:
    print(f"{'prefill: new behind old':>24} {'ms':>10} {'floor ms':>9} {'of it':>6} {'launch ms':>10} {'tok/s':>9}")
    for work in works:
        name = f"{work.batch}x{work.new}+{work.cached}"
        if reason := bench.why_not(work):
            print(f"{name:>24} {reason}")
            continue
        times = bench.prefill(work, repeats)
        print(_row(name, times, bench.cost.floor_s(work, ceilings), work.tokens), flush=True)


def _row(name: str, times: Times, floor_s: float, tokens: int) -> str:
    ratio = times.step_s / floor_s
    return (
        f"{name:>24} {times.step_s * 1e3:10.3f} {floor_s * 1e3:9.3f} {ratio:5.2f}x "
        f"{times.launch_s * 1e3:10.3f} {tokens / times.step_s:9.0f}"
    )


def print_profiles(bench: StaticBench, args: argparse.Namespace) -> None:
    for work in args.decode:
        run = partial(bench.decode, work, args.steps)
        name = f"decode, batch {work.batch}, {work.cached} tokens each"
        _print_profile(name, bench.why_not(work, args.steps + WARM_STEPS), run, args.steps + WARM_STEPS)
    for work in args.prefill:
        run = partial(bench.prefill, work, args.repeats)
        _print_profile(f"prefill, {work.new} tokens", bench.why_not(work), run, args.repeats + 1)


def _print_profile(name: str, why_not: str | None, run: Callable[[], Times], steps: int) -> None:
    print(f"\n{name}\n{why_not or profile_steps(lambda: run().step_s, steps)}", flush=True)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, WorkerConfig]:
    parser = Parser(prog="python -m benchmark.engine.static", description=" ".join(WHAT))
    add_flags(parser.add_argument_group("worker", WorkerConfig.__doc__), WorkerConfig)
    parser.add_argument("--decode", nargs="*", type=decode_work)
    parser.add_argument("--prefill", nargs="*", type=prefill_work)
    parser.add_argument("--steps", type=int, default=40, help="decode steps measured")
    parser.add_argument("--repeats", type=int, default=7, help="times that a prompt is computed")
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters that requests use in turn")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes, instead of the tables")
    args = parser.parse(argv)
    decodes, prefills = (PROFILED_DECODES, PROFILED_PREFILLS) if args.profile else (DECODES, PREFILLS)
    args.decode = list(map(decode_work, decodes)) if args.decode is None else args.decode
    args.prefill = list(map(prefill_work, prefills)) if args.prefill is None else args.prefill
    return args, config_from_args(WorkerConfig, args)


def main(argv: list[str] | None = None) -> None:
    args, config = parse(argv)
    kind = pick_device(config.device)
    if args.profile and kind.name == "cpu":
        raise ServerError("--profile needs a GPU")
    device = kind.torch_device(0)
    ceilings = measure_ceilings(device, kind.dtypes[0])
    if config.max_windowed_token_num:
        raise ServerError("this benchmark uses one KV pool for all layers; leave out --max_windowed_token_num")
    config = replace(config, max_windowed_token_num=0)
    worker = ModelWorker(config, resolve(config.model_dir, needs_weights=config.load_format == "auto"), Parallel())
    worker.warm_up()
    if args.adapters > config.num_loras:
        raise ServerError(f"--adapters {args.adapters} needs --max_loras {args.adapters}")
    bench = StaticBench(worker, config.batch_max_tokens, args.adapters)
    print(f"{worker.model_config.model_type} {worker.dtype_and_device}; {ceilings}")
    if args.profile:
        print_profiles(bench, args)
        return
    print_decodes(bench, ceilings, args.decode, args.steps)
    print_prefills(bench, ceilings, args.prefill, args.repeats)


if __name__ == "__main__":
    main()
