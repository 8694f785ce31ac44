"""What sparse attention takes at the sizes of DeepSeek V3.2: the choice of tokens, and attention to those chosen.

    python -m benchmark.kernels.sparse_attention [--heads 16] [--only select]

Heads are those of one rank; every rank has all 64 heads of the indexer. "dense" attends to all tokens, as a model
without an indexer does. On a CPU (--device cpu) the sizes are tiny, to try the program.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.kernels.latent_attention import Lens, batch_of
from lightserve.bench.ceilings import measure_ceilings
from lightserve.bench.kernel_cases import Case, InputFactory
from lightserve.bench.kernels import row_of
from lightserve.common import ops
from lightserve.common.device import pick_device
from lightserve.common.ops.latent_attention import LatentSizes


class Loads(NamedTuple):
    sizes: LatentSizes
    index_heads: int
    index_dim: int
    top_k: int
    steps: tuple[tuple[str, Lens], ...]


STEPS = (
    ("1 x 8192", [(8191, 1)]),
    ("64 x 8192", [(8191, 1)] * 64),
    ("16 x 65536", [(65535, 1)] * 16),
    ("512 behind 8192", [(8192, 512)]),
    ("512 behind 65536", [(65536, 512)]),
)
TINY = Loads(LatentSizes(2, 16, 16, 16, 32), 4, 16, 8, (("2 x 30", [(29, 1)] * 2), ("9 behind 20", [(20, 9)])))


def cases_of(loads: Loads, item: int) -> Iterator[Case]:
    sizes, top_k = loads.sizes, loads.top_k
    for load, lens in loads.steps:
        pairs = sum(new * (ready + new / 2) for ready, new in lens)
        keys, rows = sum(ready + new for ready, new in lens), sum(new for _, new in lens)
        flops, num_bytes = 2.0 * loads.index_heads * loads.index_dim * pairs, keys * loads.index_dim * item
        yield Case("select", load, partial(_selection, loads, lens), ops.select_tokens, None, num_bytes, flops)
        pair_flops, latent_bytes = 2.0 * sizes.heads * (2 * sizes.rank + sizes.rope), (sizes.rank + sizes.rope) * item
        attend = partial(_attention, loads, lens)
        chosen = rows * top_k
        yield Case("chosen", load, partial(attend, top_k), _attend, None, chosen * latent_bytes, chosen * pair_flops)
        if rows == len(lens):
            dense = partial(attend, None)
            yield Case("dense", load, dense, _attend, None, keys * latent_bytes, pairs * pair_flops)


def _selection(loads: Loads, lens: Lens, factory: InputFactory) -> tuple[Any, ...]:
    batch, slots = batch_of(lens, factory)
    q = factory.randn(sum(new for _, new in lens), loads.index_heads, loads.index_dim)
    weights = factory.randn(len(q), loads.index_heads, dtype=torch.float32)
    return q, weights, factory.randn(slots + 1, 1, loads.index_dim), batch, loads.top_k


def _attention(loads: Loads, lens: Lens, top_k: int | None, factory: InputFactory) -> tuple[Any, ...]:
    """The slots of chosen tokens are scattered over the request; ``top_k`` None: all tokens."""
    sizes, (batch, slots) = loads.sizes, batch_of(lens, factory)
    rows = sum(new for _, new in lens)
    if top_k is not None:
        lengths = [ready + new for ready, new in lens for _ in range(new)]
        chosen = [torch.randperm(length)[:top_k].sort().values.int() for length in lengths]
        table, numbers = torch.stack(chosen).to(factory.device), factory.ints(range(rows))
        b_seq_len = factory.ints([top_k] * rows)
        batch = replace(batch, req_to_token=table, b_req_idx=numbers, b_start_loc=numbers, b_seq_len=b_seq_len)
        batch = replace(batch, b_ready_cache_len=b_seq_len - 1)
    q = factory.randn(rows, sizes.heads, sizes.nope + sizes.rope)
    kv_b = factory.randn(sizes.heads, sizes.nope + sizes.value, sizes.rank) * sizes.rank**-0.5
    return q, factory.randn(slots + 1, 1, sizes.rank + sizes.rope), kv_b, batch, ops.AttnOptions(0.1)


def _attend(*args: Any) -> Tensor:
    return ops.latent_token_attention(*args)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; omitted: the best one here")
    parser.add_argument("--heads", type=int, default=16, help="of one rank")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args(argv)
    kind = pick_device(args.device)
    device, dtype = kind.torch_device(0), kind.dtypes[0]
    kind.bind(device)
    sizes = LatentSizes(args.heads, 128, 64, 128, 512)
    loads = TINY if kind.name == "cpu" else Loads(sizes, 64, 128, 2048, STEPS)
    ceilings = measure_ceilings(device, dtype)
    print(f"{str(dtype).removeprefix('torch.')} on {kind.name}; {ceilings}; {loads.sizes}")
    print(f"{'case':20} {'load':>16} {'us':>10} {'reached':>16} {'of most':>7}")
    for case in cases_of(loads, dtype.itemsize):
        if args.only in case.op:
            print(row_of(case, InputFactory(device, dtype), ceilings), flush=True)


if __name__ == "__main__":
    main()
