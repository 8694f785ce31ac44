"""How long the experts of a layer take, part by part, beside the least time for the memory that they read.

    python -m benchmark.kernels.experts [--models qwen3-30b-a3b] [--tokens 1 64 4096] [--configs]
    python -m benchmark.kernels.experts --weights fp8 int4 [--configs]

Every call has other random experts, so that it finds none of them in the cache. The parts and the whole are replayed as
CUDA graphs; "eager" is the whole, launched from Python. "prototype" is what a prototype needed for gate and up, and for
down, on an H200 (bfloat16). --configs times each product with each configuration of tiles and with the grouped matmul:
the rules in triton_kernel/experts follow from that table. --weights takes quantised weights; with --configs, their
products are timed with tiles for its _quantized_expert_linear.py. On a CPU (--device cpu) the shape is tiny,
to try the program.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import product
from math import gcd
from typing import Any

import torch
from torch import Tensor

from lightserve.bench.ceilings import Call, Ceilings, eager_seconds_per_call, measure_ceilings, seconds_per_call
from lightserve.bench.kernel_cases import InputFactory
from lightserve.common import ops
from lightserve.common.device import pick_device
from lightserve.errors import ServerError

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 8192)
# Tiles to compare: pairs, rows of the weight, bytes of a row, warps, stages. See triton_kernel/experts.
CONFIGS = (
    (8, 16, 1024, 1, 4),
    (8, 32, 512, 2, 4),
    (8, 64, 512, 4, 3),
    (16, 32, 512, 4, 4),
    (16, 64, 512, 4, 3),
    (16, 64, 512, 4, 4),
    (16, 128, 256, 4, 4),
    (32, 64, 512, 4, 3),
    (32, 64, 512, 4, 4),
    (32, 128, 256, 4, 4),
    (64, 64, 256, 4, 4),
    (64, 128, 256, 4, 3),
    (64, 128, 256, 4, 4),
    (64, 128, 128, 4, 4),
    (64, 256, 128, 8, 4),
    (128, 128, 128, 4, 4),
    (128, 128, 128, 8, 4),
    (128, 256, 128, 8, 3),
    (256, 128, 128, 8, 3),
)
# Kinds of quantised weights, and the most inputs of each scale; None: one scale per row.
WEIGHTS: dict[str, tuple[type[ops.QuantizedWeight], int | None]] = {
    "fp8": (ops.Fp8Weight, None),
    "fp8-block": (ops.Fp8Weight, 128),
    "int8": (ops.Int8Weight, None),
    "int4": (ops.Int4Weight, 128),
    "int4-32": (ops.Int4Weight, 32),
    "mxfp4": (ops.Mxfp4Weight, 32),
}
# Tiles of quantised weights to compare: rows of the weight, inputs, warps, stages.
QUANTIZED_TILES = tuple(product((32, 64, 128), (64, 128, 256), (4, 8), (3, 4)))
ROUTINGS = 8  # different choices of experts that the calls rotate over


@dataclass(frozen=True, slots=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    width: int
    prototype: dict[int, tuple[float | None, float | None]]  # us of gate and up, and of down, by tokens


SHAPES = {
    "qwen3-30b-a3b": Shape(
        128,
        8,
        2048,
        768,
        {
            1: (13.0, 6.5),
            16: (123, None),
            64: (185, 97),
            256: (194, 104),
            1024: (232, None),
            4096: (437, 252),
            8192: (727, None),
        },
    ),
    "mixtral-8x7b": Shape(
        8, 2, 4096, 14336, {1: (113, None), 16: (424, None), 64: (436, None), 256: (488, None), 4096: (3101, None)}
    ),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408, {}),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, {}),
}
TINY = {"tiny": Shape(6, 2, 128, 128, {})}


class Layer:
    """Random experts, and random choices of them."""

    def __init__(self, shape: Shape, tokens: int, factory: InputFactory, weights: str | None = None) -> None:
        self.shape = shape
        self.x = factory.randn(tokens, shape.hidden)
        self.logits = [factory.randn(tokens, shape.experts) for _ in range(ROUTINGS)]
        self.spec = ops.RouteSpec(shape.top_k, renormalize=True)
        self.routings = [ops.route(logits, self.spec) for logits in self.logits]
        shapes = (shape.experts, 2 * shape.width, shape.hidden), (shape.experts, shape.hidden, shape.width)
        w13, w2 = (_weight(factory, weights, size) for size in shapes)
        self.params = ops.ExpertsParams(w13, w2)

    def num_bytes(self, item: int) -> float:
        """That one call reads and writes at least, on average: the weights of its experts, and the tokens."""
        used = sum(len(set(ids.flatten().tolist())) for ids, _ in self.routings) / ROUTINGS
        stored = self.params.w13.nbytes + self.params.w2.nbytes
        return used / self.shape.experts * stored + 2 * item * self.x.numel()

    def flops(self) -> float:
        return 6.0 * len(self.x) * self.shape.top_k * self.shape.width * self.shape.hidden

    def calls(self) -> list[Call]:
        return [partial(ops.experts, self.x, ids, weights, self.params) for ids, weights in self.routings]

    def route_calls(self) -> list[Call]:
        return [partial(ops.route, logits, self.spec) for logits in self.logits]


def _weight(factory: InputFactory, weights: str | None, shape: tuple[int, ...]) -> Tensor | ops.QuantizedWeight:
    if weights is None:
        return factory.randn(*shape).mul_(shape[-1] ** -0.5)
    kind, group = WEIGHTS[weights]
    group = shape[-1] if group is None else gcd(group, shape[-1])
    weight = kind.empty(shape, group, factory.device)
    weight.randomize_(torch.Generator(factory.device).manual_seed(0), shape[-1] ** -0.5)
    return weight


def table_row(name: str, layer: Layer, ceilings: Ceilings) -> str:
    device, tokens = layer.x.device, len(layer.x)
    floor_us = ceilings.floor_s(layer.num_bytes(layer.x.element_size()), layer.flops()) * 1e6
    whole_us = seconds_per_call(layer.calls(), device) * 1e6
    eager_us = eager_seconds_per_call(layer.calls(), device) * 1e6
    route_us = seconds_per_call(layer.route_calls(), device) * 1e6
    row = f"{name:18} {tokens:6} {whole_us:9.1f} {eager_us:9.1f} {floor_us:9.1f} {floor_us / whole_us:7.1%}"
    row += f" {layer.flops() / whole_us / 1e6:8.1f} {route_us:8.1f}"
    if device.type != "cpu":
        parts = parts_of(layer).values()
        row += "".join(f" {seconds_per_call(calls, device) * 1e6 if calls else 0.0:8.1f}" for calls in parts)
    first, second = layer.shape.prototype.get(tokens, (None, None))
    return f"{row}   {first or '-'} + {second or '-'}"


def parts_of(layer: Layer) -> dict[str, list[Call]]:
    """The kernels of the whole, one by one, as it launches them."""
    from lightserve.common.triton_kernel.experts import experts as kernels

    parts: dict[str, list[Call]] = {"sort": [], "gate_up": [], "down": [], "sum": []}
    for ids, weights in layer.routings:
        plan = kernels.plan_of(layer.x, ids, layer.params)
        gated = plan.gate_up(layer.x, layer.params)
        computed = plan.down(gated, layer.params)
        parts["gate_up"].append(partial(plan.gate_up, layer.x, layer.params))
        parts["down"].append(partial(plan.down, gated, layer.params))
        parts["sum"].append(partial(plan.sum, computed, weights, layer.params))
        if plan.pairs is not None:
            parts["sort"].append(partial(kernels.plan_of, layer.x, ids, layer.params))
    return parts


def config_rows(name: str, layer: Layer) -> Iterator[str]:
    """Each product with each configuration, and with the grouped matmul."""
    for label, plan_of in plans_of(layer).items():
        gate_up, down = [], []
        for ids, _ in layer.routings:
            plan = plan_of(ids)
            gate_up.append(partial(plan.gate_up, layer.x, layer.params))
            down.append(partial(plan.down, plan.gate_up(layer.x, layer.params), layer.params))
        times = " ".join(f"{seconds_per_call(calls, layer.x.device) * 1e6:9.1f}" for calls in (gate_up, down))
        yield f"{name:18} {len(layer.x):6} {label:34} {times}"


def tile_rows(name: str, layer: Layer) -> Iterator[str]:
    """Each product over quantised weights with each tile, for the blocks of pairs that the rules choose."""
    from lightserve.common.triton_kernel.experts import _quantized_expert_linear as kernels, experts

    for values in QUANTIZED_TILES:
        block_m = experts.plan_of(layer.x, layer.routings[0][0], layer.params).config.block_m
        if values[0] * block_m > 128 * 128:
            continue
        kernels.TILES[block_m] = kernels.Tile(*values)
        parts = parts_of(layer)
        times = " ".join(f"{seconds_per_call(parts[part], layer.x.device) * 1e6:9.1f}" for part in ("gate_up", "down"))
        yield f"{name:18} {len(layer.x):6} {block_m} pairs, {' '.join(map(str, values)):20} {times}"


def plans_of(layer: Layer) -> dict[str, Callable[[Tensor], Any]]:
    """The plans that are worth a try for this number of tokens, by name: from the ids to the plan."""
    from lightserve.common.triton_kernel.experts import experts as kernels
    from lightserve.common.triton_kernel.experts._expert_linear import Config
    from lightserve.common.triton_kernel.experts._expert_pairs import sort_pairs

    def sorted_plan(config: Config, is_grouped: bool, ids: Tensor) -> kernels.Plan:
        pairs = sort_pairs(ids, layer.shape.experts, config.block_m)
        return kernels.Plan(ids, config, pairs, is_grouped, is_grouped)

    mean = len(layer.x) * layer.shape.top_k / layer.shape.experts  # pairs of an expert
    plans: dict[str, Callable[[Tensor], Any]] = {}
    for config in (Config(*values) for values in CONFIGS):
        if config.block_m <= 8 * max(mean, 2):
            plans[f"sorted {_label(config)}"] = partial(sorted_plan, config, False)
        if config.block_m == 8 and mean <= 2:
            plans[f"not sorted {_label(config)}"] = partial(kernels.Plan, config=config, pairs=None)
    if mean >= 16:
        plans["grouped"] = partial(sorted_plan, kernels.INVARIANT, True)
    return plans


def _label(config: Any) -> str:
    return " ".join(str(value) for value in astuple(config))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; omitted: the best one here")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, help="kinds of quantised weights")
    parser.add_argument("--configs", action="store_true", help="each product with each configuration")
    args = parser.parse_args(argv)
    kind = pick_device(args.device)
    if kind.name == "cpu" and args.device is None:
        raise ServerError("the benchmark of experts needs a GPU; --device cpu tries the program on a tiny shape")
    device, dtype = kind.torch_device(0), kind.dtypes[0]
    kind.bind(device)
    shapes = TINY if kind.name == "cpu" else {name: SHAPES[name] for name in args.models}
    if args.configs:
        print(f"{'experts':18} {'tokens':>6} {'tiles':34} {'gate_up':>9} {'down':>9}  (us)")
    else:
        ceilings = measure_ceilings(device, dtype)
        print(f"{str(dtype).removeprefix('torch.')} on {kind.name}; {ceilings}")
        columns = [f"{'experts':18} {'tokens':>6} {'us':>9} {'eager':>9} {'least':>9} {'of most':>7}"]
        columns += [f"{column:>8}" for column in ("TFLOP/s", "route", "sort", "gate_up", "down", "sum")]
        print(*columns, "  prototype")
    for (name, shape), weights, tokens in product(shapes.items(), args.weights or [None], args.tokens):
        layer = Layer(shape, tokens, InputFactory(device, dtype), weights)
        label = name if weights is None else f"{name} {weights}"
        if args.configs:
            rows = config_rows(label, layer) if weights is None else tile_rows(label, layer)
        else:
            rows = iter([table_row(label, layer, ceilings)])
        for row in rows:
            print(row, flush=True)


if __name__ == "__main__":
    main()
