"""How long linears with 8-bit weights take, beside bfloat16 and the least time to read the weight.

    python -m benchmark.kernels.eight_bit_linear [--weights down] [--rows 1 64 4096] [--configs] [--device cpu]

"fp8", "fp8 block" and "int8" round their input, which is part of the time; "product" is the product alone. "w8a16" are
weights with inputs that are not rounded. --configs times the Triton kernels with each configuration of tiles, and each
of torch's products: the rules in triton_kernel/linear follow from these tables. On a CPU the shapes are
tiny, to try the program.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lightserve.bench.ceilings import measure_ceilings, seconds_per_call
from lightserve.common import ops
from lightserve.common.device import pick_device
from lightserve.common.ops import Fp8Weight, InputQuant, Int8Weight, QuantizedWeight, RowQuant
from lightserve.errors import ServerError

WEIGHTS = {"gate_up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "o": (4096, 4096)}  # of Llama-3-8B
TINY = {"tiny": (64, 128)}
ROWS = (1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 4096)
CACHE_BYTES = 200e6  # copies of a weight exceed it together, so that no call finds its weight in the cache
MAX_COPIES = 16
# Tiles to compare: rows of the weight, inputs, warps, stages.
CONFIGS = tuple(
    (block_n, block_k, warps, stages)
    for block_n, warps in ((16, 1), (32, 2), (64, 4), (128, 4))
    for block_k in (128, 256, 512)
    for stages in (3, 4, 6)
)
GROUP = 128


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to store a weight and to round its input."""

    weight: type[QuantizedWeight]
    input_quant: InputQuant
    group: int | None = None

    def new(self, shape: tuple[int, int], device: torch.device) -> Any:
        weight = self.weight.empty(shape, self.group or shape[1], device, input_quant=self.input_quant)
        weight.randomize_(torch.Generator(device).manual_seed(0), 0.02)
        return weight.share_scales(GROUP) if isinstance(weight, Fp8Weight) and self.group else weight

    @property
    def op(self) -> Callable[[Tensor, Any], Tensor]:
        return ops.linear_fp8 if self.weight is Fp8Weight else ops.linear_int8


KINDS = {
    "fp8": Kind(Fp8Weight, InputQuant.TOKEN),
    "fp8 block": Kind(Fp8Weight, InputQuant.GROUP, GROUP),
    "int8": Kind(Int8Weight, InputQuant.TOKEN),
    "fp8 w8a16": Kind(Fp8Weight, InputQuant.NONE),
    "int8 w8a16": Kind(Int8Weight, InputQuant.NONE),
}


def copies_of(weight: QuantizedWeight) -> list[Any]:
    count = min(max(int(CACHE_BYTES // weight.nbytes) + 1, 2), MAX_COPIES) if weight.device.type != "cpu" else 1
    return [replace(weight, codes=weight.codes.clone()) for _ in range(count)]


def microseconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    return seconds_per_call(calls, device) * 1e6


def table_row(shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device) -> list[float]:
    """bfloat16, then each kind, then its product alone where inputs are rounded."""
    x = torch.randn(rows, shape[1], dtype=dtype, device=device)
    dense = [torch.randn(shape, dtype=dtype, device=device) for _ in range(2)]
    times = [microseconds([partial(ops.linear, x, weight) for weight in dense], device)]
    for kind in KINDS.values():
        weights = copies_of(kind.new(shape, device))
        times.append(microseconds([partial(kind.op, x, weight) for weight in weights], device))
        quant = ops.row_quant_of(weights[0])
        if quant is not None:
            codes = ops.quantize_rows(x, quant)
            only = ops.linear_quantized_rows
            product_only = [partial(only, *codes, weight, None, dtype) for weight in weights]
            times.append(microseconds(product_only, device))
    return times


def columns() -> list[str]:
    names = ["bf16"]
    for name, kind in KINDS.items():
        names += [name] if kind.input_quant is InputQuant.NONE else [name, "product"]
    return names


def config_rows(
    shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, float]]:
    from lightserve.common.triton_kernel.linear import _eight_bit_linear, _scaled_products, _weight_only_linear

    x = torch.randn(rows, shape[1], dtype=dtype, device=device)
    torch_products: dict[str, list[Any]] = {
        "fp8": [_scaled_products.tensorwise, _scaled_products.rowwise],
        "fp8 block": [_scaled_products.blockwise],
        "int8": [_scaled_products.int_product],
    }
    for name, kind in KINDS.items():
        weights = copies_of(kind.new(shape, device))
        quant: RowQuant | None = ops.row_quant_of(weights[0])
        codes = None if quant is None else ops.quantize_rows(x, quant)
        for values in CONFIGS:
            config = _eight_bit_linear.Config(*values)
            if codes is None:
                calls = [partial(_weight_only_linear.multiply, x, weight, None, config) for weight in weights]
            else:
                calls = [partial(_eight_bit_linear.multiply, codes, weight, None, dtype, config) for weight in weights]
            yield f"{name} {values}", microseconds(calls, device)
        for function in torch_products.get(name, []):
            calls = [partial(function, codes, weight, None, dtype) for weight in weights]
            yield f"{name} {function.__name__}", _microseconds_or_nan(calls, device)


def _microseconds_or_nan(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Torch refuses some numbers of rows."""
    try:
        calls[0]()
    except (RuntimeError, ValueError, NotImplementedError):
        return float("nan")
    return microseconds(calls, device)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; omitted: the best one here")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--configs", action="store_true", help="each kernel with each configuration")
    args = parser.parse_args(argv)
    kind = pick_device(args.device)
    if kind.name == "cpu" and args.device is None:
        raise ServerError("the benchmark of 8-bit linears needs a GPU; --device cpu tries the program on a tiny shape")
    device, dtype = kind.torch_device(0), kind.dtypes[0]
    kind.bind(device)
    shapes = TINY if kind.name == "cpu" else {name: WEIGHTS[name] for name in args.weights}
    if not args.configs:
        ceilings = measure_ceilings(device, dtype)
        print(f"{kind.name}; {ceilings}")
        print(f"{'weight':8} {'rows':>6}", *(f"{column:>10}" for column in columns()), f"{'least':>8}  (us)")
    for (name, shape), rows in product(shapes.items(), args.rows):
        if args.configs:
            for label, time in config_rows(shape, rows, dtype, device):
                print(f"{name:8} {rows:6} {label:34} {time:9.1f}", flush=True)
            continue
        times = " ".join(f"{time:10.1f}" for time in table_row(shape, rows, dtype, device))
        least = shape[0] * shape[1] / ceilings.bytes_per_s * 1e6
        print(f"{name:8} {rows:6} {times} {least:8.1f}", flush=True)


if __name__ == "__main__":
    main()
