"""Cost of grammars: tokens per second if none, half or all of a batch is constrained to JSON.

    python -m benchmark.engine.grammar [--model_dir DIR] [--device cpu] [--batch 32] [--tokens 64] [--large]

Two models have the vocabulary of --model_dir: "tiny" has one small layer of random weights, "null" has no forward pass
and the same logits at every step. So most of the time is sampling. A model of a useful size hides more of it, and an
accelerator computes the next step while the host computes masks: --large adds a model with Llama-3-8B's shape, for a
GPU. Only steps in which all requests decode count, the best of several runs. "special" requests are free and have a
logit bias of 0, which the captured step does not support. "one by one" requests are all constrained, and every forced
token has a step of its own. The CPU time of all threads is printed too, for a machine that is busy otherwise.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmark.models import LARGE, TINY, save_model
from lightserve.common.device import H200_GRAPHS
from lightserve.errors import ServerError
from lightserve.messages.params import GenerationParams
from lightserve.messages.step import Step
from lightserve.offline.llm import LLM
from lightserve.text.grammar.specs import schema_grammar
from lightserve.worker.captured_shapes import graph_shapes
from lightserve.worker.rpc import GetResult
from lightserve.worker.sampling.grammar import ReqGrammar

PROMPT_LEN = 16
REPEATS = 5
KINDS = {"none": 0.0, "special": 0.0, "half": 0.5, "all": 1.0, "one by one": 1.0}  # the share that is constrained
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": PERSON, "minItems": 100_000}


@contextmanager
def open_model(args: argparse.Namespace, shape: dict[str, int]) -> Iterator[LLM]:
    """Its files are there as long as it is open: its grammars read the tokenizer late."""
    pool = args.batch * 4 * args.tokens
    options = {"load_format": "dummy", "max_total_token_num": pool, "running_max_req_size": args.batch}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.model_dir, shape)
        yield LLM(folder, device=args.device, **options)


def remove_forward_pass(llm: LLM) -> None:
    """Replace it by one that returns the same logits at every step."""
    model = llm.worker.model
    rows = max(shape.requests for shape in graph_shapes(model.req_manager.max_reqs, H200_GRAPHS))
    logits = torch.randn(rows, model.config.vocab_size, generator=torch.Generator().manual_seed(0))
    logits = logits.to(model.device, model.args.dtype)
    model.hidden_states = lambda step: step  # type: ignore
    model.local_logits = lambda step, rows=None: logits[: len(step.attn.b_req_idx)]  # type: ignore
    llm.worker.capture()


def batch_of(kind: str, args: argparse.Namespace) -> list[GenerationParams]:
    share = KINDS[kind]
    bias = {0: 0.0} if kind == "special" else {}
    batch = []
    for i in range(args.batch):
        options: dict[str, Any] = (
            {"grammar": schema_grammar(ENDLESS)} if i < share * args.batch else {"logit_bias": bias}
        )
        options |= {"temperature": args.temperature, "max_new_tokens": args.tokens}
        batch.append(GenerationParams.of(ignore_eos=True, seed=i, **options))
    return batch


class Rate(NamedTuple):
    """Of the steps of a run in which all requests decode."""

    tokens: int
    steps: int
    wall_s: float
    cpu_s: float  # of all threads

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def run(llm: LLM, batch: list[GenerationParams]) -> Rate:
    """Complete prompts, each of which begins otherwise."""
    prompts = [[100 + i] * PROMPT_LEN for i in range(len(batch))]
    begun: list[tuple[float, float, Step]] = []  # wall clock, processor time
    launch = llm.worker.launch

    def timed(step: Step) -> GetResult:
        begun.append((time.perf_counter(), time.process_time(), step))
        return launch(step)

    with patch.object(llm.worker, "launch", timed):
        for out in llm.generate(prompts, batch):
            if out.error is not None:
                raise ServerError(out.error)
    full = [
        (sum(len(row.slots) for row in step.rows), after_s - begin_s, after_cpu - begin_cpu)
        for (begin_s, begin_cpu, step), (after_s, after_cpu, _) in pairwise(begun)
        if len(step.rows) == len(batch) and not step.new
    ]
    tokens, wall_s, cpu_s = (sum(column) for column in zip(*full, strict=True))
    return Rate(int(tokens), len(full), wall_s, cpu_s)


def measure(llm: LLM, args: argparse.Namespace) -> dict[str, Rate]:
    """The best of several runs of each kind of batch."""
    runs: dict[str, list[Rate]] = {kind: [] for kind in KINDS}
    for _ in range(REPEATS):  # in turn, so that what else the machine does falls on all alike
        for kind in KINDS:
            with patch.object(ReqGrammar, "forced", return_value=[]) if kind == "one by one" else nullcontext():
                runs[kind].append(run(llm, batch_of(kind, args)))
    return {kind: max(rates, key=lambda rate: rate.tokens_per_s) for kind, rates in runs.items()}


def measure_models(args: argparse.Namespace) -> dict[str, dict[str, Rate]]:
    with open_model(args, TINY | {"num_hidden_layers": args.layers}) as llm:
        rates = {"tiny": measure(llm, args)}
        remove_forward_pass(llm)
        rates["null"] = measure(llm, args)
    if args.large:
        with open_model(args, LARGE) as llm:
            rates["large"] = measure(llm, args)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir")
    parser.add_argument("--device")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--large", action="store_true", help="a model of the shape of Llama-3-8B too")
    args = parser.parse_args()
    rates = measure_models(args)
    print(f"{args.batch} requests, best of {REPEATS} runs\n")
    print("| model | constrained | tokens/s | of free | ms per step | CPU ms per step | tokens per step |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for model, by_kind in rates.items():
        for kind, rate in by_kind.items():
            share = rate.tokens_per_s / by_kind["none"].tokens_per_s
            wall_ms, cpu_ms = 1e3 * rate.wall_s / rate.steps, 1e3 * rate.cpu_s / rate.steps
            row = f"| {model} | {kind} | {rate.tokens_per_s:,.0f} | {share:.0%} | {wall_ms:.2f} | {cpu_ms:.2f} |"
            print(f"{row} {rate.tokens / rate.steps:.1f} |")


if __name__ == "__main__":
    main()
