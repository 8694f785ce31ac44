"""Tokens a second of the offline LLM and of transformers or llama.cpp on the same prompts, on this machine's CPU.

    python -m lightserve.bench.offline [--model_dir DIR] [--batches 1 8 32] [--threads 2]
    python -m lightserve.bench.offline --peer llama_cpp        # with llama-cpp-python installed, batch 1

Beside transformers both compute in --data_type, beside llama.cpp both with the packed weights of the GGUF file.

Prefill: the prompts' tokens divided by the time until every prompt has its first token. Decode: the tokens after the
first of all prompts, divided by the time that they take: a run with them less a run of one token. Every run has fresh
random prompts, so that neither engine finds one in a cache. Both figures are the best of the repeats, the engines in
turn: what the machine does undisturbed. GFLOP/s are those of the matmuls of the layers in prefill; no figure can be
above what the CPU's matmuls reach.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightserve.bench.model_cost import ModelCost
from lightserve.model_files.source import resolve
from lightserve.offline.llm import LLM
from lightserve.tools.oracle import load_transformers

Prompts = list[list[int]]
Run = Callable[[Prompts, int], float]  # prompts and number of new tokens -> seconds

FIRST_ID, END_ID = 1000, 40_000  # of random tokens


@dataclass(frozen=True, slots=True)
class Load:
    batch: int
    prompt_len: int
    new_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Speed:
    prefill: float  # tokens per second
    decode: float

    @property
    def ms_per_token(self) -> float:
        return 1000 / self.decode


def our_run(llm: LLM) -> Run:
    def run(prompts: Prompts, new_tokens: int) -> float:
        begin = time.perf_counter()
        llm.generate(prompts, max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        return time.perf_counter() - begin

    return run


def transformers_run(model: Any) -> Run:
    def run(prompts: Prompts, new_tokens: int) -> float:
        ids = torch.tensor(prompts)
        options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        return time.perf_counter() - begin

    return run


def llama_cpp_run(path: str, threads: int, context: int) -> Run:
    from llama_cpp import Llama  # its build takes minutes: not a dependency

    model = Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(prompts: Prompts, new_tokens: int) -> float:
        (prompt,) = prompts
        model.reset()  # or it would reuse a prefix
        begin = time.perf_counter()
        model.eval(prompt)
        for _ in range(new_tokens - 1):
            model.eval([model.sample(temp=0.0)])
        model.sample(temp=0.0)
        return time.perf_counter() - begin

    return run


def measure(runs: dict[str, Run], load: Load) -> dict[str, Speed]:
    generator = torch.Generator().manual_seed(load.batch)

    def fresh_prompts() -> Prompts:
        prompts: Prompts = torch.randint(FIRST_ID, END_ID, (load.batch, load.prompt_len), generator=generator).tolist()
        return prompts

    first: dict[str, list[float]] = {name: [] for name in runs}
    whole: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(load.repeats + 1):
        short, long = fresh_prompts(), fresh_prompts()
        for name, run in runs.items():
            seconds = run(short, 1), run(long, load.new_tokens)
            if repeat:  # the first one warms up
                first[name].append(seconds[0])
                whole[name].append(seconds[1])
    return {name: _speed(min(first[name]), min(whole[name]), load) for name in runs}


def _speed(first_s: float, whole_s: float, load: Load) -> Speed:
    decoded = load.batch * (load.new_tokens - 1)
    return Speed(load.batch * load.prompt_len / first_s, decoded / (whole_s - first_s))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt_len", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data_type", choices=("float32", "bfloat16"), default="float32", help="of float weights")
    parser.add_argument("--peer", choices=("transformers", "llama_cpp", "none"), default="transformers")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    is_packed = args.peer == "llama_cpp"
    llm = LLM(args.model_dir, device="cpu", data_type=args.data_type, quantization="gguf" if is_packed else "none")
    gflops_per_token = 2e-9 * ModelCost.of(llm.worker.model).layer_params
    runs = {"lightserve": our_run(llm)}
    if args.peer == "transformers":
        model = load_transformers(resolve(args.model_dir))
        runs["transformers"] = transformers_run(model.to(getattr(torch, args.data_type)))
    elif is_packed:
        args.batches = [1]
        path = str(resolve(args.model_dir).path)
        runs["llama.cpp"] = llama_cpp_run(path, args.threads, args.prompt_len + args.new_tokens)
    weights = "packed weights" if is_packed else args.data_type
    print(f"{weights}, {args.threads} threads, {args.prompt_len}-token prompts, {args.new_tokens} new tokens")
    print(f"{'batch':>5} {'':12} {'prefill tok/s':>14} {'GFLOP/s':>8} {'decode tok/s':>13} {'ms/step':>10}")
    for batch in args.batches:
        speeds = measure(runs, Load(batch, args.prompt_len, args.new_tokens, args.repeats))
        for name, speed in speeds.items():
            print(
                f"{batch:5} {name:12} {speed.prefill:14.0f} {speed.prefill * gflops_per_token:8.0f} "
                f"{speed.decode:13.1f} {batch * speed.ms_per_token:10.1f}",
                flush=True,
            )
        if len(speeds) == 2:
            ours, theirs = speeds.values()
            ratios = f"{ours.prefill / theirs.prefill:14.2f} {'':8} {ours.decode / theirs.decode:13.2f}"
            print(f"{batch:5} {'ratio':12} {ratios}")


if __name__ == "__main__":
    main()
