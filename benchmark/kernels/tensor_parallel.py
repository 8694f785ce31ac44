"""Tokens and speed of tensor-parallel ranks beside one rank, and what the ranks send each other.

    python -m benchmark.kernels.tensor_parallel --tp 3       # the default model, which has 9 heads, on this CPU
    python -m benchmark.kernels.tensor_parallel --model_dir DIR --tp 2 --device cuda      # two GPUs, NCCL
    python -m benchmark.kernels.tensor_parallel --model_dir DIR --tp 2 --device cuda --one_gpu   # gloo
    python -m benchmark.kernels.tensor_parallel --model_dir DIR --tp 2 --device cuda --custom_all_reduce

Every run computes the same random prompts and then generates greedily. Ranks sum in another order than one rank, so in
bfloat16 a text may take another turn; in float32 it rarely does. --one_gpu shows that the tokens are right on a machine
with one GPU, not how fast ranks are: gloo copies through the host, and no step is captured. --custom_all_reduce: ranks
read few rows from each other's memory, as a server's ranks do if they can.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lightserve.common.device import pick_device
from lightserve.common.parallel import ParallelSizes, connect_ranks
from lightserve.common.parallel.custom_all_reduce import ON_ONE_GPU
from lightserve.config import WorkerConfig
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow
from lightserve.model_files.source import resolve
from lightserve.worker.worker import ModelWorker

SEED = 7


@dataclass(frozen=True, slots=True)
class Work:
    batch: int
    prompt_len: int
    new_tokens: int

    @property
    def tokens(self) -> int:
        """Slots of the KV pool."""
        return self.batch * (self.prompt_len + self.new_tokens)


@dataclass(frozen=True, slots=True)
class Ran:
    token_ids: list[list[int]]  # of each request
    step_s: float  # a decode step
    sent: int  # bytes that a rank gives to collectives in a decode step; 0 if its steps are captured


def run_work(worker: ModelWorker, work: Work) -> Ran:
    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(worker.model_config.vocab_size, (work.batch, work.prompt_len), generator=generator).tolist()
    sampling = SamplingParams(temperature=0.0)
    reqs = [NewReq(number, prompt, sampling, seed=0) for number, prompt in enumerate(prompts)]
    slots = iter(range(work.tokens))
    token_ids: list[list[int]] = [[] for _ in reqs]
    times, traffic = [], worker.model.tp.traffic
    sent = 0
    for number in range(work.new_tokens):
        count = 1 if number else work.prompt_len
        rows = [StepRow(req.req_id, [next(slots) for _ in range(count)]) for req in reqs]
        begin, before = time.perf_counter(), traffic.bytes
        result = worker.run(Step(rows, [] if number else reqs))
        times.append(time.perf_counter() - begin)
        sent = traffic.bytes - before
        for out in result.tokens:
            token_ids[out.req_id].append(out.token.id)
    worker.run(Step([], free=[req.req_id for req in reqs]))
    return Ran(token_ids, median(times[1:]), sent)


@dataclass(frozen=True, slots=True)
class Plan:
    works: list[Work]
    comm: str  # the library of collectives
    one_gpu: bool
    custom_all_reduce: bool


def run_rank(rank: int, config: WorkerConfig, plan: Plan, store: str, to: Any) -> None:
    torch.set_num_threads(1)
    device_index = 0 if plan.one_gpu else rank
    if plan.one_gpu:
        os.environ[ON_ONE_GPU] = "1"
    gpu = torch.device("cuda", device_index) if plan.custom_all_reduce else None
    parallel = connect_ranks(rank, ParallelSizes(tp=config.tp), f"file://{store}", plan.comm, custom_all_reduce_gpu=gpu)
    source = resolve(config.model_dir, needs_weights=config.load_format == "auto")
    worker = ModelWorker(config, source, parallel, device_index=device_index)
    if plan.comm != "gloo" or config.tp == 1:
        worker.capture()
    ran = [run_work(worker, work) for work in plan.works]
    if rank == 0:
        to.put(ran)
    if config.tp > 1:
        torch.distributed.destroy_process_group()


def run_ranks(config: WorkerConfig, plan: Plan) -> list[Ran]:
    context = get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (config, plan, str(Path(folder, "store")), results)
        ranks = [context.Process(target=run_rank, args=(rank, *args)) for rank in range(config.tp)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed: see above")
    ran: list[Ran] = results.get()
    return ran


def common_share(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of the tokens before the texts first differ."""
    same = 0
    for one, other in zip(ours, theirs, strict=True):
        differs = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
        same += differs[0] if differs else len(one)
    return same / sum(map(len, ours))


def work_of(text: str) -> Work:
    batch, prompt_len, new_tokens = map(int, text.split("x"))
    return Work(batch, prompt_len, new_tokens)


def arguments() -> argparse.ArgumentParser:
    doc = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmark.kernels.tensor_parallel", description=doc)
    add = parser.add_argument
    add("--model_dir", help="default: the default model")
    add("--tp", type=int, default=3)
    add("--device", default="cpu")
    add("--data_type", default="auto")
    add("--load_format", choices=["auto", "dummy"], default="auto", help="dummy weights differ between ranks")
    add("--one_gpu", action="store_true", help="all ranks on the first GPU, over gloo")
    add("--custom_all_reduce", action="store_true", help="sums of few rows by reading the memory of other ranks")
    add("--works", type=work_of, nargs="+", default=[Work(1, 64, 32), Work(8, 64, 32)], help="BATCHxPROMPTxNEW each")
    return parser


def main() -> None:
    args = arguments().parse_args()
    works: list[Work] = args.works
    comm = "gloo" if args.one_gpu else pick_device(args.device).comm_backend
    plan = Plan(works, comm, args.one_gpu, args.custom_all_reduce)
    runs = {}
    for tp in (1, args.tp):
        config = WorkerConfig(
            model_dir=args.model_dir,
            device=args.device,
            data_type=args.data_type,
            load_format=args.load_format,
            quantization="none",
            tp=tp,
            max_total_token_num=max(work.tokens for work in works) + 1,
            max_req_total_len=max(work.prompt_len + work.new_tokens for work in works),
            running_max_req_size=max(work.batch for work in works),
        )
        runs[tp] = run_ranks(config, plan)
    print(f"{'batch x prompt + new':>22}  tp  ms/step  tokens/s  KB sent a step  same tokens")
    for number, work in enumerate(works):
        name = f"{work.batch} x {work.prompt_len} + {work.new_tokens}"
        for tp, ran in runs.items():
            one = ran[number]
            same = common_share(one.token_ids, runs[1][number].token_ids)
            speed = work.batch / one.step_s
            print(f"{name:>22}  {tp:2}  {one.step_s * 1e3:7.2f}  {speed:8,.0f}  {one.sent / 1e3:14,.1f}  {same:11.0%}")


if __name__ == "__main__":
    main()
