"""How close latent attention comes to the limits of the device, at the sizes of DeepSeek V2 and V3.

    python -m benchmark.kernels.latent_attention [--heads 16] [--only decode]
    python -m benchmark.kernels.latent_attention --only prompt --prompt_tiles 64,64,4,2
    python -m benchmark.kernels.latent_attention --kv_dtype fp8

Heads are those of one rank: 16 are DeepSeek-V2-Lite's, or V3's on 8 ranks. On a CPU (--device cpu) the sizes are tiny,
to try the program. "decode" is the kernel alone, "decode op" with its products with kv_b. "prompt" includes all that
the op computes: expanded keys and values of new and cached tokens. Other tiles than the kernels' own can be tried.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightserve.bench.ceilings import measure_ceilings
from lightserve.bench.kernel_cases import Case, InputFactory
from lightserve.bench.kernels import row_of
from lightserve.bench.kv_dtype_cases import CODES
from lightserve.common import ops
from lightserve.common.device import pick_device
from lightserve.common.ops.latent_attention import LatentSizes, latent_sizes

SCALE_BYTES = 4  # of a token
Lens = list[tuple[int, int]]  # tokens in the cache and new tokens of each request


class Loads(NamedTuple):
    sizes: LatentSizes
    requests: tuple[int, ...]  # of a decode step
    context: int  # tokens of each
    prompts: tuple[tuple[str, Lens], ...]
    kv_dtype: str | None = None

    def latent_bytes(self, item: int) -> int:
        """Of a cached token, whose numbers have ``item`` bytes each if they are not quantised."""
        rank, rope = self.sizes.rank, self.sizes.rope
        return (rank + rope) * item if self.kv_dtype is None else rank + SCALE_BYTES + rope * item


def deepseek(heads: int) -> Loads:
    prompts = (
        ("128", [(0, 128)]),
        ("8000", [(0, 8000)]),
        ("8 x 1024", [(0, 1024)] * 8),
        ("512 behind 8000", [(8000, 512)]),
        ("2048 behind 6000", [(6000, 2048)]),
        ("64 behind 2048", [(2048, 64)]),
        ("448 and 64 x 1150", [(0, 448), *[(1150, 1)] * 64]),
    )
    return Loads(LatentSizes(heads, 128, 64, 128, 512), (1, 8, 64, 256), 4096, prompts)


TINY = Loads(LatentSizes(2, 16, 16, 16, 32), (1, 3), 20, (("9 behind 5", [(5, 9)]), ("6 and 1", [(0, 6), (4, 1)])))


def cases_of(loads: Loads, item: int, has_kernels: bool) -> Iterator[Case]:
    sizes, context = loads.sizes, loads.context
    latent_bytes = loads.latent_bytes(item)
    for requests in loads.requests:
        inputs = partial(_decode_inputs, loads, [(context - 1, 1)] * requests)
        query_bytes = sizes.heads * (2 * sizes.rank + sizes.rope) * item
        num_bytes = requests * (context * latent_bytes + query_bytes)
        flops = 2.0 * sizes.heads * (2 * sizes.rank + sizes.rope) * requests * context
        load = f"{requests} x {context}"
        if has_kernels:
            yield Case("decode", load, partial(_absorbed_inputs, inputs), _attend_absorbed, None, num_bytes, flops)
        weight_bytes = sizes.heads * (sizes.nope + sizes.value) * sizes.rank * item
        yield Case("decode op", load, inputs, ops.latent_token_attention, None, num_bytes + weight_bytes, flops)
        rows = requests * (latent_bytes + sizes.heads * sizes.rope * item)
        yield Case(
            "write_latent", f"{requests}", partial(_write_inputs, loads, requests), ops.write_latent, None, 2 * rows
        )
    for load, lens in loads.prompts:
        yield _prompt_case(loads, load, lens, item)


def _prompt_case(loads: Loads, load: str, lens: Lens, item: int) -> Case:
    """Its least work: prompts with all their keys expanded once, decodes absorbed."""
    sizes = loads.sizes
    expanded = 2.0 * sizes.heads * (sizes.nope + sizes.value) * sizes.rank
    flops, num_bytes = 0.0, 0.0
    for ready, new in lens:
        pairs = new * (ready + new / 2)
        num_bytes += (ready + new) * loads.latent_bytes(item)
        if new == 1:
            flops += 2.0 * sizes.heads * (2 * sizes.rank + sizes.rope) * ready
        else:
            flops += 2.0 * sizes.heads * (sizes.nope + sizes.rope + sizes.value) * pairs + expanded * (ready + new)
    inputs = partial(_prompt_inputs, loads, lens)
    return Case("prompt", load, inputs, ops.latent_context_attention, None, num_bytes, flops)


def batch_of(lens: Lens, factory: InputFactory) -> tuple[ops.AttnBatch, int]:
    """Slots as a scheduler assigns them: those of a request are neighbours. Also their number."""
    seq_lens = [ready + new for ready, new in lens]
    table = torch.zeros(len(lens), max(seq_lens), dtype=torch.int32)
    first = 0
    for row, seq_len in enumerate(seq_lens):
        table[row, :seq_len] = torch.arange(first, first + seq_len)
        first += seq_len
    starts = [sum(new for _, new in lens[:i]) for i in range(len(lens))]
    news = [new for _, new in lens]
    batch = ops.AttnBatch(
        req_to_token=table.to(factory.device),
        b_req_idx=factory.ints(range(len(lens))),
        b_start_loc=factory.ints(starts),
        b_seq_len=factory.ints(seq_lens),
        b_ready_cache_len=factory.ints([ready for ready, _ in lens]),
        has_decodes=1 in news,
    )
    return batch, first


def _cache(loads: Loads, slots: int, factory: InputFactory) -> ops.LatentCache:
    sizes = loads.sizes
    cache = factory.randn(slots, 1, sizes.rank + sizes.rope)
    if loads.kv_dtype is None:
        return cache
    codes = torch.empty(slots, 1, sizes.rank, dtype=CODES[loads.kv_dtype], device=cache.device)
    quantized = ops.QuantizedLatents(codes, cache.new_empty(slots, 1, dtype=torch.float32), cache[..., sizes.rank :])
    quantized.write(cache[:, 0], torch.arange(slots, device=cache.device))
    return replace(quantized, key_parts=quantized.key_parts.contiguous())


def _decode_inputs(loads: Loads, lens: Lens, factory: InputFactory) -> tuple[Any, ...]:
    sizes = loads.sizes
    batch, slots = batch_of(lens, factory)
    tokens = sum(new for _, new in lens)
    q = factory.randn(tokens, sizes.heads, sizes.nope + sizes.rope)
    kv_b = factory.randn(sizes.heads, sizes.nope + sizes.value, sizes.rank) * sizes.rank**-0.5
    cache = _cache(loads, slots + 1, factory)
    return q, cache, kv_b, batch, ops.AttnOptions((sizes.nope + sizes.rope) ** -0.5)


def _absorbed_inputs(inputs: Any, factory: InputFactory) -> tuple[Any, ...]:
    q, cache, kv_b, batch, options = inputs(factory)
    sizes = latent_sizes(q, cache, kv_b)
    return factory.randn(len(q), sizes.heads, sizes.rank), q[..., sizes.nope :], cache, batch, options.scale, sizes


def _attend_absorbed(*args: Any) -> Tensor:
    from lightserve.common.triton_kernel.latent.latent_token_attention import (
        attend_absorbed,  # a CPU does without Triton
    )

    return attend_absorbed(*args)


def _prompt_inputs(loads: Loads, lens: Lens, factory: InputFactory) -> tuple[Any, ...]:
    q, *others = _decode_inputs(loads, lens, factory)
    return q, factory.randn(len(q), loads.sizes.rank + loads.sizes.rope), *others


def _write_inputs(loads: Loads, tokens: int, factory: InputFactory) -> tuple[Any, ...]:
    sizes = loads.sizes
    q = factory.randn(tokens, sizes.heads, sizes.nope + sizes.rope)
    latent = factory.randn(tokens, sizes.rank + sizes.rope)
    cos, sin = (factory.randn(tokens, sizes.rope // 2, dtype=torch.float32) for _ in range(2))
    norm = ops.LatentNorm(factory.randn(sizes.rank), 1e-6)
    cache = _cache(loads, tokens + 1, factory)
    return q, latent, norm, ops.RotaryAngles(cos, sin), factory.ints(range(tokens)), cache


def _use_tiles(decode: list[int] | None, prompt: list[int] | None) -> None:
    from lightserve.common.triton_kernel.latent import latent_context_attention, latent_token_attention

    if decode is not None:
        block_h, *others = decode
        config = latent_token_attention.Config(block_h, *others)
        latent_token_attention.config_of = lambda dtype, sizes, has_codes=False: config
    if prompt is not None:
        tiling = latent_context_attention.Tiling(*prompt)
        latent_context_attention.tiling_of = lambda element_bytes, sizes: tiling


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; omitted: the best one here")
    parser.add_argument("--heads", type=int, default=16, help="of one rank")
    parser.add_argument("--kv_dtype", choices=sorted(CODES), help="omitted: latents are not quantised")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--decode_tiles", type=_numbers, help="heads, keys, warps, stages, programs on a processor")
    parser.add_argument("--prompt_tiles", type=_numbers, help="tokens, keys, warps, stages")
    args = parser.parse_args(argv)
    kind = pick_device(args.device)
    device, dtype = kind.torch_device(0), kind.dtypes[0]
    kind.bind(device)
    if kind.name != "cpu":
        _use_tiles(args.decode_tiles, args.prompt_tiles)
    loads = (TINY if kind.name == "cpu" else deepseek(args.heads))._replace(kv_dtype=args.kv_dtype)
    ceilings = measure_ceilings(device, dtype)
    print(f"{str(dtype).removeprefix('torch.')} on {kind.name}; {ceilings}; {loads.sizes}")
    print(f"{'case':20} {'load':>16} {'us':>10} {'reached':>16} {'of most':>7}")
    for case in cases_of(loads, dtype.itemsize, has_kernels=kind.name != "cpu"):
        if args.only in case.op:
            print(row_of(case, InputFactory(device, dtype), ceilings), flush=True)


if __name__ == "__main__":
    main()
