"""How long the products with quantised weights take, beside bfloat16 and the least time for the memory that they read.

    python -m benchmark.kernels.quantized_linear [--kernels op:int4 int4:few fp8] [--rows 1 16 64] [--sweep]

The shapes are those of Llama-3-8B. A kernel is either an op with a kind of weight ("op:int4"), as it is served, or one
way to compute it ("int4:tiles"); --kernels takes parts of names. --sweep times the ways with other tiles too. Calls
rotate over more memory than the cache holds and are replayed as a CUDA graph. On a CPU (--device cpu) the shapes are
tiny, to try the program.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from lightserve.bench.ceilings import Ceilings, measure_ceilings, seconds_per_call
from lightserve.bench.kernel_cases import InputFactory
from lightserve.common import ops
from lightserve.common.device import pick_device
from lightserve.common.ops import InputQuant, QuantizedWeight
from lightserve.common.quantization.quantized_linear import PRODUCTS
from lightserve.errors import ServerError

SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))  # gate and up, down, qkv, o: [out, in]
TINY = ((48, 256),)
ROWS = (1, 16, 64, 128, 256, 1024, 4096)
ROTATED_BYTES = 256 * 2**20  # over five times the L2 cache of an H200
MAX_COPIES = 64
BASELINE = "bf16"

Weight = Tensor | QuantizedWeight
Product = Callable[[Tensor, Weight], object]
MakeWeight = Callable[[tuple[int, int], InputFactory], QuantizedWeight]


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    weight: Callable[[tuple[int, int], InputFactory], Weight]
    product: Product
    most_rows: int = 1 << 30  # that are worth a try


def random_weight(
    kind: type[QuantizedWeight],
    group: int | None,
    has_offsets: bool,
    input_quant: InputQuant,
    shape: tuple[int, int],
    factory: InputFactory,
) -> QuantizedWeight:
    weight = kind.empty(
        shape, group or shape[1], factory.device, has_offsets=has_offsets, input_quant=_usable(input_quant, factory)
    )
    weight.randomize_(torch.Generator(factory.device).manual_seed(0), shape[1] ** -0.5)
    return weight


def _usable(input_quant: InputQuant, factory: InputFactory) -> InputQuant:
    """A CPU rounds no inputs."""
    return input_quant if factory.device.type != "cpu" else InputQuant.NONE


def codebook_weight(shape: tuple[int, int], factory: InputFactory) -> ops.Codebook4Weight:
    weight = random_weight(ops.Int4Weight, 64, False, InputQuant.NONE, shape, factory)
    codebook = factory.randn(16, dtype=torch.float32)
    return ops.Codebook4Weight(codes=weight.codes, scales=weight.scales, codebook=codebook)


def zero_point_weight(shape: tuple[int, int], factory: InputFactory) -> QuantizedWeight:
    """As AWQ and GPTQ store it."""
    weight = random_weight(ops.Int4Weight, 128, True, InputQuant.NONE, shape, factory)
    zeros = torch.arange(weight.scales.numel(), device=factory.device).view(weight.scales.shape) % 16
    return replace(weight, offsets=(8 - zeros) * weight.scales, has_zero_points=True)


def as_served(usual: MakeWeight, shape: tuple[int, int], factory: InputFactory) -> QuantizedWeight:
    """In the layout that the backend has for it."""
    weight = usual(shape, factory)
    return stored(weight, ops.empty_packed(weight, factory.device))


def stored(weight: QuantizedWeight, packed: QuantizedWeight | None) -> QuantizedWeight:
    if packed is None:
        return weight
    packed.store_(weight)
    return packed


# by name: kind, group, has offsets, how inputs are rounded
KINDS: dict[str, tuple[type[QuantizedWeight], int | None, bool, InputQuant]] = {
    "int4": (ops.Int4Weight, 128, False, InputQuant.NONE),
    "int4-offsets": (ops.Int4Weight, 128, True, InputQuant.NONE),
    "int4-groups-of-32": (ops.Int4Weight, 32, True, InputQuant.NONE),
    "int8": (ops.Int8Weight, None, False, InputQuant.TOKEN),
    "int8-weight-only": (ops.Int8Weight, 128, False, InputQuant.NONE),
    "fp8": (ops.Fp8Weight, None, False, InputQuant.TOKEN),
    "fp8-groups": (ops.Fp8Weight, 128, False, InputQuant.GROUP),
    "fp8-weight-only": (ops.Fp8Weight, None, False, InputQuant.NONE),
    "mxfp4": (ops.Mxfp4Weight, 32, False, InputQuant.NONE),
}


def _op(x: Tensor, weight: Weight) -> object:
    return ops.linear(x, weight) if isinstance(weight, Tensor) else PRODUCTS[type(weight)](x, weight, None)


def op_kernels() -> Iterator[Kernel]:
    """The ops as they are served."""
    yield Kernel(BASELINE, lambda shape, factory: factory.randn(*shape), _op)
    for name, settings in KINDS.items():
        yield Kernel(f"op:{name}", partial(as_served, partial(random_weight, *settings)), _op)
    yield Kernel("op:int4-zero-points", partial(as_served, zero_point_weight), _op)
    yield Kernel("op:codebook4", codebook_weight, _op)


def int4_kernels(is_sweep: bool) -> Iterator[Kernel]:
    """The ways to compute linear_int4; with a sweep, also with other tiles."""
    from lightserve.common.triton_kernel.linear import _int4_tiles as tiles, dequantize, linear_int4 as few
    from lightserve.common.triton_kernel.linear._tiled_int4 import empty_tiled

    few_configs = [few.WIDE, few.NARROW, few.DEEP]
    tile_configs = []
    if is_sweep:
        settings = product((16, 32), (4, 8), (1, 2, 4), (3, 4), (1, 2, 4))
        few_configs = [few.Config(*values) for values in settings]
        tile_settings = list(product((16, 32, 64, 128), (64, 128), (4, 8), (3, 4), (1, 2, 4)))
        tile_configs = [tiles.Config(*values) for values in tile_settings]
    for name, weight in (
        ("int4", partial(random_weight, *KINDS["int4"])),
        ("int4-offsets", partial(random_weight, *KINDS["int4-offsets"])),
        ("int4-zero-points", zero_point_weight),
    ):
        for config in few_configs:
            label = f"{name}:few:{_label(config)}"
            yield Kernel(label, weight, lambda x, w, c=config: few.multiply(x, w, None, c), 64)  # type: ignore[misc]

        def in_tiles(shape: tuple[int, int], factory: InputFactory, usual: MakeWeight = weight) -> QuantizedWeight:
            return stored(usual(shape, factory), empty_tiled(usual(shape, factory), factory.device))

        yield Kernel(f"{name}:tiles", in_tiles, lambda x, w: tiles.multiply(x, w, None, tiles.config_of(x, w)), 256)  # type: ignore[arg-type]
        for tile in tile_configs:
            label = f"{name}:tiles:{_label(tile)}"
            yield Kernel(label, in_tiles, lambda x, w, c=tile: tiles.multiply(x, w, None, c), 512)  # type: ignore[misc]
        yield Kernel(f"{name}:dequantize", weight, lambda x, w: dequantize.linear_dequantized(x, w, None))  # type: ignore[arg-type]


def _label(config: object) -> str:
    return "-".join(str(getattr(config, name)) for name in config.__slots__)  # type: ignore[attr-defined]


def table_row(kernel: Kernel, shape: tuple[int, int], rows: int, factory: InputFactory, ceilings: Ceilings) -> str:
    weight = kernel.weight(shape, factory)
    copies = min(max(2, round(ROTATED_BYTES / weight.nbytes)), MAX_COPIES) if factory.device.type != "cpu" else 1
    weights = [weight, *(kernel.weight(shape, factory) for _ in range(copies - 1))]
    x = factory.randn(rows, shape[1])
    seconds = seconds_per_call([partial(kernel.product, x, each) for each in weights], factory.device)
    num_bytes = weight.nbytes + x.nbytes + rows * shape[0] * x.element_size()
    floor_s = ceilings.floor_s(num_bytes, 2.0 * rows * shape[0] * shape[1])
    name = f"{kernel.name:36} {f'[{shape[0]}, {shape[1]}]':>15} {rows:6}"
    times = f"{seconds * 1e6:9.1f} {floor_s * 1e6:9.1f} {floor_s / seconds:7.1%}"
    return f"{name} {times} {weight.nbytes / seconds / 1e12:7.2f}"


def rows_of_table(
    kernels: Sequence[Kernel], shapes: Sequence[tuple[int, int]], rows: Sequence[int], factory: InputFactory
) -> Iterator[str]:
    ceilings = measure_ceilings(factory.device, factory.dtype)
    yield f"{str(factory.dtype).removeprefix('torch.')}; {ceilings}; the least time is that of {BASELINE} products"
    yield f"{'kernel':36} {'weight':>15} {'rows':>6} {'us':>9} {'least':>9} {'of most':>7} {'TB/s':>7}"
    for shape, count, kernel in product(shapes, rows, kernels):
        if count > kernel.most_rows:
            continue
        try:
            yield table_row(kernel, shape, count, factory, ceilings)
        except Exception as error:  # a candidate may not fit; the others go on
            yield f"{kernel.name:36} {f'[{shape[0]}, {shape[1]}]':>15} {count:6} fails: {str(error)[:80]!r}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; omitted: the best one here")
    parser.add_argument(
        "--kernels", nargs="+", default=[BASELINE, "op:"], help="those whose name contains one of these"
    )
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--sweep", action="store_true", help="other tiles too")
    args = parser.parse_args(argv)
    kind = pick_device(args.device)
    if kind.name == "cpu" and args.device is None:
        raise ServerError("the benchmark of quantised linears needs a GPU; --device cpu tries the program")
    device, dtype = kind.torch_device(0), kind.dtypes[0]
    kind.bind(device)
    kernels = [*op_kernels(), *(int4_kernels(args.sweep) if kind.name != "cpu" else ())]
    chosen = [kernel for kernel in kernels if any(part in kernel.name for part in args.kernels)]
    shapes = TINY if kind.name == "cpu" else SHAPES
    for row in rows_of_table(chosen, shapes, args.rows, InputFactory(device, dtype)):
        print(row, flush=True)


if __name__ == "__main__":
    main()
