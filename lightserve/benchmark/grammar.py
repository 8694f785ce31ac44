"""What grammars cost: tokens a second with none, half and all of a batch constrained to JSON.

python -m lightserve.benchmark.grammar [--model_dir DIR] [--device cpu] [--batch 32] [--tokens 64] [--layers 1]

The weights are random and few, under the vocabulary of --model_dir, so that little but choosing tokens is measured: a
model of a useful size hides more of it, and an accelerator computes the next step beside the masks. Free requests draw
by temperature, inside the step; "special" ones add a logit bias of 0, which takes them the way of constrained ones.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lightserve.errors import ServerError
from lightserve.grammar import schema_grammar
from lightserve.io_struct import SamplingParams
from lightserve.llm import LLM
from lightserve.model_files.source import resolve
from lightserve.model_files.tokenizer import load_tokenizer

PROMPT_LEN = 16
REPEATS = 5
KINDS = {"none": 0.0, "special": 0.0, "half": 0.5, "all": 1.0}  # the share of a batch that is constrained
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


def save_model(folder: Path, model_dir: str | None, layers: int) -> None:
    """A model of random weights with a real tokenizer."""
    source = resolve(model_dir, needs_weights=False)
    tokenizer = load_tokenizer(source)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": source.hf_config()["vocab_size"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": list(source.eos_token_ids()),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer.eos_token}))


def batch_of(kind: str, args: argparse.Namespace) -> list[SamplingParams]:
    share = KINDS[kind]
    bias = {0: 0.0} if kind == "special" else {}
    batch = []
    for i in range(args.batch):
        options: dict[str, Any] = (
            {"grammar": schema_grammar(ENDLESS)} if i < share * args.batch else {"logit_bias": bias}
        )
        batch.append(SamplingParams(max_new_tokens=args.tokens, ignore_eos=True, seed=i, **options))
    return batch


def steps_of(llm: LLM, batch: list[SamplingParams]) -> list[float]:
    """Seconds of each step in which all decode, by the tokens of the last request to begin."""
    prompts = [[100 + i] * PROMPT_LEN for i in range(len(batch))]
    times = []
    for out in llm.stream(prompts, batch):
        if out.error is not None:
            raise ServerError(out.error)
        if out.index == len(batch) - 1:
            times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir")
    parser.add_argument("--device")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.model_dir, args.layers)
        llm = LLM(folder, device=args.device, load_format="dummy", max_total_token_num=args.batch * 4 * args.tokens)
        steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(REPEATS):  # in turn, so that what else the machine does falls on all alike
            for kind in KINDS:
                steps[kind] += steps_of(llm, batch_of(kind, args))
    print(f"{args.batch} requests; the fastest tenth of {len(steps['none'])} steps\n")
    print("| constrained | tokens/s | ms a step | of free |\n|---|--:|--:|--:|")
    best = {kind: float(np.quantile(seconds, 0.1)) for kind, seconds in steps.items()}
    for kind, seconds in best.items():
        print(f"| {kind} | {args.batch / seconds:,.0f} | {1e3 * seconds:.2f} | {best['none'] / seconds:.0%} |")


if __name__ == "__main__":
    main()
