"""Whether a contiguous KV cache would pay for few long requests: how near decode attention is to the device's limit.

    python -m benchmark.kernels.static_kv [--requests 1 2 4 8] [--contexts 4096 16384 65536 131072]

One kernel reads three layouts: "scattered" has every token in a slot of its own, "assigned" has the slots of a prompt
side by side and those of decode steps in turn, as the scheduler assigns them, and "static" has each request in one
piece. The first two look their slots up; what "static" gains over them is the most that a layout could gain, beside the
lookup itself. "torch" is scaled_dot_product_attention on contiguous tensors, without any lookup. If "assigned" is near
the limit of the device, nothing is left to gain. On a CPU (--device cpu) the sizes are tiny, to try the program.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.bench.ceilings import measure_ceilings
from lightserve.bench.kernel_cases import LLAMA3_8B, TINY, Case, InputFactory, Shape
from lightserve.bench.kernels import row_of
from lightserve.common import ops
from lightserve.common.device import pick_device

LAYOUTS = ("scattered", "assigned", "static")
GENERATED = 8  # one of so many tokens of a request comes from its decode steps
GPU_LOADS, TINY_LOADS = ((1, 2, 4, 8), (4096, 16384, 65536, 131072)), ((1, 2), (16, 40))


def cases_of(shape: Shape, requests: Sequence[int], contexts: Sequence[int], item: int) -> Iterator[Case]:
    for count in requests:
        for context in contexts:
            num_bytes = count * shape.dim * item * (2 * shape.kv_heads * context + 2 * shape.heads)
            flops = 4.0 * count * context * shape.heads * shape.dim
            for layout in LAYOUTS:
                inputs, twin = partial(_inputs, shape, count, context, layout), partial(_torch, shape, count, context)
                is_last = layout == LAYOUTS[-1]
                name, load = f"attention {layout}", f"{count} x {context}"
                yield Case(name, load, inputs, ops.token_attention, _sdpa if is_last else None, num_bytes, flops, twin)


def slots_of(layout: str, count: int, context: int, device: torch.device) -> Tensor:
    """``[count, context]``, all different."""
    if layout == "static":
        return torch.arange(count * context, device=device).view(count, context)
    if layout == "scattered":
        return torch.randperm(count * context, device=device).view(count, context)
    generated = context // GENERATED
    prompts = torch.arange(count * (context - generated), device=device).view(count, -1)
    decodes = torch.arange(count * generated, device=device).view(generated, count).T + prompts.numel()
    return torch.cat((prompts, decodes), dim=1)


def _inputs(shape: Shape, count: int, context: int, layout: str, factory: InputFactory) -> tuple[Any, ...]:
    lengths, rows = factory.ints([context] * count), factory.ints(range(count))
    slots = slots_of(layout, count, context, factory.device).int()
    batch = ops.AttnBatch(slots, rows, rows, lengths, lengths - 1)
    cache = factory.randn(count * context + 1, 2 * shape.kv_heads, shape.dim)
    return factory.randn(count, shape.heads, shape.dim), cache, batch, ops.AttnOptions(shape.dim**-0.5)


def _torch(shape: Shape, count: int, context: int, factory: InputFactory) -> tuple[Tensor, Tensor, Tensor]:
    key, value = (factory.randn(count, shape.kv_heads, context, shape.dim) for _ in range(2))
    return factory.randn(count, shape.heads, 1, shape.dim), key, value


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; omitted: the best one here")
    parser.add_argument("--requests", nargs="+", type=int)
    parser.add_argument("--contexts", nargs="+", type=int)
    args = parser.parse_args(argv)
    platform = pick_device(args.device)
    device, dtype = platform.torch_device(0), platform.dtypes[0]
    platform.bind(device)
    is_cpu = platform.name == "cpu"
    requests, contexts = TINY_LOADS if is_cpu else GPU_LOADS
    ceilings = measure_ceilings(device, dtype)
    print(f"{str(dtype).removeprefix('torch.')} on {platform.name}; {ceilings}")
    print(f"{'layout':20} {'requests':>16} {'us':>10} {'reached':>16} {'of most':>7} {'torch us':>10}")
    loads = args.requests or requests, args.contexts or contexts
    for case in cases_of(TINY if is_cpu else LLAMA3_8B, *loads, dtype.itemsize):
        print(row_of(case, InputFactory(device, dtype), ceilings), flush=True)


if __name__ == "__main__":
    main()
