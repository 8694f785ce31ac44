"""How long LoRA adapters take in a layer, beside the least time for the memory that they read.

    python -m benchmark.kernels.lora [--tokens 1 64 2048] [--adapters 8] [--rank 16] [--linears | --configs]

The products are those of Llama-3-8B; the rows use the adapters in turn. Calls are replayed as a CUDA graph, each with
other weights, so that none is in the cache. "step ms" is what all layers of a step take. --linears times each linear of
a layer, with the norm before it and the activation behind it: without adapters, with add_lora behind the product, and
with shrink in or beside the product, as the model computes it. --configs times shrink and expand with other tiles: the
constants of triton_kernel/lora follow from that table. On a CPU (--device cpu) the shapes are tiny, to try the
program.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.bench.ceilings import Ceilings, measure_ceilings, seconds_per_call
from lightserve.bench.kernel_cases import InputFactory
from lightserve.common import ops
from lightserve.common.device import pick_device
from lightserve.errors import ServerError
from lightserve.worker.lora import write_groups

TOKENS = (1, 8, 64, 256, 2048)
ROTATED = 16  # copies of the weights
LAYERS = 32
LARGE = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336,) * 2),
    "down": (14336, (4096,)),
}
SMALL = {"qkv": (64, (64, 32, 32)), "down": (96, (64,))}
HAS_NORM = ("qkv", "gate_up")
EPS = 1e-5
SHRINK_CONFIGS = tuple(product((256, 512, 1024), (4, 8, 16), (2, 4, 8)))  # bytes of a tile's row, splits, warps
EXPAND_CONFIGS = tuple(product((32, 64, 128, 256), (2, 4, 8)))  # columns, warps


@dataclass(frozen=True, slots=True)
class Load:
    """One product of a layer, with a batch of rows."""

    in_size: int
    parts: tuple[int, ...]
    tokens: int
    adapters: int
    rank: int

    def num_bytes(self, item_bytes: int) -> int:
        """Of the adapters that rows use, of x, and of the output, which is read and written."""
        used = min(self.tokens, self.adapters)
        weights = self.rank * (len(self.parts) * self.in_size + sum(self.parts))
        return item_bytes * (used * weights + self.tokens * (self.in_size + 2 * sum(self.parts)))

    def inputs(self, factory: InputFactory) -> tuple[Tensor, Tensor, ops.LoraWeights, ops.LoraRows]:
        a = factory.randn(self.adapters, len(self.parts) * self.rank, self.in_size)
        b = factory.randn(self.adapters, sum(self.parts), self.rank)
        ends = tuple(np.cumsum(self.parts).tolist())
        out, x = factory.randn(self.tokens, sum(self.parts)), factory.randn(self.tokens, self.in_size)
        return out, x, ops.LoraWeights(a, b, ends), self.rows(factory)

    def rows(self, factory: InputFactory) -> ops.LoraRows:
        size = ops.lora_group_rows(self.tokens)
        rows = np.zeros(self.tokens, dtype=np.int32)
        groups = np.full((3, ops.max_lora_groups(self.tokens, self.adapters, size)), ops.NO_LORA, dtype=np.int32)
        write_groups(rows, groups, np.arange(self.tokens) % self.adapters, self.tokens)
        return ops.LoraRows(
            torch.from_numpy(rows).to(factory.device), torch.from_numpy(groups).to(factory.device), size
        )


def seconds_of(load: Load, factory: InputFactory, call: Callable[..., object]) -> float:
    copies = ROTATED if factory.device.type != "cpu" else 2
    return seconds_per_call([partial(call, *load.inputs(factory)) for _ in range(copies)], factory.device)


def print_products(
    shapes: dict[str, tuple[int, tuple[int, ...]]], args: argparse.Namespace, factory: InputFactory, ceilings: Ceilings
) -> None:
    print(f"{'tokens':>8} {'product':>8} {'us':>8} {'floor us':>9} {'of it':>7} {'step ms':>8}")
    for tokens in args.tokens:
        total = 0.0
        for name, (in_size, parts) in shapes.items():
            load = Load(in_size, parts, tokens, args.adapters, args.rank)
            taken_s = seconds_of(load, factory, ops.add_lora)
            floor_s = ceilings.floor_s(load.num_bytes(factory.dtype.itemsize), 0)
            total += LAYERS * taken_s
            row = f"{tokens:8} {name:>8} {taken_s * 1e6:8.1f} {floor_s * 1e6:9.1f} {taken_s / floor_s:6.1f}x"
            print(f"{row} {total * 1e3:8.3f}", flush=True)


class Layer(NamedTuple):
    """A linear of a layer and its input."""

    x: Tensor
    residual: Tensor
    norm_weight: Tensor
    linear: ops.LoraLinear


def layer_of(load: Load, factory: InputFactory) -> Layer:
    _, x, weights, rows = load.inputs(factory)
    weight = factory.randn(sum(load.parts), load.in_size)
    residual, norm_weight = factory.randn(load.tokens, load.in_size), factory.randn(load.in_size)
    return Layer(x, residual, norm_weight, ops.LoraLinear(weight, None, weights, rows))


def without_adapters(name: str, layer: Layer) -> None:
    x, residual, norm_weight, linear = layer
    if name not in HAS_NORM:
        ops.linear(x, linear.weight)
    elif name == "gate_up":
        ops.add_rms_norm_gate_up(x, residual, norm_weight, EPS, linear.weight)
    else:
        ops.add_rms_norm_linear(x, residual, norm_weight, EPS, linear.weight)


def with_add_lora(name: str, layer: Layer) -> None:
    x, residual, norm_weight, linear = layer
    if name in HAS_NORM:
        x = ops.add_rms_norm(x, residual, norm_weight, EPS)
    out = ops.linear(x, linear.weight)
    ops.add_lora(out, x, linear.lora, linear.rows)
    if name == "gate_up":
        ops.silu_and_mul(out)


def with_lora_linear(name: str, layer: Layer) -> None:
    x, residual, norm_weight, linear = layer
    if name not in HAS_NORM:
        ops.lora_linear(x, linear)
        return
    out, _ = ops.add_rms_norm_lora_linear(x, residual, norm_weight, EPS, linear)
    if name == "gate_up":
        ops.silu_and_mul(out)


def print_linears(
    shapes: dict[str, tuple[int, tuple[int, ...]]], args: argparse.Namespace, factory: InputFactory
) -> None:
    print(f"{'tokens':>8} {'linear':>8} {'none us':>9} {'add_lora':>9} {'now':>9}   ms that adapters add to a step")
    copies = ROTATED if factory.device.type != "cpu" else 2
    for tokens in args.tokens:
        added = [0.0, 0.0]
        for name, (in_size, parts) in shapes.items():
            load = Load(in_size, parts, tokens, args.adapters, args.rank)
            layers = [layer_of(load, factory) for _ in range(copies)]
            none_s, apart_s, now_s = (
                seconds_per_call([partial(call, name, layer) for layer in layers], factory.device)
                for call in (without_adapters, with_add_lora, with_lora_linear)
            )
            added = [
                total + LAYERS * (taken_s - none_s) for total, taken_s in zip(added, (apart_s, now_s), strict=True)
            ]
            row = f"{tokens:8} {name:>8} {none_s * 1e6:9.1f} {apart_s * 1e6:9.1f} {now_s * 1e6:9.1f}"
            print(f"{row}   {added[0] * 1e3:.3f} before, {added[1] * 1e3:.3f} now", flush=True)


def print_configs(
    shapes: dict[str, tuple[int, tuple[int, ...]]], args: argparse.Namespace, factory: InputFactory
) -> None:
    from lightserve.common.triton_kernel.lora.add_lora import Config, expand, shrink

    def shrunk(
        out: Tensor, x: Tensor, weights: ops.LoraWeights, rows: ops.LoraRows, config: Config, splits: int
    ) -> Tensor:
        return shrink(x, weights, rows, splits, rows.max_group, config)

    def expanded(out: Tensor, x: Tensor, weights: ops.LoraWeights, rows: ops.LoraRows, config: Config) -> None:
        hidden = x.new_empty((4, len(x), weights.num_parts * weights.rank), dtype=torch.float32)
        expand(out, hidden, weights, rows, rows.max_group, config)

    for tokens, (name, (in_size, parts)) in product(args.tokens, shapes.items()):
        load = Load(in_size, parts, tokens, args.adapters, args.rank)
        for tile_bytes, splits, warps in SHRINK_CONFIGS:
            config = Config(tile_bytes=tile_bytes, shrink_warps=warps)
            taken_s = seconds_of(load, factory, partial(shrunk, config=config, splits=splits))
            setting = f"shrink {tile_bytes:5} bytes {splits:3} splits {warps} warps"
            print(f"{tokens:6} {name:>8} {setting} {taken_s * 1e6:7.1f} us", flush=True)
        for columns, warps in EXPAND_CONFIGS:
            config = Config(columns=columns, expand_warps=warps)
            taken_s = seconds_of(load, factory, partial(expanded, config=config))
            setting = f"expand {columns:5} columns, 4 splits {warps} warps"
            print(f"{tokens:6} {name:>8} {setting} {taken_s * 1e6:7.1f} us", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; omitted: the best one here")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="rows of a step")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--linears", action="store_true", help="compare whole linears with and without adapters")
    modes.add_argument("--configs", action="store_true", help="compare tiles")
    args = parser.parse_args(argv)
    kind = pick_device(args.device)
    if kind.name == "cpu" and (args.device is None or args.configs):
        raise ServerError("this benchmark needs a GPU; --device cpu without --configs tries the program on tiny shapes")
    device, dtype = kind.torch_device(0), kind.dtypes[0]
    kind.bind(device)
    ceilings = measure_ceilings(device, dtype)
    shapes = SMALL if kind.name == "cpu" else LARGE
    factory = InputFactory(device, dtype)
    print(
        f"{str(dtype).removeprefix('torch.')} on {kind.name}; {ceilings}; {args.adapters} adapters of rank {args.rank}"
    )
    if args.configs:
        print_configs(shapes, args, factory)
    elif args.linears:
        print_linears(shapes, args, factory)
    else:
        print_products(shapes, args, factory, ceilings)


if __name__ == "__main__":
    main()
