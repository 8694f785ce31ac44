"""Write LoRA adapters with random weights for a model, and requests that use them in turn, for a load test.

    python -m benchmark.make_adapters --model_dir DIR --out ADAPTERS --count 8 --rank 16 --requests 256

ADAPTERS then has the folders a0, a1, ... in PEFT's format, for --lora_dir or --lora_modules, and with --requests the
file requests.jsonl for ``lightserve bench --dataset jsonl``. The weights are small, so that text stays text.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from lightserve.bench.client.dataset import WORDS
from lightserve.common.basemodel import ModelArgs
from lightserve.common.parallel import Parallel
from lightserve.model_files.lora.adapter import LinearSize
from lightserve.model_files.source import resolve
from lightserve.models.registry import get_model_class, read_model_config

STRENGTH = 0.01  # of B, whose usual start is 0


def target_sizes(model_dir: str | None) -> dict[str, LinearSize]:
    """The linears of a model that take adapters."""
    config = read_model_config(resolve(model_dir, needs_weights=False).hf_config(), None)
    args = ModelArgs(
        config=config,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        parallel=Parallel(),
        checkpoint=None,
        max_total_token_num=1,
        max_reqs=1,
        max_req_total_len=1,
    )
    return get_model_class(config.model_type).adapter_sizes(args)


def write_adapter(folder: Path, sizes: Mapping[str, LinearSize], rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in sizes.items():
        a = torch.randn(rank, size.in_size, generator=generator) * size.in_size**-0.5
        b = torch.randn(size.out_size, rank, generator=generator) * STRENGTH
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.bfloat16()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in sizes}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def write_requests(file: Path, adapters: list[str], count: int, input_len: int, output_len: int) -> None:
    """Prompts of random words, each about one token."""
    words = random.Random(0)
    lines = (
        {
            "model": adapters[number % len(adapters)],
            "prompt": " ".join(words.choices(WORDS, k=input_len)),
            "max_tokens": output_len,
            "ignore_eos": True,
        }
        for number in range(count)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", help="the base model; only its config.json is read")
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapters")
    parser.add_argument("--count", type=int, default=8, help="of adapters; default: 8")
    parser.add_argument("--rank", type=int, default=16, help="default: 16")
    parser.add_argument("--requests", type=int, default=0, help="lines of requests.jsonl; default: no file")
    parser.add_argument("--input_len", type=int, default=512, help="words of a prompt; default: 512")
    parser.add_argument("--output_len", type=int, default=128, help="tokens of a response; default: 128")
    args = parser.parse_args(argv)
    sizes = target_sizes(args.model_dir)
    names = [f"a{number}" for number in range(args.count)]
    for number, name in enumerate(names):
        write_adapter(args.out / name, sizes, args.rank, seed=number)
    if args.requests:
        write_requests(args.out / "requests.jsonl", names, args.requests, args.input_len, args.output_len)
    numbers = sum(args.rank * (size.in_size + size.out_size) for size in sizes.values())
    print(f"{args.count} adapters of {numbers / 1e6:.1f} million weights in {args.out}")


if __name__ == "__main__":
    main()
