"""Tokens a second of the offline LLM beside transformers, on the same prompts in the same run.

python -m lightserve.benchmark.offline [--model_dir DIR] [--batches 1 8 32] [--threads 2] [--no_transformers]

Prefill is the time to the first token of every prompt; decode is what follows, tokens of all prompts together. Both are
the best of the repeats, ours and theirs in turn: what the machine does when nobody disturbs it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightserve.io_struct import GenerationParams
from lightserve.llm import LLM
from lightserve.model_files.source import resolve
from lightserve.tools.oracle import load_transformers

Run = Callable[[list[list[int]], int], float]  # prompts and number of new tokens -> seconds


@dataclass(frozen=True, slots=True)
class Speed:
    prefill: float  # tokens a second
    decode: float

    @property
    def step_ms(self) -> float:
        return 1000 / self.decode


def our_run(llm: LLM) -> Run:
    def run(prompts: list[list[int]], new_tokens: int) -> float:
        params = GenerationParams.of(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - begin

    return run


def transformers_run(model: Any) -> Run:
    def run(prompts: list[list[int]], new_tokens: int) -> float:
        ids = torch.tensor(prompts)
        options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        return time.perf_counter() - begin

    return run


def measure(runs: dict[str, Run], batch: int, args: argparse.Namespace) -> dict[str, Speed]:
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(1000, 40000, (batch, args.prompt_len), generator=generator).tolist()
    first: dict[str, list[float]] = {name: [] for name in runs}
    whole: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(args.repeats + 1):
        for name, run in runs.items():
            seconds = run(prompts, 1), run(prompts, args.new_tokens)
            if repeat:  # the first one warms up
                first[name].append(seconds[0])
                whole[name].append(seconds[1])
    speeds = {}
    for name in runs:
        prefill = min(first[name])
        decode = min(whole[name]) - prefill
        speeds[name] = Speed(batch * args.prompt_len / prefill, batch * (args.new_tokens - 1) / decode)
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lightserve.benchmark.offline", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model_dir")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt_len", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no_transformers", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    runs = {"lightserve": our_run(LLM(args.model_dir, device="cpu", data_type="float32"))}
    if not args.no_transformers:
        runs["transformers"] = transformers_run(load_transformers(resolve(args.model_dir)))
    print(f"float32, {args.threads} threads, {args.prompt_len}-token prompts, {args.new_tokens} new tokens")
    print(f"{'batch':>5} {'':12} {'prefill tok/s':>14} {'decode tok/s':>13} {'ms a step':>10}")
    for batch in args.batches:
        speeds = measure(runs, batch, args)
        for name, speed in speeds.items():
            print(
                f"{batch:5} {name:12} {speed.prefill:14.0f} {speed.decode:13.1f} {batch * speed.step_ms:10.1f}",
                flush=True,
            )
        if len(speeds) == 2:
            ours, theirs = speeds.values()
            print(f"{batch:5} {'ratio':12} {ours.prefill / theirs.prefill:14.2f} {ours.decode / theirs.decode:13.2f}")


if __name__ == "__main__":
    main()
